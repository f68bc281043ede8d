"""What every optimizer can be told: zeros to skip, bad gradients, loss scales, clipping, rounding, memory formats."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import assert_same, seed
from tests.optim.cases import (
    CASES,
    QUANTIZED,
    assert_same_snapshots,
    assert_stored_as_told,
    every_optimizer,
    make,
    params_of,
    set_grads,
    small_model,
    snapshot,
    train,
)
from trimtab import optim

# --- Gradients that are zero, not finite, scaled, too long


@pytest.mark.filterwarnings("ignore:skip_zeros=True keeps the state in 32 bits")
@pytest.mark.parametrize(("name", "bits"), [case for case in CASES if case[0] in QUANTIZED])
def test_skip_zeros_keeps_weights_and_state_where_the_gradient_is_zero(name, bits):
    """Exactly, however often their neighbours move."""
    optimizer = make(name, [nn.Parameter(torch.randn(70, 61, generator=seed(0)))], bits, skip_zeros=True)
    plain = make(name, [nn.Parameter(torch.randn(70, 61, generator=seed(0)))])
    (p,) = params_of(optimizer)
    for opt in (optimizer, plain):
        train(opt, range(2))  # no zeros: both the same
    assert_same(p.detach(), params_of(plain)[0].detach())
    before, moments = p.detach().clone(), portable(optimizer)
    for number in range(1000 if name == "AdamW" else 20):
        p.grad = torch.zeros_like(p)
        p.grad[:, :30] = torch.randn(70, 30, generator=seed(number)) * 0.01
        optimizer.step()
    assert_same(p.detach()[:, 30:], before[:, 30:])
    assert (p.detach()[:, :30] != before[:, :30]).all()
    after = portable(optimizer)
    for key, old in moments.items():
        assert_same(after[key][:, 30:], old[:, 30:])
        assert (after[key][:, :30] != old[:, :30]).any()


def test_skip_zeros_with_8_bits_says_that_it_takes_32():
    p = nn.Parameter(torch.ones(70, 61))
    with pytest.warns(UserWarning, match="skip_zeros=True keeps the state in 32 bits instead of 8"):
        optimizer = optim.AdamW([p], bits=8, skip_zeros=True)
    (entry,) = optimizer.describe().entries
    assert (entry.bits, entry.why) == (32, "skip_zeros")
    optimizer = optim.AdamW([p], bits=8)
    train(optimizer, range(1))
    optimizer.param_groups[0]["skip_zeros"] = True
    with pytest.raises(ValueError, match="skip_zeros=True; load a portable state dict into a new optimizer"):
        train(optimizer, range(1))


def portable(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """The moments in float32."""
    entry = optimizer.state_dict(format="portable")["state"][0]
    return {key: x.clone() for key, x in entry.items() if key != "step"}


@pytest.mark.parametrize(
    ("options", "bad"),
    [({"skip_nonfinite": True}, math.nan), ({"skip_nonfinite": True}, math.inf), ({"loss_scale": 65536.0}, -math.inf)],
)
@every_optimizer
def test_a_tensor_with_a_bad_gradient_is_skipped_counted_and_untouched(name, bits, options, bad):
    optimizer = make(name, small_model().named_parameters(), bits, **options)
    assert optimizer.skipped.tolist() == [0] * 6
    train(optimizer, range(2))
    before = snapshot(optimizer)
    set_grads(params_of(optimizer), 2)
    for i in (0, 3):
        params_of(optimizer)[i].grad.view(-1)[7] = bad
    optimizer.step()
    assert optimizer.skipped.tolist() == [1, 0, 0, 1, 0, 0]
    after = snapshot(optimizer)
    for i in (0, 3):
        assert after[i].pop("skipped") == 1
        before[i].pop("skipped")
        assert_same_snapshots([after[i]], [before[i]])  # step included
    for i in (1, 2, 4, 5):
        assert after[i]["step"] == 3
        assert not torch.equal(after[i]["param"], before[i]["param"])
    train(optimizer, [3])
    assert [state["step"].item() for state in snapshot(optimizer)] == [3, 4, 4, 3, 4, 4]


@every_optimizer
def test_a_loss_scale_is_divided_out(name, bits):
    scaled, plain = (make(name, small_model().parameters(), bits, loss_scale=s) for s in (65536.0, 1.0))
    for number in range(3):
        set_grads(params_of(plain), number)
        set_grads(params_of(scaled), number)
        for p in params_of(scaled):
            p.grad *= 65536.0  # a power of two, so nothing is rounded
        plain.step()
        scaled.step()
    for mine, theirs in zip(snapshot(scaled), snapshot(plain), strict=True):
        mine.pop("skipped")
        assert_same_snapshots([mine], [theirs])


@pytest.mark.parametrize("percentile", [0, 5, 50, 95])
@pytest.mark.parametrize("bits", [8, 32])
def test_percentile_clipping_is_the_ring_of_a_hundred_norms(bits, percentile):
    clipped = make("AdamW", [nn.Parameter(torch.zeros(70, 61))], bits, percentile_clipping=percentile)
    by_hand = make("AdamW", [nn.Parameter(torch.zeros(70, 61))], bits)
    generator, ring, shortened = seed(4), [], 0
    for t in range(1, 131):  # past the end of the ring
        g = torch.randn(70, 61, generator=generator) * math.exp(torch.randn((), generator=generator))
        square = g.double().square().sum().item()
        ring = ring or [square] * 100
        ring[t % 100] = square
        limit = sorted(ring)[percentile]
        scale = math.sqrt(limit / square) if square > limit else 1.0
        shortened += scale < 1
        params_of(clipped)[0].grad, params_of(by_hand)[0].grad = g, g * scale
        clipped.step()
        by_hand.step()
    assert shortened > 100 if percentile < 50 else shortened > 0
    # The norm is summed in float32, so the two gradients differ in their last bits, and at 8 bits codes with them.
    a, b = params_of(clipped)[0].detach(), params_of(by_hand)[0].detach()
    assert (a - b).abs().mean() < (1e-6 if bits == 32 else 5e-2) * b.abs().mean()


# --- Parameters in 16 bits, and in another memory order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_optimizer
def test_16_bit_parameters_take_the_float32_step_rounded_once(name, bits, dtype):
    small = make(name, small_model(dtype).parameters(), bits)
    wide = make(name, small_model(dtype).float().parameters(), bits)
    set_grads(params_of(small), 0)
    for p, q in zip(params_of(wide), params_of(small), strict=True):
        p.grad = q.grad.float()
    small.step()
    wide.step()
    for p, q in zip(params_of(small), params_of(wide), strict=True):
        assert_same(p.detach(), q.detach().to(dtype))
        assert torch.float32 in {x.dtype for x in small.state[p].values()}
        assert dtype not in {x.dtype for x in small.state[p].values()}


def test_kahan_needs_no_moments():
    p = nn.Parameter(torch.ones(70, 61, dtype=torch.bfloat16))
    optimizer = optim.SGD([p], lr=2.0**-7 / 3, rounding="kahan")
    for _ in range(30):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    assert ((p.detach().float() - 1) * 128 / 10 - 1).abs().max() < 0.06  # ten spacings, within half a spacing
    assert optimizer.describe().bytes_now == 2 * p.numel()


def tiny_updates(rounding: str, bits: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Thirty steps of a third of a bfloat16 spacing each, up from 1: what became of them, in all ten spacings."""
    p = nn.Parameter(torch.ones(70, 61, dtype=dtype))
    optimizer = optim.Lion([p], lr=2.0**-7 / 3, bits=bits, rounding=rounding)
    for _ in range(30):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    return p.detach().float() - 1


@pytest.mark.parametrize("bits", [8, 32])
def test_tiny_updates_are_lost_by_nearest_and_kept_by_the_other_roundings(bits):
    total = 10 * 2.0**-7
    assert (tiny_updates("nearest", bits) == 0).all()
    torch.testing.assert_close(tiny_updates("nearest", bits, torch.float32).mean().item(), total, rtol=1e-3, atol=0)
    # A float32 run, rounded to the nearest bfloat16 at the end: half a spacing.
    assert (tiny_updates("kahan", bits) - total).abs().max() <= 2.0**-8 * 1.1
    stochastic = tiny_updates("stochastic", bits)
    assert stochastic.std() > 0
    # 4,270 walks of 30 steps, each up by one spacing with probability 1/3: σ of the mean is √(30 · 2/9 / 4270).
    assert abs(stochastic.mean().item() - total) < 4 * 2.0**-7 * math.sqrt(30 * 2 / 9 / 4270)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize(("name", "bits"), [case for case in CASES if case[0] in QUANTIZED])
def test_careful_rounding_is_repeatable_and_kahan_is_a_float32_run(name, bits, rounding):
    start = torch.randn(70, 61, generator=seed(0)).bfloat16()
    careful, again, nearest = (
        make(name, [nn.Parameter(start.clone())], bits, lr=1e-4, rounding=how)
        for how in (rounding, rounding, "nearest")
    )
    wide = make(name, [nn.Parameter(start.float())], bits, lr=1e-4)
    for number in range(3):
        g = (torch.randn(70, 61, generator=seed(number)) * 0.01).bfloat16()
        for optimizer in (careful, again, nearest, wide):
            params_of(optimizer)[0].grad = g.to(params_of(optimizer)[0].dtype)
            optimizer.step()
    assert_same_snapshots(snapshot(careful), snapshot(again))
    assert_stored_as_told(careful, bits)
    a, b, c = (params_of(optimizer)[0].detach().float() for optimizer in (careful, nearest, wide))
    if rounding == "kahan":  # half a spacing at the end, whatever happened on the way; what is left over is rounded too
        torch.testing.assert_close(a, c, rtol=2.0**-8 * 1.1, atol=1e-6 if bits == 32 else 1e-4)  # dither
        rest = careful.state[params_of(careful)[0]]["compensation"].float()
        assert (a + rest - c).norm() < 0.01 * (b - c).norm()
    else:
        assert not torch.equal(a, b)


@pytest.mark.parametrize("order", ["channels_last", "transposed"])
@every_optimizer
def test_the_memory_order_of_a_parameter_does_not_matter(name, bits, order):
    """One block for everything, so that it holds the same values in any order; and a table, which does not dither."""
    start = torch.randn(23, 20, 3, 5, generator=seed(0))
    shuffled = start.to(memory_format=torch.channels_last) if order == "channels_last" else start[0].permute(2, 0, 1)
    plain = start if order == "channels_last" else shuffled.contiguous()
    optimizers = [
        make(name, [nn.Parameter(x.clone())], bits, block=1 << 13, min_8bit_size=1, codebook="dynamic-symmetric")
        for x in (shuffled, plain)
    ]
    assert not params_of(optimizers[0])[0].is_contiguous()
    for number in range(3):
        for optimizer in optimizers:
            set_grads(params_of(optimizer), number)
            optimizer.step()
    a, b = (params_of(optimizer)[0].detach() for optimizer in optimizers)
    # Norms (LAMB, LARS, StableAdamW) are summed in another order.
    torch.testing.assert_close(a.contiguous(), b, rtol=1e-6, atol=1e-7)
    assert not torch.equal(a, shuffled)
    for x in optimizers[0].state[params_of(optimizers[0])[0]].values():
        assert x.shape != a.shape or x.stride() == a.stride()
