"""The contrastive loss is InfoNCE in both directions; several processes equal one with the whole batch."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import assert_same, seed
from tests.optim.test_distributed import whole
from tests.processes import PROCESSES, mesh, on_two_processes
from trimtab.nn.clip import CLIP, CLIP_SIZES
from trimtab.nn.contrastive import contrastive_loss

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")


def features(pairs: int, width: int, number: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, pairs, width, generator=seed(number), dtype=dtype)
    image, text = normalize(x, dim=-1)
    return image, text


def defined(image: Tensor, text: Tensor, scale: Tensor | float) -> Tensor:
    """Term by term, as the formula has it."""
    z = scale * (image @ text.T)
    pairs = range(len(z))
    by_image = sum(-torch.log(z[i, i].exp() / z[i].exp().sum()) for i in pairs)
    by_text = sum(-torch.log(z[j, j].exp() / z[:, j].exp().sum()) for j in pairs)
    return (by_image + by_text) / (2 * len(z))


# --- One process


@pytest.mark.parametrize("gather", ["off", "local", "full"])
@pytest.mark.parametrize(("pairs", "width"), [(1, 3), (2, 1), (7, 5), (33, 16)])
def test_the_loss_is_its_definition(pairs, width, gather):
    image, text = features(pairs, width)
    torch.testing.assert_close(contrastive_loss(image, text, 14.3, gather=gather).loss, defined(image, text, 14.3))


def test_values_one_can_compute_by_hand():
    eye = torch.eye(4)
    loss, image_accuracy, text_accuracy = contrastive_loss(eye, eye, 3.0)
    assert loss.item() == pytest.approx(math.log(1 + 3 * math.exp(-3)))
    assert (image_accuracy.item(), text_accuracy.item()) == (1, 1)
    # All alike: nothing to tell them apart by.
    same = torch.ones(4, 4) / 2
    loss, image_accuracy, text_accuracy = contrastive_loss(same, same, 100.0)
    assert loss.item() == pytest.approx(math.log(4))
    assert (image_accuracy.item(), text_accuracy.item()) == (0.25, 0.25)


def test_accuracy_is_counted_in_both_directions():
    # Both images prefer text 0, text 0 prefers image 0, text 1 prefers image 0.
    image, text = torch.tensor([[1.0, 0.5], [0.5, 0.1]]), torch.eye(2)
    result = contrastive_loss(image, text, 1.0)
    assert (result.image_accuracy.item(), result.text_accuracy.item()) == (0.5, 0.5)
    # Now text 1 finds its image, while image 1 still prefers text 0.
    image = torch.tensor([[1.0, 0.05], [0.5, 0.1]])
    result = contrastive_loss(image, text, 1.0)
    assert (result.image_accuracy.item(), result.text_accuracy.item()) == (0.5, 1.0)


@given(st.permutations(range(6)), st.integers(0, 100))
@settings(max_examples=25)
def test_order_and_sides_do_not_matter(order, number):
    image, text = features(6, 4, number)
    expected = contrastive_loss(image, text, 5.0)
    moved = contrastive_loss(image[order], text[order], 5.0)
    swapped = contrastive_loss(text, image, 5.0)
    torch.testing.assert_close(tuple(moved), tuple(expected))
    torch.testing.assert_close(tuple(swapped), (expected.loss, expected.text_accuracy, expected.image_accuracy))


def test_gradients_reach_features_and_scale():
    image, text = (x.requires_grad_() for x in features(5, 3))
    scale = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *x: contrastive_loss(*x).loss, (image, text, scale))


def test_autocast_does_not_make_it_coarse():
    image, text = features(16, 32, dtype=torch.float32)
    expected = contrastive_loss(image, text, 100.0).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(contrastive_loss(image, text, 100.0).loss, expected)
    half = contrastive_loss(image.bfloat16(), text.bfloat16(), 100.0).loss
    assert_same(half, contrastive_loss(image.bfloat16().float(), text.bfloat16().float(), 100.0).loss)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_feature_is_seen_in_the_loss(bad):
    image, text = features(4, 3)
    image[2, 1] = bad
    assert not contrastive_loss(image, text, 10.0).loss.isfinite()


def test_what_are_no_pairs_is_refused():
    image, text = features(4, 3)
    with pytest.raises(ValueError, match=r"one text per image, got \(4, 3\) and \(3, 3\)"):
        contrastive_loss(image, text[:3], 1.0)
    with pytest.raises(ValueError, match=r"got \(3,\) and \(3,\)"):
        contrastive_loss(image[0], text[0], 1.0)
    with pytest.raises(ValueError, match="the batch is empty"):
        contrastive_loss(image[:0], text[:0], 1.0)
    with pytest.raises(ValueError, match=r"gather='all' is not known; try 'off' or 'local' or 'full'"):
        contrastive_loss(image, text, 1.0, gather="all")


# --- Two processes


class Towers(nn.Module):
    """The smallest model with two sides and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 5), nn.Linear(7, 5)
        self.logit_scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normalize(self.image(image), dim=-1), normalize(self.text(text), dim=-1), self.logit_scale.exp()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6, generator=seed(1)), torch.randn(8, 7, generator=seed(2))


def own_part(*batch: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.chunk(PROCESSES)[dist.get_rank()] for x in batch)


def mean_over_processes(x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / PROCESSES


def assert_same_gradients(got: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(got.named_parameters(), expected.parameters(), strict=True):
        # Sums in another order, in float32.
        difference = (whole(p.grad) - q.grad).norm() / q.grad.norm()
        assert difference < 1e-5, f"{name} is off by {difference:.2e}"


@pytest.mark.parametrize("gather", ["local", "full"])
@on_two_processes
def test_gathered_gradients_are_those_of_the_whole_batch(gather):
    plain, replica = Towers(), DistributedDataParallel(Towers())
    whole_batch = contrastive_loss(*plain(*inputs()), gather="off")
    whole_batch.loss.backward()
    part = contrastive_loss(*replica(*own_part(*inputs())), gather=gather)
    part.loss.backward()
    for got, expected in zip(part, whole_batch, strict=True):
        torch.testing.assert_close(mean_over_processes(got), expected.detach())
        if gather == "full":
            torch.testing.assert_close(got.detach(), expected.detach())
    assert_same_gradients(replica.module, plain)


@on_two_processes
def test_without_gathering_it_is_another_loss():
    plain, replica = Towers(), DistributedDataParallel(Towers())
    expected = contrastive_loss(*plain(*inputs()), gather="off").loss
    part = own_part(*inputs())
    loss = contrastive_loss(*replica(*part), gather="off").loss
    assert_same(loss, contrastive_loss(*plain(*part), gather="off").loss)
    assert mean_over_processes(loss) < 0.9 * expected  # half as many to tell apart


@on_two_processes
def test_a_group_of_one_is_alone():
    groups = [dist.new_group([rank]) for rank in range(PROCESSES)]
    image, text, scale = Towers()(*own_part(*inputs()))
    got = contrastive_loss(image, text, scale, group=groups[dist.get_rank()])
    assert_same(got.loss, contrastive_loss(image, text, scale, gather="off").loss)


@pytest.mark.parametrize("sizes", [(4, 3), (0, 4)])
@on_two_processes
def test_uneven_batches_are_refused_by_all_processes(sizes):
    image, text = features(sizes[dist.get_rank()], 3)
    with pytest.raises(ValueError, match=rf"got \[pairs, width\] \[\[{sizes[0]}, 3\], \[{sizes[1]}, 3\]\].*drop_last"):
        contrastive_loss(image, text, 1.0)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@on_two_processes
def test_clip_over_two_processes_has_the_gradients_of_one(wrap):
    def make() -> CLIP:
        torch.manual_seed(0)
        return CLIP(CLIP_SIZES["tiny"])

    plain, shared = make(), make()
    spread = DistributedDataParallel(shared) if wrap == "ddp" else fully_shard(shared, mesh=mesh())
    images = torch.randn(4, 3, 32, 32, generator=seed(1))
    tokens = torch.randint(1, 256, (4, 8), generator=seed(2))
    tokens[:, -1] = plain.config.vocab - 1
    plain.loss(images, tokens, gather="off").loss.backward()
    contrastive_loss(*spread(*own_part(images, tokens))).loss.backward()
    assert_same_gradients(shared, plain)
    with torch.no_grad():
        shared.logit_scale.fill_(9.0)
    shared.clamp_logit_scale()
    assert whole(shared.logit_scale).item() == pytest.approx(math.log(100))
