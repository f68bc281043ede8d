"""The quadratic code: the law, its edges, and what it is for: updates that survive blocks of any range."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import assert_same, seed, spread
from tests.ops.rows import row
from trimtab.ops import fused_step
from trimtab.ops.step.quadratic import (
    COARSEST,
    FINEST,
    KNEE,
    TOP,
    decode_moments,
    dequantize_first,
    dequantize_root,
    encode_moments,
    halve,
    quantize_first,
    quantize_root,
    twice,
    unit_of,
)

SIZES = [0, 1, 255, 256, 257, 1000]  # nothing, below, at and above a block


KINDS = ["root", *TOP]


def values(count: int, kind: str, decades: float = 4) -> Tensor:
    x = spread(count, seed(3), decades=decades)
    return x.abs() if kind == "root" else x


def store(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return quantize_root(x, 256) if kind == "root" else quantize_first(x, kind, 256)


def load(codes: Tensor, absmax: Tensor, kind: str) -> Tensor:
    return dequantize_root(codes, absmax, 256) if kind == "root" else dequantize_first(codes, absmax, kind, 256)


@pytest.mark.parametrize("kind", TOP)
@pytest.mark.parametrize("count", SIZES)
def test_a_first_moment_is_stored_as_one_of_its_two_neighbours(kind, count):
    x = values(count, kind)
    codes, absmax = store(x, kind)
    scale = absmax.repeat_interleave(256)[:count]
    z = (x / scale).abs() * TOP[kind]
    gap = torch.ones(count)
    if kind == "plain":
        below = (halve(halve(z)) + 1e-3).floor()  # 1e-3: a value that is a code, up to rounding
        gap = twice(twice(below + 1)) - twice(twice(below))
    assert ((load(codes, absmax, kind) - x).abs() <= 1.01 * gap * scale / TOP[kind]).all()


@pytest.mark.parametrize("decades", [0.01, 0.06, 0.2, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("count", SIZES)
def test_a_root_is_stored_as_one_of_its_two_neighbours(count, decades):
    x = 10 ** (-decades * torch.rand(count, generator=seed(3)))
    codes, absmax = quantize_root(x, 256)
    choice = (absmax.view(torch.int32) & 7).repeat_interleave(256)[:count]
    shift = torch.where(choice > 0, COARSEST + 1 - choice, torch.where(codes > KNEE, COARSEST, COARSEST + 2))
    difference = (dequantize_root(codes, absmax, 256).view(torch.int32) - x.view(torch.int32)).abs()
    assert (difference < (1 << shift)).all()


@pytest.mark.parametrize("span", [0.02, 0.2, 0.4, 0.9, 1.9, 3.9, 7.9, 8.1, 15.8])
def test_the_window_of_roots_is_the_finest_that_holds_a_block(span):
    x = 2.0 ** (-span * torch.linspace(0, 1, 256))
    _, absmax = quantize_root(x, 256)
    choice, width = int(absmax.view(torch.int32) & 7), int(x[0].view(torch.int32) - x[-1].view(torch.int32))
    shift = COARSEST + 1 - choice
    assert not choice or width < 256 << shift
    assert shift == FINEST or width > 253 << (shift - 1)


def test_roots_below_the_window_are_stored_as_its_first_number():
    x = torch.tensor([1.0, 1e-3, 1e-6, 1e-12, 0.0])
    back = dequantize_root(*quantize_root(x, 256), 256)
    assert back[1:2].item() == pytest.approx(1e-3, rel=0.13)
    assert (back[2:] == back[2]).all()
    assert 2.0**-17 < back[2].item() < 2.0**-16


def test_twice_is_nearly_a_square_and_halve_its_inverse():
    x = torch.arange(1.0, 256.0)
    assert ((twice(x) / x.square() - 17 / 18).abs() <= 1 / 18 + 1e-6).all()  # from 8/9 at 1.5 to 1 at powers of two
    assert_same(halve(twice(x)), x)
    assert {"unit": 127, "plain": twice(twice(x[126]))} == TOP
    assert twice(torch.zeros(1)) == 0


@pytest.mark.parametrize("block", [64, 256, 2048])
@pytest.mark.parametrize("signed", ["mv", "m", "v", "mmv", "nv"])
@pytest.mark.parametrize("bias", [1.0, 0.271, 1 - 0.999**3])
def test_decoded_moments_are_stored_as_the_same_values(signed, block, bias):
    """Also if a float32 state dict rounds them on the way: StableAdamW's leave multiplied by a bias correction."""
    moments = [values(10_007, "root" if s == "v" else "plain", decades=6) for s in signed]
    for step in range(1, 30):
        stored = encode_moments(moments, signed, block, step=step)
        decoded = decode_moments([c for c, _ in stored], [a for _, a in stored], signed, block)
        travelled = [x * bias / bias for x in decoded]
        again = encode_moments(travelled, signed, block)
        for old, new in zip(decoded, decode_moments(*zip(*again, strict=True), signed, block), strict=True):
            assert_same(new, old)
        moments = [0.9 * x + 0.1 * y for x, y in zip(decoded, moments, strict=True)]


def test_first_moments_are_right_on_average():
    """Over 4,096 consecutive steps, each value's mean is the value itself: also between the codes 0 and 1."""
    x = torch.tensor([1.0, -0.7, 0.1, 1.5e-4, 1e-4, -6.2e-5, 1e-5, -2e-6, 0.0])
    total = torch.zeros(9, dtype=torch.float64)
    for step in range(4096):
        ((codes, absmax),) = encode_moments([x], "m", 256, step=step)
        total += decode_moments([codes], [absmax], "m", 256)[0]
    torch.testing.assert_close(total / 4096, x.double(), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("span", [0.1, 1.0, 3.0, 12.0])
def test_roots_are_right_on_average(span):
    x = 2.0 ** (-span * torch.rand(256, generator=seed(0)))
    total = torch.zeros(256, dtype=torch.float64)
    for step in range(4096):
        total += dequantize_root(*quantize_root(x, 256, step), 256)
    inside = x < x.max()  # the window ends at the largest
    torch.testing.assert_close((total / 4096)[inside], x.double()[inside], rtol=3e-4, atol=0)


def test_a_slow_average_does_not_stand_still():
    # Half of a block loses its gradients: its v must decay as 0.999^t, by less than half a code per step.
    generator, v = seed(0), torch.ones(4096)
    dead = torch.arange(4096) % 2 == 0
    exact = v.double()
    for step in range(1000):
        g2 = torch.where(dead, 0.0, torch.randn(4096, generator=generator).square())
        v, exact = 0.999 * v + 0.001 * g2, 0.999 * exact + 0.001 * g2.double()
        ((codes, absmax),) = encode_moments([v], "v", 256, step=step)
        (v,) = decode_moments([codes], [absmax], "v", 256)
    assert exact[dead].mean() == pytest.approx(0.999**1000)
    assert v[dead].mean() == pytest.approx(exact[dead].mean().item(), rel=0.05)
    assert v[~dead].mean() == pytest.approx(exact[~dead].mean().item(), rel=0.05)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.integers(-20, 20), st.integers(1, 50))
def test_scaling_by_a_power_of_two_leaves_the_codes(numbers, power, block):
    x = torch.tensor(numbers, dtype=torch.float32)
    x = torch.where(x.abs() < 1e-20, 0.0, x)
    codes, absmax = quantize_first(x, "plain", block)
    scaled, larger = quantize_first(x * 2.0**power, "plain", block)
    assert_same(scaled, codes)
    assert_same(larger, absmax * 2.0**power)


def test_an_outlier_affects_only_its_own_block():
    x = torch.randn(1024, generator=seed(0))
    changed = x.clone()
    changed[300] = 1e4
    codes, absmax = quantize_first(x, "plain", 256)
    others, scales = quantize_first(changed, "plain", 256)
    far = torch.arange(1024) // 256 != 1
    assert_same(others[far], codes[far])
    assert (others[~far] != codes[~far]).any()
    assert (scales != absmax).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("kind", "bad"), [("root", torch.nan), *product(TOP, [torch.nan, torch.inf, -torch.inf])])
def test_a_block_with_a_bad_value_comes_back_as_nan_and_no_other(kind, bad):
    x = values(1024, kind)
    x[300] = bad
    back = load(*store(x, kind), kind)
    assert (back.isnan().view(4, 256).all(dim=1)).tolist() == [False, True, False, False]
    assert back.isnan().sum() == 256


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-40, 1e-38])
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_the_smallest_numbers_stay_finite(kind, tiny):
    back = load(*store(torch.full((300,), tiny), kind), kind)
    assert back.isfinite().all()
    assert ((back.square() if kind == "root" else back) <= tiny * 1.01).all()  # v is zero below the smallest root


def test_a_positive_second_moment_is_never_stored_as_zero():
    v = torch.cat([torch.tensor([1.0]), 10.0 ** -torch.arange(1.0, 40.0), torch.zeros(10)])
    ((codes, absmax),) = encode_moments([v], "v", 256)
    (back,) = decode_moments([codes], [absmax], "v", 256)
    assert (back[v > 0] > 0).all()


def test_a_first_moment_keeps_its_digits_in_blocks_of_any_range():
    # Gradients of one block spread over six decades. Next to values a million times larger, m keeps the same precision
    # relative to its own √v, as long as that is above the smallest code; below it, relative to the smallest code.
    scale = 10 ** (-6 * torch.rand(4096, generator=seed(1)))
    m, v = 0.1 * torch.randn(4096, generator=seed(2)) * scale, 0.01 * scale**2
    stored = encode_moments([m, v], "mv", 256)
    back_m, _ = decode_moments([c for c, _ in stored], [a for _, a in stored], "mv", 256)
    (_, scale), roots = stored
    error = (back_m - m).abs() / (unit_of(*roots, 256) * scale.repeat_interleave(256))
    assert error.max() < 1 / 127  # the gap between two codes
    assert error.mean() < 0.4 / 127


def test_an_element_without_gradient_decays_as_its_block_does_not():
    """β1 > √β2: m / √v of an element without gradient grows without bound. Its m must still decay as β1^t."""
    live = torch.arange(256) != 7
    m, v = torch.full((256,), 0.1), torch.full((256,), 0.01)
    exact = 0.1
    for step in range(1, 400):
        g = torch.where(live, torch.randn(256, generator=seed(step)), 0.0)
        m, v, exact = 0.99 * m + 0.01 * g, 0.5 * v + 0.5 * g.square(), 0.99 * exact
        stored = encode_moments([m, v], "mv", 256, step=step)
        m, v = decode_moments([c for c, _ in stored], [a for _, a in stored], "mv", 256)
        gap = stored[0][1] / 127 * unit_of(*stored[1], 256)[7]
        assert m[7] <= exact + gap / (1 - 0.99)
    assert m[7] == pytest.approx(exact, rel=0.3)


@pytest.mark.parametrize("rule", ["adamw", "momentum", "rms"])
def test_the_first_step_equals_32_bits_exactly(rule):
    # The parameter moves by the fresh moments, so storing them in 8 bits cannot matter yet.
    g, p = spread(1000, seed(1)), torch.randn(1000, generator=seed(2))
    kind = {"adamw": "AdamW", "momentum": "SGD", "rms": "RMSprop"}[rule]
    scalars = row(kind, torch.ones(1), lr=0.1)
    mine, plain = p.clone(), p.clone()
    count = 2 if rule == "adamw" else 1
    codes = [[torch.zeros(1000, dtype=torch.uint8)] for _ in range(count)]
    absmax = [[torch.zeros(4)] for _ in range(count)]
    fused_step(rule, [mine], [g], codes, scalars, absmax=absmax, code="quadratic")
    fused_step(rule, [plain], [g], [[torch.zeros(1000)] for _ in range(count)], scalars)
    assert_same(mine, plain)


def test_a_codebook_beside_the_quadratic_code_is_refused():
    p = torch.zeros(4)
    arguments = (
        "momentum",
        [p],
        [p.clone()],
        [[torch.zeros(4, dtype=torch.uint8)]],
        row("SGD", torch.ones(1), momentum=0.9, lr=1.0),
    )
    with pytest.raises(ValueError, match="uses no codebook"):
        fused_step(*arguments, absmax=[[torch.zeros(1)]], code="quadratic", signed=torch.linspace(-1, 1, 256))
    with pytest.raises(ValueError, match="unknown code 'cubic'"):
        fused_step(*arguments, absmax=[[torch.zeros(1)]], code="cubic")
