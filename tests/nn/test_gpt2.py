"""With biases, learned positions and a tied head, GPT is Hugging Face's GPT-2: logits, loss and gradients agree."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import seed
from trimtab.nn.gpt import GPT, GPTConfig
from trimtab.nn.loss import IGNORE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel


def theirs() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 24, "n_head": 3, "vocab_size": 53, "n_positions": 10}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False))
    for p in model.parameters():  # zero biases and unit gains would hide a mistake
        nn.init.normal_(p, std=0.2)
    return model


def ours() -> GPT:
    return GPT(
        GPTConfig(
            depth=2, width=24, heads=3, vocab=53, context=10, bias=True, norm_eps=1e-5, positions="learned", tied=True
        )
    )


def pairs(mine: GPT, other: nn.Module) -> list[tuple[Tensor, Tensor, bool]]:
    """Parameter beside parameter, and whether theirs is transposed, as all their linear layers are."""
    found = [(mine.embedding.weight, other.transformer.wte.weight, False)]
    found += [(mine.positions.weight, other.transformer.wpe.weight, False)]
    modules = [(mine.norm, other.transformer.ln_f)]
    for block, theirs in zip(mine.transformer.blocks, other.transformer.h, strict=True):
        modules += [(block.norm1, theirs.ln_1), (block.norm2, theirs.ln_2), (block.attention.qkv, theirs.attn.c_attn)]
        modules += [(block.attention.out, theirs.attn.c_proj), (block.mlp.up, theirs.mlp.c_fc)]
        modules += [(block.mlp.down, theirs.mlp.c_proj)]
    for a, b in modules:
        found += [(a.weight, b.weight, isinstance(a, nn.Linear)), (a.bias, b.bias, False)]
    assert len(found) == len(list(mine.parameters())) == len(list(other.parameters()))
    return found


@pytest.mark.filterwarnings("ignore")  # theirs
def test_gpt_with_their_weights_is_gpt2():
    mine, other = ours(), theirs()
    with torch.no_grad():
        for a, b, transposed in pairs(mine, other):
            a.copy_(b.t() if transposed else b)
    tokens = torch.randint(53, (4, 10), generator=seed(1))
    targets = torch.cat([tokens[:, 1:], torch.full((4, 1), IGNORE)], dim=1)  # they shift inside
    out = other(input_ids=tokens, labels=tokens)
    loss = mine.loss(tokens, targets).loss
    torch.testing.assert_close(mine(tokens), out.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, out.loss)
    loss.backward()
    out.loss.backward()
    for a, b, transposed in pairs(mine, other):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad.t() if transposed else b.grad, rtol=1e-3, atol=1e-6)
