"""The stable embedding: each of its three options has an effect."""

import math

import pytest
import torch
from torch import nn

from tests.conftest import seed
from trimtab import optim
from trimtab.nn.embedding import StableEmbedding


def build(words: int = 300, width: int = 64, **switches: object) -> StableEmbedding:
    torch.manual_seed(0)
    return StableEmbedding(words, width, **switches)


def test_xavier_weights_are_uniform_within_their_bound_and_plain_ones_are_not():
    bound = math.sqrt(6 / (300 + 64))
    weight = build().weight
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert build(xavier=False).weight.std().item() == pytest.approx(1, rel=0.02)


def test_the_norm_makes_every_word_the_same_size_and_can_be_left_out():
    tokens = torch.arange(300)
    out = build()(tokens)
    torch.testing.assert_close(out.mean(-1), torch.zeros(300), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(300), rtol=1e-2, atol=0)  # eps
    plain = build(norm=False)
    assert torch.equal(plain(tokens), plain.weight)
    assert not any("norm" in name for name in plain.state_dict())


def test_the_norm_is_computed_in_float32_and_given_back_in_the_weights_type():
    tokens = torch.arange(300)
    half = build().to(torch.bfloat16)
    out = half(tokens)
    assert out.dtype == torch.bfloat16
    exact = nn.functional.layer_norm(half.weight.float(), (64,))
    assert torch.equal(out, exact.to(torch.bfloat16))
    assert not torch.equal(nn.functional.layer_norm(half.weight, (64,)), half.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(build()(tokens), build()(tokens).float())


def test_the_norm_divides_the_gradient_of_a_large_row():
    """What calms training: the gradient of a word is 1 / its size."""
    embedding = build()
    pull = torch.randn(2, 64, generator=seed(1))
    with torch.no_grad():
        embedding.weight[1] = 10 * embedding.weight[0]
    (grad,) = torch.autograd.grad((embedding(torch.tensor([0, 1])) * pull[0]).sum(), embedding.weight)
    assert (grad[0].norm() / grad[1].norm()).item() == pytest.approx(10, rel=1e-2)


@pytest.mark.parametrize("xavier", [True, False])
def test_the_padding_row_starts_at_zero_and_stays_there(xavier):
    embedding = build(padding_idx=7, xavier=xavier)
    assert (embedding.weight[7] == 0).all()
    assert (embedding(torch.tensor([7])) == 0).all()  # normalised nothing is nothing
    embedding(torch.tensor([7, 8])).square().sum().mul(torch.tensor(2.0)).backward()
    assert embedding.weight.grad is not None
    assert (embedding.weight.grad[7] == 0).all()


def state_bits(embedding: nn.Module, by: str) -> int:
    model = nn.Sequential(embedding)  # its name does not identify it
    params = optim.groups(model, lr=1e-3) if by == "groups" else list(model.named_parameters())
    optimizer = optim.AdamW(params, lr=1e-3, bits=8)
    model(torch.arange(300)).square().sum().backward()
    optimizer.step()
    state = optimizer.state[embedding.weight].values()
    return 8 if torch.uint8 in {x.dtype for x in state} else 32


def test_keep32_decides_about_the_optimizers_state():
    assert state_bits(build(), "groups") == 32
    assert state_bits(build(keep32=False), "groups") == 8
    assert state_bits(nn.Embedding(300, 64), "groups") == 32
    assert state_bits(build(), "name") == 8  # an optimizer that sees names only cannot know


def test_it_takes_the_place_of_an_embedding_and_says_what_it_is():
    plain = nn.Embedding(300, 64)
    stable = build(norm=False)
    stable.load_state_dict(plain.state_dict())
    assert torch.equal(stable(torch.tensor([3])), plain(torch.tensor([3])))
    assert "xavier=False, keep32=True" in repr(build(xavier=False))
    assert build(device="meta").weight.is_meta
    assert build(dtype=torch.float64)(torch.tensor([1])).dtype == torch.float64
