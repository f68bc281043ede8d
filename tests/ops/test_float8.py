"""float8 rounding against the formats' own numbers."""

import math

import pytest
import torch

from tests.conftest import assert_same, seed
from trimtab.ops import float8
from trimtab.ops.float8 import round_float8_rowwise, round_float8_tensorwise

# Largest value, bits of mantissa, smallest normal exponent, smallest subnormal.
FORMATS = {"e4m3": (448.0, 3, -6, 2.0**-9), "e5m2": (57344.0, 2, -14, 2.0**-16)}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def assert_same_and_signed(got, expected):
    """Bit for bit, and -0 is not 0."""
    assert_same(got, expected)
    assert torch.equal(got.signbit()[~got.isnan()], expected.signbit()[~got.isnan()])


def beside_largest(x, name):
    """Each value in a row of its own, beside the format's largest: up to that value the row's scale is 1."""
    return torch.stack([x, torch.full_like(x, FORMATS[name][0])], dim=1)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_the_nearest_value_of_the_format(name):
    largest, mantissa, lowest, _ = FORMATS[name]
    x = torch.randn(4096, generator=seed(0)) * largest / 8
    x[0] = largest  # so that the scale is 1
    x.clamp_(-largest, largest)
    step = 2.0 ** (x.abs().log2().floor().clamp(min=lowest) - mantissa)
    expected = (x.double() / step.double()).round() * step
    assert_same(round_float8_tensorwise(x, name), expected.float())


@pytest.mark.parametrize("name", FORMATS)
def test_the_values_are_those_of_the_standard(name):
    largest, _, lowest, smallest = FORMATS[name]
    x = torch.tensor([largest, smallest, smallest * 0.4, 2.0**lowest, -(2.0**lowest), 1.0, 0.0])
    expected = torch.tensor([largest, smallest, 0.0, 2.0**lowest, -(2.0**lowest), 1.0, 0.0])
    torch.testing.assert_close(round_float8_tensorwise(x, name), expected, rtol=1e-6, atol=0)
    # Every code of the format comes back as itself.
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[name]).float()
    values = values[values.isfinite()]
    assert len(values) == 2 * {"e4m3": 127, "e5m2": 124}[name]
    torch.testing.assert_close(round_float8_tensorwise(values, name), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_every_16_bit_value_rounds_as_in_pytorchs_cast_at_scale_1(name, dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    got, cast = round_float8_rowwise(beside_largest(x, name), name)[:, 0], x.to(DTYPES[name]).to(dtype)
    # Ties, subnormals, both zeros and NaN. The cast holds what is above the largest value at it or makes it a NaN or an
    # Inf; here the scale follows a larger value, which comes back as it is. An Inf makes its row NaN.
    inside = ~(x.abs() > FORMATS[name][0])
    assert_same_and_signed(got[inside], cast[inside])
    assert_same(got[~inside], torch.where(x.isinf(), math.nan, x)[~inside])
    # One scale for all of them.
    within = x[x.abs() <= FORMATS[name][0]]
    assert_same_and_signed(round_float8_tensorwise(within, name), within.to(DTYPES[name]).to(dtype))


@pytest.mark.parametrize("power", [-20, -1, 0, 3, 20])
@pytest.mark.parametrize("name", FORMATS)
def test_float32_rounds_as_in_pytorchs_cast_where_the_scale_is_a_power_of_two(name, power):
    largest, _, _, smallest = FORMATS[name]
    exponents = torch.empty(100_000).uniform_(math.log2(smallest) - 2, math.log2(largest), generator=seed(0))
    x = exponents.exp2().clamp(max=largest) * torch.randn(100_000, generator=seed(1)).sign()
    # The middles between neighbours, where half goes to even, and the floats beside them.
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[name]).float()
    values = values[values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    beside = [ties.nextafter(torch.tensor(side)) for side in (math.inf, -math.inf)]
    x = torch.cat([x, values, ties, *beside])
    expected = x.to(DTYPES[name]).float()
    assert_same_and_signed(round_float8_tensorwise(x * 2.0**power, name), expected * 2.0**power)


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_value_comes_back_at_every_scale(name):
    scales = torch.empty(2000).uniform_(-149, 128, generator=seed(0)).exp2()
    smallest, largest = torch.arange(1, 65, dtype=torch.int32), 0x7F7FFFFF - torch.arange(64, dtype=torch.int32)
    scales = torch.cat([scales, smallest.view(torch.float32), largest.view(torch.float32)])
    x = torch.stack([scales, torch.zeros_like(scales), -scales], dim=1)
    rounded = round_float8_rowwise(x, name)
    assert rounded.isfinite().all()
    assert ((rounded - x).abs() <= 2.0**-23 * x.abs()).all()  # a last place of float32


def test_rows_have_their_own_scale():
    x = torch.randn(4, 64, generator=seed(1)) * torch.tensor([1.0, 1e-6, 1e6, 0.0])[:, None]
    rounded = round_float8_rowwise(x, "e4m3")
    for row, expected in zip(rounded, x, strict=True):
        assert_same(row, round_float8_tensorwise(expected.contiguous(), "e4m3"))
    assert ((rounded - x).abs() <= x.abs() * 2**-4 * 1.001 + x.abs().amax(1, keepdim=True) * 2**-18).all()


def test_a_broken_row_is_nan_and_the_others_are_not():
    x = torch.ones(3, 8, dtype=torch.bfloat16)
    x[1, 2] = math.inf
    rounded = round_float8_rowwise(x, "e5m2")
    assert rounded.dtype == torch.bfloat16
    assert rounded[1].isnan().all()
    assert (rounded[[0, 2]] == 1).all()
    assert round_float8_tensorwise(x, "e5m2").isnan().all()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3, 4, 5)])
def test_any_shape_works(shape):
    x = torch.randn(shape)
    assert round_float8_rowwise(x, "e4m3").shape == shape
    assert round_float8_tensorwise(x, "e4m3").shape == shape


def test_no_gradient_flows_through_the_rounding():
    assert not round_float8_tensorwise(torch.ones(3, requires_grad=True), "e4m3").requires_grad


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="unknown float8 format 'e3m4'; choose e4m3 or e5m2"):
        round_float8_tensorwise(torch.ones(3), "e3m4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x has no rows"):
        round_float8_rowwise(torch.tensor(1.0), "e4m3")
    with pytest.raises(ValueError, match="must be float32 or bfloat16 or float16, got float64"):
        round_float8_rowwise(torch.ones(3, dtype=torch.float64), "e4m3")


# --- Products of float8 codes. `torch._scaled_mm` runs on CPUs too, so the path of a GPU can be tested here.


def test_this_pytorch_multiplies_float8_codes_as_the_simulation_does():
    assert float8.try_product(torch.device("cpu")) is None


def test_a_product_that_differs_or_fails_is_not_used(monkeypatch):
    right = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **b: 1.1 * right(*a, **b))
    assert "gives wrong results for e4m3" in float8.try_product(torch.device("cpu"))

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not on this device")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert "refuses e4m3 with results in torch.float32: not on this device" in float8.try_product(torch.device("cpu"))


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_times_scales_are_the_rounded_values(name, by_row):
    x = torch.randn(5, 64, generator=seed(0)) * 10.0 ** torch.randn(5, 1, generator=seed(1))
    codes, scale = float8.cast_float8(x, name, by_row=by_row)
    expected = (round_float8_rowwise if by_row else round_float8_tensorwise)(x, name)
    torch.testing.assert_close(codes.float() * scale, expected, rtol=1e-6, atol=0)
    x[1, 3] = math.inf
    codes, scale = float8.cast_float8(x, name, by_row=by_row)
    broken = (codes.float() * scale).isnan().all(dim=1)
    assert broken.tolist() == ([False, True, False, False, False] if by_row else [True] * 5)
