"""Cross entropy with z-loss: its numbers, its gradient, its masks; and the same in chunks of tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.conftest import seed
from trimtab.nn import loss as module
from trimtab.nn.loss import IGNORE, Loss, cross_entropy, linear_cross_entropy


@pytest.fixture(params=["whole", "chunks"])
def score(request, monkeypatch):
    """Both ways to the loss of logits; the second has to make them from an identity."""
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1)  # 16 tokens at a time

    def chunked(logits: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> Loss:
        return linear_cross_entropy(logits, torch.eye(logits.shape[-1], dtype=logits.dtype), targets, z_loss=z_loss)

    return {"whole": cross_entropy, "chunks": chunked}[request.param]


def some(tokens: int = 37, width: int = 5, words: int = 11, dtype: torch.dtype = torch.float32):
    g = seed(0)
    x = torch.randn(tokens, width, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(words, width, generator=g, dtype=dtype).requires_grad_()
    targets = torch.randint(words, (tokens,), generator=g)
    targets[torch.rand(tokens, generator=g) < 0.3] = IGNORE
    return x, weight, targets


def test_golden_values(score):
    logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    loss, ce, z = score(logits, torch.tensor([0]), z_loss=1e-4)
    assert ce.item() == pytest.approx(0.169846, abs=1e-6)
    assert z.item() == pytest.approx(4.708232e-4, rel=1e-5)
    assert loss.item() == pytest.approx(0.169846 + 4.708232e-4, abs=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.155839, 0.114245, 0.042028], abs=1e-6)


def test_without_z_loss_and_masks_it_is_pytorchs(score):
    logits = torch.randn(3, 20, 9, generator=seed(1), requires_grad=True)
    targets = torch.randint(9, (3, 20), generator=seed(2))
    loss, ce, z = score(logits, targets)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ce, expected.detach())
    assert z == 0
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, expected)))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("mask", ["some", "none", "all"])
def test_gradients_are_right_in_float64(score, mask, z_loss):
    logits = 3 * torch.randn(18, 4, generator=seed(3), dtype=torch.float64)
    targets = torch.randint(4, (18,), generator=seed(4))
    targets[{"some": slice(0, 18, 3), "none": slice(0, 0), "all": slice(None)}[mask]] = IGNORE
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda y: score(y, targets, z_loss=z_loss).loss, logits)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_chunked_loss_has_the_gradients_of_its_definition(monkeypatch, z_loss):
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1)
    x, weight, targets = some(dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w: 3 * linear_cross_entropy(x, w, targets, z_loss=z_loss).loss, (x, weight)
    )


def test_both_terms_are_means_over_the_same_tokens(score):
    logits, targets = torch.randn(30, 7, generator=seed(5)), torch.randint(7, (30,), generator=seed(6))
    kept = torch.arange(30) % 4 > 0
    masked = score(logits, targets.where(kept, IGNORE), z_loss=0.01)
    alone = score(logits[kept], targets[kept], z_loss=0.01)
    torch.testing.assert_close(masked, alone)
    torch.testing.assert_close(masked.loss, masked.ce + masked.z)


def test_a_batch_without_targets_costs_nothing_and_changes_nothing(score):
    logits = torch.randn(5, 7, generator=seed(5), requires_grad=True)
    loss, ce, z = score(logits, torch.full((5,), IGNORE), z_loss=0.01)
    assert (loss.item(), ce.item(), z.item()) == (0, 0, 0)
    loss.backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()
    assert score(logits[:0], torch.empty(0, dtype=torch.long)).loss == 0


def test_what_a_token_without_a_target_computed_is_never_looked_at(score):
    logits, targets = torch.randn(30, 7, generator=seed(5)), torch.randint(7, (30,), generator=seed(6))
    targets[::4] = IGNORE
    grads = []
    for bad in (0.0, math.nan, math.inf):
        logits[::4] = bad
        given = logits.clone().requires_grad_()
        grads += torch.autograd.grad(score(given, targets, z_loss=0.1).loss, given)
    assert (grads[0][::4] == 0).all()
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_features_without_a_target_do_not_reach_the_weights_gradient(monkeypatch):
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1)
    x, weight, targets = some()
    broken = torch.where((targets == IGNORE)[:, None], math.nan, x.detach()).requires_grad_()
    clean, other = (torch.autograd.grad(linear_cross_entropy(y, weight, targets).loss, weight)[0] for y in (x, broken))
    assert torch.equal(clean, other)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_reaches_the_loss(score, bad):
    logits, targets = torch.randn(20, 7, generator=seed(5)), torch.randint(7, (20,), generator=seed(6))
    logits[11, targets[11]] = bad
    assert not score(logits, targets, z_loss=1e-4).loss.isfinite()


def test_logits_too_large_for_exp_are_no_trouble(score):
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4]])
    ce = score(logits, torch.tensor([1, 0])).ce
    assert ce.item() == pytest.approx((1e4 + math.log(3)) / 2, rel=1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 53])
def test_chunks_give_what_the_whole_gives(monkeypatch, tokens):
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1)
    x, weight, targets = some(tokens)
    chunked = linear_cross_entropy(x, weight, targets, z_loss=0.1)
    whole = cross_entropy(x @ weight.t(), targets, z_loss=0.1)
    torch.testing.assert_close(chunked, whole)
    for mine, other in zip(*(torch.autograd.grad(out.loss, (x, weight)) for out in (chunked, whole)), strict=True):
        torch.testing.assert_close(mine, other)


def test_logits_are_never_all_in_memory(monkeypatch):
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 16 * 11)
    x, weight, targets = some(64)
    largest = 0

    class Watcher(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal largest
            out = op(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watcher():
        linear_cross_entropy(x, weight, targets).loss.backward()
    assert largest == max(x.numel(), 16 * 11)
    with Watcher():
        cross_entropy(x @ weight.t(), targets).loss.backward()
    assert largest == 64 * 11


@pytest.mark.parametrize(("x_grad", "weight_grad"), [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_needed_are_computed(x_grad, weight_grad):
    x, weight, targets = some()
    both = torch.autograd.grad(linear_cross_entropy(x, weight, targets).loss, (x, weight))
    x, weight = x.detach().requires_grad_(x_grad), weight.detach().requires_grad_(weight_grad)
    loss = linear_cross_entropy(x, weight, targets).loss
    assert loss.requires_grad == (x_grad or weight_grad)
    if loss.requires_grad:
        loss.backward()
    for p, needed, expected in ((x, x_grad, both[0]), (weight, weight_grad, both[1])):
        assert (p.grad is not None) == needed
        if needed:
            torch.testing.assert_close(p.grad, expected)


def test_without_grad_no_gradient_is_computed_and_the_loss_is_the_same():
    x, weight, targets = some()
    with torch.no_grad():
        quiet = linear_cross_entropy(x, weight, targets)
    assert not quiet.loss.requires_grad
    assert torch.equal(quiet.loss, linear_cross_entropy(x, weight, targets).loss)


def test_reported_parts_have_no_history(score):
    logits = torch.randn(4, 7, generator=seed(5), requires_grad=True)
    out = score(logits, torch.zeros(4, dtype=torch.long), z_loss=0.1)
    assert [part.requires_grad for part in out] == [True, False, False]


def test_backward_may_run_twice_and_cannot_be_differentiated():
    x, weight, targets = some()
    loss = linear_cross_entropy(x, weight, targets).loss
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    first = weight.grad.clone()
    (2 * loss).backward()
    torch.testing.assert_close(weight.grad, 3 * first)
    loss = linear_cross_entropy(x, weight, targets).loss
    with pytest.raises(RuntimeError, match=r"differentiated once.*use cross_entropy\(model\(tokens\), targets\)"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(reentrant):
    x, weight, targets = some()
    straight = torch.autograd.grad(linear_cross_entropy(x, weight, targets).loss, (x, weight))
    checkpoint(lambda x: linear_cross_entropy(x, weight, targets).loss, x, use_reentrant=reentrant).backward()
    assert torch.equal(x.grad, straight[0])
    assert torch.equal(weight.grad, straight[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_weights_gradient_is_summed_in_float32_in_parts(monkeypatch, dtype):
    x, weight, targets = (t.detach().to(dtype) if t.is_floating_point() else t for t in some(width=64))
    x.requires_grad_()
    weight.requires_grad_()
    (whole,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets).loss, weight)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    (parts,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets).loss, weight)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1)
    (chunks,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets).loss, weight)
    assert whole.dtype == parts.dtype == dtype
    # A product may sum in another order for another shape: one rounding of 16 bits.
    for other in (parts, chunks):
        torch.testing.assert_close(other, whole, rtol=2**-6, atol=float(whole.abs().max()) * 2**-7)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_low_precision_and_scores_in_float32(monkeypatch, low):
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1)
    x, weight, targets = some(width=64)
    exact = linear_cross_entropy(x, weight, targets, z_loss=0.01)
    with torch.autocast("cpu", dtype=low):
        rough = linear_cross_entropy(x, weight, targets, z_loss=0.01)
        whole = cross_entropy(F.linear(x, weight), targets, z_loss=0.01)
    assert rough.loss.dtype == torch.float32
    assert rough.loss != exact.loss
    torch.testing.assert_close(rough, whole, rtol=1e-5, atol=1e-6)  # the same low product, scored the same
    grads = torch.autograd.grad(rough.loss, (x, weight))
    assert [g.dtype for g in grads] == [torch.float32] * 2
    for mine, other in zip(grads, torch.autograd.grad(exact.loss, (x, weight)), strict=True):
        assert (mine - other).norm() < 0.03 * other.norm()  # 8 bits of precision, summed


def test_small_probabilities_do_not_vanish_in_float16():
    """p / count is below the smallest float16 here; the division has to wait."""
    tokens, words = 4096, 2048
    x = torch.ones(tokens, 16, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(words, 16, dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.zeros(tokens, dtype=torch.long)).loss
    (grad,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(grad[1:], torch.full((words - 1, 16), 1 / words, dtype=torch.float16), rtol=1e-2, atol=0)


def test_wrong_targets_are_refused_with_words(score):
    logits = torch.zeros(3, 7)
    for wrong in (7, -1, -101):
        with pytest.raises(ValueError, match=rf"targets holds {wrong}; try 0 to 6, or -100 where there is none"):
            score(logits, torch.tensor([0, wrong, 1]))
    with pytest.raises(ValueError, match=r"one number per token, shape \(3,\), got \(2,\)"):
        score(logits, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"whole numbers, got torch.float32; call targets.long\(\)"):
        score(logits, torch.zeros(3))


def test_any_leading_dimensions_are_fine_even_none(score):
    logits, targets = torch.randn(2, 3, 4, 7, generator=seed(5)), torch.randint(7, (2, 3, 4), generator=seed(6))
    torch.testing.assert_close(score(logits, targets), score(logits.flatten(0, 2), targets.flatten()))
    torch.testing.assert_close(score(logits[0, 0, 0], targets[0, 0, 0]), score(logits[0, 0, :1], targets[0, 0, :1]))


def test_targets_may_be_any_integer_type(score):
    logits, targets = torch.randn(4, 7, generator=seed(5)), torch.tensor([0, 6, 3, IGNORE])
    assert score(logits, targets.to(torch.int32)).loss == score(logits, targets).loss


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 40),
    words=st.integers(1, 20),
    size=st.floats(0.01, 100),
    z_loss=st.sampled_from([0.0, 1e-4, 1.0]),
    hidden=st.floats(0, 1),
    number=st.integers(0, 1000),
)
def test_every_loss_is_at_least_zero_and_its_gradient_sums_to_that_of_z(tokens, words, size, z_loss, hidden, number):
    """dce/dy sums to zero over the words, so what remains is 2 c logZ per token that counts."""
    g = seed(number)
    logits = (size * torch.randn(tokens, words, generator=g, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(words, (tokens,), generator=g)
    targets[torch.rand(tokens, generator=g) < hidden] = IGNORE
    loss, ce, z = cross_entropy(logits, targets, z_loss=z_loss)
    assert ce >= -1e-12
    assert z >= 0
    (grad,) = torch.autograd.grad(loss, logits)
    counts = targets != IGNORE
    expected = 2 * z_loss * logits.logsumexp(-1) * counts / counts.sum().clamp(min=1)
    torch.testing.assert_close(grad.sum(-1), expected.detach(), rtol=1e-6, atol=1e-9)
