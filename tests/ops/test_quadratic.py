"""The quadratic code: the law, its edges, and what it is for: updates that survive blocks of any range."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import assert_same, seed, spread
from trimtab.ops import fused_step, step_rules
from trimtab.ops.quadratic import (
    LEVELS,
    decode_moments,
    dequantize_quadratic,
    encode_moments,
    quantize_quadratic,
)

SIZES = [0, 1, 255, 256, 257, 1000]  # nothing, below, at and above a block


def values(count: int, kind: str, decades: float = 4) -> Tensor:
    x = spread(count, seed(3), decades=decades)
    return x.abs() if kind == "root" else x


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("count", SIZES)
def test_a_value_comes_back_within_half_a_step(kind, count):
    x = values(count, kind)
    codes, absmax = quantize_quadratic(x, kind, 256)
    back = dequantize_quadratic(codes, absmax, kind, 256)
    scale = absmax.repeat_interleave(256)[:count]
    unit = (x / scale).abs()
    # Half a step of c, times the slope of the law there; the last 1.01 is for the rounding of the law itself.
    step = 1 / LEVELS[kind] if kind == "unit" else (2 * unit.sqrt() + 1 / LEVELS[kind]) / LEVELS[kind]
    half = 1.0  # the dither may take the neighbour
    assert ((back - x).abs() <= 1.01 * scale * (half * step + (1 / LEVELS[kind] ** 2 if kind == "root" else 0))).all()


@pytest.mark.parametrize("kind", LEVELS)
def test_what_was_decoded_is_stored_as_the_same_codes(kind):
    codes, absmax = quantize_quadratic(values(3001, kind), kind, 256)
    again, scale = quantize_quadratic(dequantize_quadratic(codes, absmax, kind, 256), kind, 256)
    assert_same(again, codes)
    torch.testing.assert_close(scale, absmax, rtol=3e-7, atol=0)  # absmax / 127² * 127² rounds twice


def test_a_slow_average_does_not_stand_still():
    # Half of a block loses its gradients: its v must decay as 0.999^t, by less than half a code per step.
    generator, v = seed(0), torch.ones(4096)
    dead = torch.arange(4096) % 2 == 0
    exact = v.double()
    for step in range(1000):
        g2 = torch.where(dead, 0.0, torch.randn(4096, generator=generator).square())
        v, exact = 0.999 * v + 0.001 * g2, 0.999 * exact + 0.001 * g2.double()
        ((codes, absmax),) = encode_moments([v], [False], 256, seed=12345 * step)
        (v,) = decode_moments([codes], [absmax], [False], 256)
    assert exact[dead].mean() == pytest.approx(0.999**1000)
    assert v[dead].mean() == pytest.approx(exact[dead].mean().item(), rel=0.05)
    assert v[~dead].mean() == pytest.approx(exact[~dead].mean().item(), rel=0.05)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.integers(-20, 20), st.integers(1, 50))
def test_scaling_by_a_power_of_two_leaves_the_codes(numbers, power, block):
    x = torch.tensor(numbers, dtype=torch.float32)
    x = torch.where(x.abs() < 1e-20, 0.0, x)
    codes, absmax = quantize_quadratic(x, "plain", block)
    scaled, larger = quantize_quadratic(x * 2.0**power, "plain", block)
    assert_same(scaled, codes)
    assert_same(larger, absmax * 2.0**power)


def test_an_outlier_spoils_only_its_own_block():
    x = torch.randn(1024, generator=seed(0))
    spoiled = x.clone()
    spoiled[300] = 1e4
    codes, absmax = quantize_quadratic(x, "unit", 256)
    others, scales = quantize_quadratic(spoiled, "unit", 256)
    far = torch.arange(1024) // 256 != 1
    assert_same(others[far], codes[far])
    assert (others[~far] != codes[~far]).any()
    assert (scales != absmax).tolist() == [False, True, False, False]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", LEVELS)
def test_a_block_with_a_bad_value_comes_back_as_nan_and_no_other(kind, bad):
    x = values(1024, kind)
    x[300] = bad
    back = dequantize_quadratic(*quantize_quadratic(x, kind, 256), kind, 256)
    assert (back.isnan().view(4, 256).all(dim=1)).tolist() == [False, True, False, False]
    assert back.isnan().sum() == 256


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-40, 1e-38])
@pytest.mark.parametrize("kind", LEVELS)
def test_zeros_and_the_smallest_numbers_stay_finite(kind, tiny):
    codes, absmax = quantize_quadratic(torch.full((300,), tiny), kind, 256)
    back = dequantize_quadratic(codes, absmax, kind, 256)
    assert back.isfinite().all()
    assert (back <= tiny * 1.01).all()


def test_a_positive_second_moment_is_never_stored_as_zero():
    v = torch.cat([torch.tensor([1.0]), 10.0 ** -torch.arange(1.0, 40.0), torch.zeros(10)])
    ((codes, absmax),) = encode_moments([v], [False], 256)
    (back,) = decode_moments([codes], [absmax], [False], 256)
    assert ((back > 0) == (v > 0)).all()


def test_the_update_survives_blocks_of_any_range():
    # m and v of gradients whose sizes spread over six decades within one block: m / √v must come back as it was.
    scale = 10 ** (-6 * torch.rand(4096, generator=seed(1)))
    m, v = 0.1 * torch.randn(4096, generator=seed(2)) * scale, 0.01 * scale**2
    stored = encode_moments([m, v], [True, False], 256)
    back_m, back_v = decode_moments([c for c, _ in stored], [a for _, a in stored], [True, False], 256)
    error = (back_m / back_v.sqrt() - m / v.sqrt()).abs() / (m / v.sqrt()).abs().max()
    assert error.max() < 0.009  # a step of u, 1/127, and rounding


@pytest.mark.parametrize("rule", ["adamw", "momentum", "rms"])
def test_the_first_step_equals_32_bits_exactly(rule):
    # The parameter moves by the fresh moments, so storing them in 8 bits cannot matter yet.
    g, p = spread(1000, seed(1)), torch.randn(1000, generator=seed(2))
    row = {"adamw": step_rules.adamw, "momentum": step_rules.sgd, "rms": step_rules.rmsprop}[rule](
        torch.ones(1), lr=0.1
    )
    mine, plain = p.clone(), p.clone()
    count = 2 if rule == "adamw" else 1
    codes = [[torch.zeros(1000, dtype=torch.uint8)] for _ in range(count)]
    absmax = [[torch.zeros(4)] for _ in range(count)]
    fused_step(rule, [mine], [g], codes, row, absmax=absmax, code="quadratic")
    fused_step(rule, [plain], [g], [[torch.zeros(1000)] for _ in range(count)], row)
    assert_same(mine, plain)


def test_a_codebook_beside_the_quadratic_code_is_refused():
    p = torch.zeros(4)
    arguments = (
        "momentum",
        [p],
        [p.clone()],
        [[torch.zeros(4, dtype=torch.uint8)]],
        step_rules.sgd(torch.ones(1), lr=1.0),
    )
    with pytest.raises(ValueError, match="uses no codebook"):
        fused_step(*arguments, absmax=[[torch.zeros(1)]], code="quadratic", signed=torch.linspace(-1, 1, 256))
    with pytest.raises(ValueError, match="unknown code 'cubic'"):
        fused_step(*arguments, absmax=[[torch.zeros(1)]], code="cubic")
