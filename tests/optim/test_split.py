"""rounding="split": bfloat16 parameters whose optimizer keeps eight more bits of the weight."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import assert_same, seed
from tests.optim.cases import (
    QUANTIZED,
    assert_same_snapshots,
    make,
    params_of,
    set_grads,
    small_model,
    snapshot,
    train,
)
from trimtab import ops, optim
from trimtab.ops.step import fused
from trimtab.ops.step.split import join, split
from trimtab.optim import chunks

BFLOAT16 = torch.bfloat16
ODD = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 3.4e38, -3.4028235e38, 1.0039062]


def weights(count: int = 10_000) -> Tensor:
    x = torch.randn(count, generator=seed(0)) * torch.logspace(-30, 30, count)
    return torch.cat([x, torch.tensor(ODD)])


# --- The representation


def test_every_weight_of_24_bits_is_kept_exactly_at_every_step():
    bits = torch.cat([torch.arange(0, 1 << 23, 37), torch.arange(0x7F7F00, 0x7F8001)]).int() << 8
    for sign in (0, -(1 << 31)):
        x = (bits | sign).view(torch.float32)
        for step in (0, 1, 12345):
            param, extra = split(x, step=step)
            assert_same(join(param, extra), x)
    param, extra = split(torch.tensor([math.nan, -math.nan]), step=3)
    assert join(param, extra).isnan().all()


def test_the_parameter_is_the_nearest_bfloat16():
    x = weights()
    param, extra = split(x, step=7)
    kept = join(param, extra)
    finite = kept.isfinite() & param.isfinite()
    error, other = (param.double() - kept.double()).abs(), (kept.to(BFLOAT16).double() - kept.double()).abs()
    assert_same(error[finite], other[finite])  # a tie may go to the other side
    assert ((kept.double() - x.double()).abs()[finite] <= (x.double().abs() * 2.0**-15)[finite] + 1e-40).all()


def test_the_dither_has_no_bias():
    x = torch.full((1,), 1.0 + 3 * 2.0**-20)
    kept = torch.cat([join(*split(x, step=step)) for step in range(4096)])
    assert kept.unique().numel() == 2
    assert float(kept.double().mean() - 1) == pytest.approx(3 * 2.0**-20, rel=0.02)


# --- The kernel


@pytest.mark.parametrize("count", [7, 257, 10_007])
@pytest.mark.parametrize("code", [None, "codebook", "quadratic"])
@pytest.mark.parametrize("rule", ["adamw", "momentum", "lion", "rms"])
def test_the_kernel_gives_the_bits_of_the_reference(level, rule, code, count):
    x = torch.randn(count, generator=seed(1))
    x[: min(count, len(ODD))] = torch.tensor(ODD[:count])
    states = len(ops.step_rules.RULES[rule].signed)
    columns = {
        "lr": 1e-3,
        "decay": 0.999,
        "beta1": 0.9,
        "gain1": 0.1,
        "beta2": 0.99,
        "gain2": 0.01,
        "eps": 1e-8,
        "mix_m": 1.0,
    }
    both = []
    for run in (fused._step, fused.step_reference):
        param, extra = split(x, step=0)
        kept = [torch.zeros(count, dtype=torch.uint8 if code else torch.float32) for _ in range(states)]
        scales = [torch.zeros(-(-count // 256)) for _ in range(states if code else 0)]
        for t in range(1, 4):
            g = torch.randn(count, generator=seed(t)).to(BFLOAT16)
            row = ops.step_rules.rows(torch.tensor([float(t)]), **columns)
            books = [ops.load_codebook(signed=True), ops.load_codebook(signed=False)]
            run([param], [g], kept, scales, row, *books, rule, code or "codebook", min(256, count), [extra])
        both.append([param, extra, *kept, *scales])
    for mine, reference in zip(*both, strict=True):
        assert_same(mine, reference)


@pytest.mark.parametrize("bits", [8, 32])
def test_the_step_in_chunks_which_gpus_use_gives_the_same_bits(bits, monkeypatch):
    optimizers = [make("AdamW", small_model(BFLOAT16).parameters(), bits, rounding="split") for _ in range(2)]
    train(optimizers[0], range(4))
    monkeypatch.setattr(chunks, "CHUNK", 1024)
    monkeypatch.setattr(optim.Optimizer, "_apply", lambda self, batch, rows: chunks.step_in_chunks(batch, rows))
    train(optimizers[1], range(4))
    assert_same_snapshots(snapshot(optimizers[1]), snapshot(optimizers[0]))


# --- The optimizers


@pytest.mark.parametrize("name", QUANTIZED)
@torch.no_grad()
def test_weights_stay_close_to_those_of_a_float32_model(name):
    """One half-spacing of bfloat16 is 2^-9 of a weight; without extra bits the errors are several of them."""
    exact, split_up, nearest = (
        make(name, small_model(dtype).parameters(), bits=32, lr=1e-4, **options)
        for dtype, options in ((BFLOAT16, {}), (BFLOAT16, {"rounding": "split"}), (BFLOAT16, {}))
    )
    for group in exact.param_groups:
        for p in group["params"]:
            p.data = p.data.float()
    for number in range(100):
        for optimizer in (exact, split_up, nearest):
            set_grads(params_of(optimizer), number)
            optimizer.step()
    full = [x for _, x in split_up.full_weights()]
    error = [float((a - b).norm()) for a, b in zip(full, params_of(exact), strict=True)]
    plain = [float((a.float() - b).norm()) for a, b in zip(params_of(nearest), params_of(exact), strict=True)]
    spacing = [float(p.detach().norm()) * 2.0**-8 for p in params_of(exact)]
    assert sum(error) < 0.1 * sum(spacing)
    assert sum(error) < 0.1 * sum(plain)


@pytest.mark.parametrize("size", [2.0**-12, 2.0**-18], ids=["2^-12", "2^-18"])
def test_thousands_of_small_updates_add_up_as_in_float32(size):
    """Relative to the weight. The rounding errors of 5,000 steps stay below a tenth of a spacing of bfloat16."""
    start = (1 + torch.rand(512, generator=seed(0))).to(BFLOAT16)
    p, exact = nn.Parameter(start.clone()), start.double()
    optimizer = optim.SGD([p], lr=size, rounding="split", min_8bit_size=0)
    g = torch.randn(512, generator=seed(1)).sign().to(BFLOAT16)
    for _ in range(5000):
        p.grad = g
        optimizer.step()
        exact -= size * g.double()
    ((_, full),) = optimizer.full_weights()
    error = float((full.double() - exact).abs().max() / 2.0**-7)
    assert error < 0.1
    assert_same(p.detach(), full.to(BFLOAT16))


def test_weights_assigned_from_outside_are_off_by_half_a_spacing_at_most():
    model = small_model(BFLOAT16)
    optimizer = make("AdamW", model.parameters(), 8, rounding="split")
    train(optimizer, range(3))
    for value in (0.0, 1.0, -3e-30):
        for p in model.parameters():
            p.data.fill_(value)
        for _, full in optimizer.full_weights():
            assert full.isfinite().all()
            assert ((full - value).abs() <= abs(value) * 2.0**-8 + 2.0**-126).all()


def test_float32_parameters_and_tensors_of_both_kinds_take_no_extra_bits():
    a, b = nn.Parameter(torch.randn(5000)), nn.Parameter(torch.randn(5000).to(BFLOAT16))
    c = nn.Parameter(a.detach().clone())
    optimizer, plain = optim.AdamW([a, b], bits=8, rounding="split"), optim.AdamW([c], bits=8)
    for number in range(3):
        set_grads([a, b], number)
        c.grad = a.grad
        optimizer.step()
        plain.step()
    assert "extra_bits" not in optimizer.state[a]
    assert optimizer.state[b]["extra_bits"].dtype == torch.int8
    assert_same(a.detach(), c.detach())


def test_a_skipped_tensor_keeps_its_extra_bits():
    model = small_model(BFLOAT16)
    optimizer = make("AdamW", model.parameters(), 8, rounding="split", skip_nonfinite=True)
    train(optimizer, range(2))
    before = snapshot(optimizer)
    set_grads(model.parameters(), 2)
    for p in model.parameters():
        p.grad[0] = math.nan
    optimizer.step()
    for mine, old in zip(snapshot(optimizer), before, strict=True):
        assert_same(mine["param"], old["param"])
        assert_same(mine["extra_bits"], old["extra_bits"])


@pytest.mark.parametrize("format", ["packed", "portable"])
def test_a_resume_continues_bit_for_bit(format, tmp_path):
    model = small_model(BFLOAT16)
    optimizer = make("StableAdamW", model.named_parameters(), 8, rounding="split")
    train(optimizer, range(3))
    torch.save(optimizer.state_dict(format=format), tmp_path / "optimizer.pt")
    other = copy.deepcopy(model)
    train(optimizer, range(3, 6))
    resumed = make("StableAdamW", other.named_parameters(), 8, rounding="split")
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(resumed, range(3, 6))
    assert_same_snapshots(snapshot(resumed), snapshot(optimizer))


def test_state_without_extra_bits_can_be_loaded():
    model = small_model(BFLOAT16)
    first = make("AdamW", model.named_parameters(), 8)
    train(first, range(2))
    second = make("AdamW", model.named_parameters(), 8, rounding="split")
    state = first.state_dict()
    for group in state["param_groups"]:
        group["rounding"] = "split"
    second.load_state_dict(state)
    train(second, range(2, 4))
    assert all("extra_bits" in second.state[p] for p in model.parameters())


def test_the_extra_byte_is_counted():
    p = nn.Parameter(torch.ones(64, 64, dtype=BFLOAT16))
    (entry,) = optim.AdamW([p], bits=8, rounding="split").describe().entries
    assert entry.bytes_now == 2 * (4096 + 4 * 16) + 4096


def test_what_split_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"rounding='split' needs bfloat16; use rounding='kahan'"):
        optim.AdamW([nn.Parameter(torch.ones(3, dtype=torch.float16))], rounding="split")
    with pytest.raises(ValueError, match=r"Adafactor does not support rounding='split'"):
        optim.Adafactor([nn.Parameter(torch.ones(3, dtype=BFLOAT16))], rounding="split")
    p = nn.Parameter(torch.ones(3, dtype=BFLOAT16))
    optimizer = optim.AdamW([p], rounding="split")
    set_grads([p], 0)
    optimizer.step()
    optimizer.state[p]["extra_bits"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"its extra_bits are torch.float32"):
        optimizer.step()
