"""int8: the definition, the kernels against it, and the error figures of the paper."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.conftest import assert_same, seed
from trimtab.ops import backends, int8

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (6, 16, 16), (7, 33, 17), (100, 257, 65), (130, 1041, 31), (3, 5000, 40)]


@pytest.fixture(params=[True, False], ids=["vnni", "no-vnni"])
def vnni(request: pytest.FixtureRequest, level: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Products of every level, with VNNI where this CPU has it and without."""
    assert backends.native is not None
    backends.native.allow_vnni(request.param)
    if not request.param:
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    backends.int8_product.cache_clear()
    yield request.param
    backends.native.allow_vnni(True)


def codes(rows: int, columns: int, number: int = 0) -> Tensor:
    return torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=seed(number))


# --- Quantize


def test_codes_round_half_to_even_and_never_reach_minus_128():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]])
    got, absmax = int8.quantize_rowwise(x)
    assert absmax.tolist() == [127.0]
    assert got.tolist() == [[127, 0, 2, 2, 0, -2, -127]]


def test_rows_columns_and_tensors_have_their_own_scales():
    x = torch.tensor([[1.0, -4.0], [2.0, 0.5]])
    assert int8.quantize_rowwise(x)[1].tolist() == [4.0, 2.0]
    assert int8.quantize_columnwise(x)[1].tolist() == [2.0, 4.0]
    assert int8.quantize_tensorwise(x)[1].tolist() == 4.0
    assert int8.quantize_columnwise(x)[0].tolist() == [[64, -127], [127, 16]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (100, 257), (3, 70_000), (300, 100), (0, 5), (5, 0)])
def test_native_codes_match_the_reference_exactly(level, shape, dim, dtype):
    x = torch.randn(shape, generator=seed(1)).to(dtype)
    if x.numel():
        x[0] = 0
    if shape[0] > 2 and x.numel():
        x[2, 0] = math.nan
        x[1, -1] = math.inf
    for got, expected in zip(int8.quantize_native(x, dim), int8.quantize_reference(x, dim), strict=True):
        assert_same(got, expected)


def test_zero_and_broken_rows_stay_apart_from_the_others():
    x = torch.ones(4, 8)
    x[1], x[2, 3] = 0, math.inf
    got, absmax = int8.quantize_rowwise(x)
    assert_same(absmax, torch.tensor([1.0, 0.0, math.nan, 1.0]))
    product = int8.int8_matmul(got, codes(8, 5), absmax, torch.tensor(1.0))
    assert product[2].isnan().all()
    assert product[[0, 1, 3]].isfinite().all()
    assert (product[1] == 0).all()


def test_dequantize_undoes_it_within_half_a_step():
    x = torch.randn(50, 70, generator=seed(2))
    got, absmax = int8.quantize_rowwise(x)
    error = (int8.dequantize(got, absmax[:, None]) - x).abs()
    assert (error <= absmax[:, None] / 127 / 2 * 1.001).all()


# --- The product


def test_the_reference_product_is_the_integer_product():
    for rows, inner, columns in SHAPES:
        a, b = codes(rows, inner), codes(inner, columns, 1)
        assert_same(int8.int_matmul_reference(a, b).long(), a.long() @ b.long())
    largest = torch.full((2, 5000), 127, dtype=torch.int8)
    assert (int8.int_matmul_reference(largest, -largest.t()) == -5000 * 127**2).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_products_match_the_reference_exactly(vnni, shape, dtype):
    rows, inner, columns = shape
    a, b = codes(rows, inner), codes(inner, columns, 1)
    row, column, bias = (torch.rand(n, generator=seed(2)) for n in (rows, columns, columns))
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            for scales in ((row, column, bias), (row[0], column, None), (row, column[0], bias.to(dtype))):
                expected = int8.matmul_reference(left, right, *scales, dtype)
                assert_same(int8.matmul_cpu(left, right, *scales, dtype), expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 17, 63), (65, 129, 33), (130, 64, 128), (3, 5000, 40)])
def test_quantizing_inside_the_product_changes_nothing(vnni, shape, threads):
    rows, inner, columns = shape
    b, absmax = codes(inner, columns), torch.rand(columns, generator=seed(2))
    x = 10 ** (8 * torch.rand(rows, 1, generator=seed(3)) - 4) * torch.randn(rows, inner, generator=seed(4))
    for row, bad in zip((1, 2, 3), (0.0, math.inf, math.nan), strict=True):
        x[row % rows, (0 if bad else slice(None)) if rows > 3 else slice(0, 0)] = bad
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in FLOATS:
            for right in (b, b.t().contiguous().t()):
                for scale, bias in ((absmax, None), (absmax[0], absmax.to(dtype))):
                    left = int8.quantize_reference(x.to(dtype), 1)
                    expected = int8.matmul_reference(left[0], right, left[1], scale, bias, dtype)
                    assert_same(int8.int8_linear(x.to(dtype), right, scale, bias), expected)
    finally:
        torch.set_num_threads(before)


def test_codes_are_rounded_exactly_at_and_around_every_half(level):
    # The kernel multiplies by 127 / absmax, and divides where that could round to the other side.
    for absmax in (1.0, 0.3, 127.0, 3e-39, 1e-30, 3e38):
        halves = absmax * torch.arange(-126.5, 127) / 127
        near = torch.stack([halves, halves.nextafter(torch.tensor(9e38)), halves.nextafter(torch.tensor(-9e38))])
        x = torch.cat([near.flatten(), torch.tensor([absmax])])[None]
        for got, expected in zip(int8.quantize_native(x, 1), int8.quantize_reference(x, 1), strict=True):
            assert_same(got, expected)


def test_extreme_sums_are_exact(vnni):
    a = torch.full((7, 3000), 127, dtype=torch.int8)
    b = torch.full((3000, 9), -127, dtype=torch.int8)
    got = int8.int8_matmul(a, b, torch.tensor(127.0), torch.tensor(127.0))
    assert (got == -3000 * 127**2).all()


def test_the_rescale_of_a_onednn_product_matches_the_reference(level):
    # What runs on CPUs with VNNI, whatever this one has.
    assert backends.native is not None
    total = torch.randint(-(2**30), 2**30, (37, 50), dtype=torch.int32, generator=seed(3))
    row, column, bias = (torch.rand(n, generator=seed(4)) for n in (37, 50, 50))
    for dtype, number in backends.DTYPE_CODES.items():
        out = torch.empty(37, 50, dtype=dtype)
        backends.native.rescale(
            total.data_ptr(), 37, 50, row.data_ptr(), False, column.data_ptr(), False, bias.data_ptr(),
            out.data_ptr(), number, 2,
        )  # fmt: skip
        assert_same(out, int8.rescale_reference(total, row, column, bias, dtype))


@pytest.mark.parametrize(("rows", "inner", "columns"), [(0, 4, 3), (4, 0, 3), (4, 3, 0), (0, 0, 0)])
def test_empty_products_have_the_right_shape(rows, inner, columns):
    bias = torch.arange(float(columns))
    got = int8.int8_matmul(codes(rows, inner), codes(inner, columns), torch.zeros(rows), torch.zeros(columns), bias)
    assert_same(got, bias.expand(rows, columns).contiguous())


@pytest.mark.parametrize("product", ["onednn", "reference"])
@pytest.mark.parametrize("has_native", [True, False])
def test_every_way_to_multiply_gives_the_same(monkeypatch, product, has_native):
    # oneDNN's product is exact without VNNI too, only slow.
    monkeypatch.setattr(backends, "int8_product", lambda: (product, "by order of the test"))
    if not has_native:
        monkeypatch.setattr(backends, "native", None)
    # A dimension of size 1 has any stride: a column seen as a row has another one than a row.
    for rows, inner, columns in ((20, 70, 30), (1, 1, 13), (1, 70, 30), (20, 1, 30), (20, 70, 1)):
        row, column, bias = torch.rand(rows), torch.rand(columns), torch.rand(columns)
        for a in (codes(rows, inner), codes(inner, rows).t()):
            for b in (codes(inner, columns, 1), codes(columns, inner, 1).t()):
                expected = int8.matmul_reference(a, b, row, column, bias, torch.float32)
                assert_same(int8.int8_matmul(a, b, row, column, bias), expected)
        if has_native:
            x = torch.randn(rows, inner, generator=seed(2))
            (left, absmax), right = int8.quantize_reference(x, 1), codes(inner, columns, 1)
            expected = int8.matmul_reference(left, right, absmax, column, bias, torch.float32)
            assert_same(int8.int8_linear(x, right, column, bias), expected)


def test_the_backend_of_the_product_is_known(vnni):
    product, reason = backends.int8_product()
    assert product in ("onednn", "native", "reference")
    assert "VNNI" in reason
    if not vnni:
        assert product != "onednn"
        assert "no VNNI" in reason


# --- The paper's error figures (specs/p1 section 2.13)


def relative(got: Tensor, exact: Tensor) -> float:
    return ((got - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("inner", "tensor", "row"), [(256, 0.0125, 0.0098), (1024, 0.0148, 0.0110), (4096, 0.0154, 0.0124)]
)
def test_forward_errors_are_those_of_the_paper(inner, tensor, row):
    x, w = torch.randn(256, inner, generator=seed(5)), torch.randn(256, inner, generator=seed(6))
    (xq, xs), (wq, ws), (wt, wts) = int8.quantize_rowwise(x), int8.quantize_rowwise(w), int8.quantize_tensorwise(w)
    assert relative(int8.int8_matmul(xq, wt.t(), xs, wts), x @ w.t()) == pytest.approx(tensor, rel=0.1)
    assert relative(int8.int8_matmul(xq, wq.t(), xs, ws), x @ w.t()) == pytest.approx(row, rel=0.1)


@pytest.mark.parametrize(("tokens", "error"), [(256, 0.0099), (2048, 0.0119), (16_384, 0.0137)])
def test_weight_gradient_errors_are_those_of_the_paper(tokens, error):
    g, x = torch.randn(tokens, 128, generator=seed(7)), torch.randn(tokens, 128, generator=seed(8))
    (gq, gs), (xq, xs) = int8.quantize_columnwise(g), int8.quantize_columnwise(x)
    assert relative(int8.int8_matmul(gq.t(), xq, gs, xs), g.t() @ x) == pytest.approx(error, rel=0.1)


def test_spread_tokens_ruin_the_weight_gradient_and_not_the_forward():
    scale = (2 * torch.randn(2048, 1, generator=seed(9))).exp()
    g, x = torch.randn(2048, 128, generator=seed(10)) * scale, torch.randn(2048, 128, generator=seed(11)) * scale
    w = torch.randn(128, 128, generator=seed(12))
    (gq, gs), (xq, xs) = int8.quantize_columnwise(g), int8.quantize_columnwise(x)
    (xr, xrs), (wq, ws) = int8.quantize_rowwise(x), int8.quantize_tensorwise(w)
    assert relative(int8.int8_matmul(xr, wq.t(), xrs, ws), x @ w.t()) < 0.015
    typical = scale.flatten() < scale.median()
    exact = g[typical].t() @ x[typical]
    ours = int8.dequantize(gq, gs[None])[typical].t() @ int8.dequantize(xq, xs[None])[typical]
    assert relative(ours, exact) > 0.3


@pytest.mark.parametrize("inner", [64, 1024, 16_384])
def test_quantization_noise_grows_as_the_formula_says(inner):
    noise, samples = 0.02, 2_000_000 // inner + 2000
    u, v = (torch.randn(samples, inner, generator=seed(n)) for n in (13, 14))
    error = ((u + noise * torch.randn(samples, inner)) * (v + noise * torch.randn(samples, inner)) - u * v).sum(1)
    assert error.var().item() == pytest.approx(inner * noise**2 * (2 + noise**2), rel=0.15)


# --- Interface


def test_the_ops_pass_the_checks_of_torch_library():
    x = torch.randn(5, 33, generator=seed(15))
    torch.library.opcheck(torch.ops.trimtab.quantize_int8.default, (x, 1))
    arguments = (codes(5, 33), codes(33, 7), torch.rand(5), torch.rand(7), torch.rand(7), torch.bfloat16)
    torch.library.opcheck(torch.ops.trimtab.int8_matmul.default, arguments)
    torch.library.opcheck(torch.ops.trimtab.int8_linear.default, (x, codes(33, 7), torch.rand(7), torch.rand(7)))


one = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: int8.quantize_rowwise(torch.zeros(2, 3, 4)), r"x must be a matrix, got shape \(2, 3, 4\)"),
        (lambda: int8.quantize_rowwise(torch.zeros(4, 3).t()), "contiguous"),
        (lambda: int8.quantize_rowwise(torch.zeros(4, 3, dtype=torch.int8)), "x must be float32"),
        (
            lambda: int8.int8_matmul(torch.zeros(2, 3), codes(3, 2), one, one),
            "a must be an int8 matrix, got torch.float32",
        ),
        (lambda: int8.int8_matmul(codes(2, 3), codes(2, 3), one, one), "inner dimensions differ"),
        (lambda: int8.int8_linear(torch.zeros(2, 3), codes(2, 3), one), "inner dimensions differ"),
        (lambda: int8.int8_linear(codes(2, 3), codes(3, 2), one), "x must be float32"),
        (
            lambda: int8.int8_matmul(codes(4, 8)[:, ::2], codes(4, 3), one, one),
            "a must be contiguous or a transposed view",
        ),
        (lambda: int8.int8_matmul(codes(2, 3), codes(3, 2), torch.ones(3), one), r"a_absmax must have shape \(2,\)"),
        (lambda: int8.int8_matmul(codes(2, 3), codes(3, 2), one, one.double()), "b_absmax must be float32"),
        (lambda: int8.int8_matmul(codes(2, 3), codes(3, 2), one, one, torch.ones(3)), "bias must have shape"),
        (lambda: int8.int8_matmul(codes(2, 3), codes(3, 2), one, one, dtype=torch.int32), "dtype must be float32"),
        (
            lambda: int8.int8_matmul(codes(1, 133_145), codes(133_145, 1), one, one),
            "an inner dimension of 133145 could overflow int32; split it into parts of at most 133144",
        ),
    ],
)
def test_bad_input_is_refused_with_what_would_work(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(1, 1), (3, 0), (17, 70)])
def test_both_layouts_are_the_tensorwise_codes_and_their_transpose(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, codes_t, absmax = int8.quantize_both_layouts(w)
    expected, scale = int8.quantize_tensorwise(w)
    assert torch.equal(codes, expected)
    assert torch.equal(codes_t, expected.t())
    assert codes_t.is_contiguous()
    assert torch.equal(absmax, scale)
    torch.library.opcheck(torch.ops.trimtab.quantize_both_layouts, (w,))
    with pytest.raises(ValueError, match="x must be a matrix"):
        int8.quantize_both_layouts(w.view(-1))
