"""Block-wise quantization: the definition, its anchors, its properties, and the kernels against it."""

import math
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import assert_same, seed, spread
from trimtab.ops import (
    backends,
    dequantize_blockwise,
    dequantize_tensorwise,
    load_codebook,
    quantize_blockwise,
    quantize_tensorwise,
)
from trimtab.ops.blockwise import dequantize_native, dequantize_reference, quantize_native, quantize_reference
from trimtab.ops.codebook import dynamic, linear, midpoints, quantile

SIGNED, UNSIGNED = load_codebook(), load_codebook(signed=False)
BOOKS = {
    "symmetric": SIGNED,
    "dynamic": dynamic(),
    "unsigned": UNSIGNED,
    "linear": linear(),
    "four bits": dynamic(exponent_bits=3, bits=4),
    "two values": torch.tensor([-1.0, 1.0]),
}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


# --- The definition against the paper


@pytest.mark.parametrize(
    ("table", "vectors"),
    [
        (
            dynamic(),
            {-1: 0, -0.5: 35, -0.1: 64, -1e-3: 112, -3e-7: 126, -2e-7: 127, 2e-7: 127, 3e-7: 128, 1e-4: 134, 0.01: 158,
             0.1: 190, 0.25: 201, 0.9: 247, 0.9965: 255},
        ),
        (UNSIGNED, {1.6e-7: 0, 1.7e-7: 1, 5e-7: 1, 1e-6: 2, 1e-5: 6, 0.1: 126, 0.998: 254}),
    ],
)  # fmt: skip
def test_codes_are_the_published_ones(table, vectors):
    x = torch.tensor([*vectors, 1.0])
    codes, absmax = quantize_blockwise(x, table, block=len(x))
    assert absmax.item() == 1.0
    assert dict(zip(vectors, codes.tolist(), strict=False)) == vectors


@pytest.mark.parametrize(
    ("data", "table", "block", "absolute", "relative"),
    [
        ("normal", "linear", None, 0.00981, 0.188),
        ("normal", "linear", 2048, 0.00710, 0.135),
        ("normal", "linear", 256, 0.00595, 0.109),
        ("normal", "dynamic", None, 0.01194, 0.0188),
        ("normal", "dynamic", 4096, 0.01005, 0.0170),
        ("normal", "dynamic", 2048, 0.00970, 0.0167),
        ("normal", "dynamic", 256, 0.00854, 0.0154),
        ("normal", "dynamic", 64, 0.00754, 0.0142),
        ("uniform", "dynamic", None, 0.00321, 0.0100),
        ("uniform", "dynamic", 256, 0.00321, 0.0100),
        ("outlier", "linear", None, 0.196, 4.22),
        ("outlier", "dynamic", None, 0.0295, 0.043),
        ("outlier", "dynamic", 2048, 0.0097, 0.0167),
    ],
)
def test_errors_are_those_of_the_paper(data, table, block, absolute, relative):
    # The anchors come from another random generator; 2^20 samples leave a few percent of spread.
    generator = seed(0)
    count = 1 << 20
    x = torch.rand(count, generator=generator) if data == "uniform" else torch.randn(count, generator=generator)
    if data == "outlier":
        x[0] = 100.0
    book = load_codebook(table, signed=True)
    codes, absmax = quantize_blockwise(x, book, block=block or count)
    error = (dequantize_blockwise(codes, absmax, book, block=block or count) - x).abs()
    assert error.mean().item() == pytest.approx(absolute, rel=0.06)
    # A mean of ratios is led by the few values next to zero, so the linear table's is loose.
    assert (error / x.abs()).mean().item() == pytest.approx(relative, rel=0.25 if table == "linear" else 0.1)


def test_quantile_errors_are_those_of_the_paper():
    x = torch.randn(1 << 20, generator=seed(0))
    book = quantile(x)
    values = book[torch.bucketize(x, midpoints(book))]
    assert (values - x).abs().mean().item() == pytest.approx(0.00676, rel=0.05)


def test_ties_go_to_the_lower_index(level):
    for name in ("symmetric", "dynamic", "unsigned"):
        book = BOOKS[name]
        x = torch.cat([midpoints(book), torch.ones(1)])
        codes, _ = quantize_native(x, book, len(x))
        assert codes.tolist() == list(range(256))


# --- Kernels against the definition


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BOOKS)
def test_native_codes_match_the_reference_exactly(level, name, dtype):
    book, generator = BOOKS[name], seed(1)
    # Below, at and above a block and a group of lanes; primes; blocks longer than one thread's task.
    for count, block in [(1, 1), (63, 256), (256, 256), (257, 256), (1031, 33), (10_007, 64), (100_003, 40_000)]:
        x = spread(count, generator).to(dtype)
        x = x.abs() if name == "unsigned" else x
        codes, absmax = quantize_native(x, book, block)
        expected = quantize_reference(x, book, block)
        assert_same(codes, expected[0])
        assert_same(absmax, expected[1])
        assert_same(
            dequantize_native(codes, absmax, book, block, dtype), dequantize_reference(*expected, book, block, dtype)
        )


@pytest.mark.parametrize("name", ["symmetric", "dynamic", "unsigned"])
@pytest.mark.parametrize("scale", [1.0, 0.3, 7e5, 1e-30, 3e-39, 1e37])
def test_native_codes_match_the_reference_next_to_every_boundary(level, name, scale):
    # The kernel guesses, and verifies a group of lanes if one of them is near a boundary. So this is where it could go
    # wrong, and each point stands in a group of its own: its neighbours must not call for the verification.
    book = BOOKS[name]
    points = midpoints(book)
    for _ in range(8):
        points = torch.cat([points, points.nextafter(torch.tensor(2.0)), points.nextafter(torch.tensor(-2.0))]).unique()
    x = torch.full((len(points) + 1, 64), book[224].item())  # the middle of a cell
    x[:-1, 0], x[-1, 0] = points, 1.0
    x *= scale
    codes, _ = quantize_native(x, book, x.numel())
    assert_same(codes, quantize_reference(x, book, x.numel())[0])


def test_every_code_decodes_to_its_codebook_entry(level):
    codes = torch.arange(256, dtype=torch.uint8)
    for book in BOOKS.values():
        inside = codes[: book.numel()]
        assert_same(dequantize_native(inside, torch.ones(1), book, 256, torch.float32), book)


def test_the_dynamic_tables_take_the_fast_path():
    assert backends.native is not None
    for name, book in BOOKS.items():
        fast = backends.native.has_closed_form(book.data_ptr(), book.numel())
        assert fast == (name in ("symmetric", "dynamic", "unsigned"))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(threads):
    x, before = spread(200_001, seed(2)), torch.get_num_threads()
    expected = quantize_reference(x, SIGNED, 256)
    try:
        torch.set_num_threads(threads)
        for block in (256, 100_000):
            codes, _ = quantize_blockwise(x, SIGNED, block=block)
            assert_same(codes, quantize_reference(x, SIGNED, block)[0])
        assert_same(
            dequantize_blockwise(*expected, SIGNED), dequantize_reference(*expected, SIGNED, 256, torch.float32)
        )
    finally:
        torch.set_num_threads(before)


def test_tables_of_different_calls_and_threads_stay_apart(level):
    codes, absmax = torch.arange(256, dtype=torch.uint8), torch.ones(1)
    got: list[Tensor] = []

    def decode(book: Tensor) -> None:
        got.append(dequantize_blockwise(codes, absmax, book))

    for book in (UNSIGNED, SIGNED, BOOKS["linear"], UNSIGNED):
        thread = threading.Thread(target=decode, args=(book,))
        thread.start()
        thread.join()
        assert_same(got[-1], book)


@pytest.mark.parametrize("block", [10**6, 2**40, 2**63 - 1])
def test_a_block_longer_than_the_tensor_is_one_block(block):
    x = spread(100, seed(9))
    codes, absmax = quantize_blockwise(x, SIGNED, block=block)
    assert_same(codes, quantize_reference(x, SIGNED, 100)[0])
    assert_same(dequantize_blockwise(codes, absmax, SIGNED, block=block), dequantize_blockwise(codes, absmax, SIGNED))


def test_a_code_beyond_a_short_codebook_is_nan():
    codes = torch.tensor([0, 2, 3, 255], dtype=torch.uint8)
    y = dequantize_native(codes, torch.ones(1), torch.tensor([-1.0, 0.0, 1.0]), 4, torch.float32)
    assert_same(y, torch.tensor([-1.0, 1.0, math.nan, math.nan]))


def test_the_tables_do_not_take_on_the_callers_context():
    code = (
        "import torch; from trimtab.ops import *\n"
        "with torch.device('meta'), torch.inference_mode(): assert load_codebook().device.type == 'cpu'\n"
        "assert not load_codebook().is_inference()\n"
        "with torch.device('meta'): codes, _ = quantize_blockwise(torch.ones(300, device='cpu'), load_codebook())\n"
        "assert codes.tolist() == [255] * 300\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_small_stacks_are_enough():
    before, threads = threading.stack_size(128 << 10), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        x = torch.ones(200_000, dtype=torch.bfloat16)
        thread = threading.Thread(target=lambda: quantize_blockwise(x, SIGNED))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
        torch.set_num_threads(threads)


def test_compiled_code_calls_the_ops_without_a_graph_break():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def there_and_back(x: Tensor, codes: Tensor, absmax: Tensor) -> Tensor:
        quantize_blockwise(x, SIGNED, out=(codes, absmax))
        return dequantize_blockwise(codes, absmax, SIGNED)

    x = spread(1000, seed(10))
    got = there_and_back(x, torch.zeros(1000, dtype=torch.uint8), torch.zeros(4))
    assert_same(got, dequantize_blockwise(*quantize_blockwise(x, SIGNED), SIGNED))


# --- NaN, Inf, zeros, extremes


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block", [64, 50_000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_non_finite_value_makes_its_own_block_nan_and_no_other(bad, block, dtype):
    x = torch.ones(150_000 if block > 64 else 300, dtype=dtype)
    x[block + 3] = bad
    for codes, absmax in (quantize_blockwise(x, SIGNED, block=block), quantize_reference(x, SIGNED, block)):
        y = dequantize_blockwise(codes, absmax, SIGNED, block=block)
        assert y[block : 2 * block].isnan().all()
        assert (y[:block] == 1).all()
        assert (y[2 * block :] == 1).all()


def test_zero_blocks_stay_zero():
    x = torch.zeros(600)
    x[300] = 5.0
    for book in (SIGNED, UNSIGNED):
        codes, absmax = quantize_blockwise(x, book)
        assert absmax.tolist() == [0.0, 5.0, 0.0]
        assert_same(dequantize_blockwise(codes, absmax, book), x)


def test_subnormal_and_huge_blocks_keep_their_codes():
    x = spread(256, seed(3), decades=3)
    codes, _ = quantize_blockwise(x, SIGNED)
    for power in (-130, -119, -30, 60, 125):
        y = (x.double() / x.abs().max() * 2.0**power).float()
        assert_same(quantize_blockwise(y, SIGNED)[0], quantize_reference(y, SIGNED, 256)[0])
    assert_same(quantize_blockwise(x * 2.0**-30, SIGNED)[0], codes)


# --- Properties

blocks = st.lists(
    st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 2.0**-80),
    min_size=1,
    max_size=70,
)


@settings(max_examples=60, deadline=None)
@given(values=blocks, power=st.integers(-10, 10), block=st.integers(1, 80))
def test_scaling_by_a_power_of_two_leaves_the_codes(values, power, block):
    x = torch.tensor(values)
    codes, absmax = quantize_blockwise(x, SIGNED, block=block)
    scaled, scaled_absmax = quantize_blockwise(x * 2.0**power, SIGNED, block=block)
    assert_same(scaled, codes)
    assert_same(scaled_absmax, absmax * 2.0**power)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-1, 1, width=32), min_size=32, max_size=32), order=st.permutations(range(4)))
def test_permuting_blocks_permutes_codes(values, order):
    x = torch.tensor(values).view(4, 8)
    codes, absmax = quantize_blockwise(x, SIGNED, block=8)
    permuted, permuted_absmax = quantize_blockwise(x[list(order)].contiguous(), SIGNED, block=8)
    assert_same(permuted, codes[list(order)])
    assert_same(permuted_absmax, absmax[list(order)])


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-1, 1, width=32), min_size=24, max_size=24), where=st.integers(0, 23))
def test_an_outlier_affects_only_its_own_block(values, where):
    x = torch.tensor(values)
    codes, absmax = quantize_blockwise(x, SIGNED, block=8)
    changed = x.clone()
    changed[where] = 1e6
    new_codes, new_absmax = quantize_blockwise(changed, SIGNED, block=8)
    others = torch.arange(24) // 8 != where // 8
    assert_same(new_codes[others], codes[others])
    assert_same(new_absmax[torch.arange(3) != where // 8], absmax[torch.arange(3) != where // 8])


@settings(max_examples=60, deadline=None)
@given(values=blocks, block=st.integers(1, 80))
def test_a_second_round_trip_changes_nothing(values, block):
    x = torch.tensor(values)
    once = dequantize_blockwise(*quantize_blockwise(x, SIGNED, block=block), SIGNED, block=block)
    twice = dequantize_blockwise(*quantize_blockwise(once, SIGNED, block=block), SIGNED, block=block)
    assert_same(twice, once)


def test_without_minus_one_a_negative_block_shrinks_at_each_round_trip():
    x = torch.full((256,), -1.0)
    for book, left in ((dynamic(), 0.99296875**10), (SIGNED, 1.0)):
        y = x
        for _ in range(10):
            y = dequantize_blockwise(*quantize_blockwise(y, book), book)
        assert torch.allclose(y, x * left)


@settings(max_examples=60, deadline=None)
@given(values=blocks, block=st.integers(1, 80), unsigned=st.booleans())
def test_no_finite_input_gives_nan_and_errors_stay_inside_half_a_step(values, block, unsigned):
    book = UNSIGNED if unsigned else SIGNED
    x = torch.tensor(values).abs() if unsigned else torch.tensor(values)
    codes, absmax = quantize_blockwise(x, book, block=block)
    y = dequantize_blockwise(codes, absmax, book, block=block)
    assert y.isfinite().all()
    scale = absmax.repeat_interleave(block)[: x.numel()]
    assert ((y - x).abs() <= scale * (book.diff().max() / 2) * 1.0001).all()


# --- The public functions


@pytest.mark.parametrize("dtype", FLOATS)
def test_out_gets_the_same_result(dtype):
    x = spread(1000, seed(4)).to(dtype)
    codes, absmax = quantize_blockwise(x, SIGNED, block=64)
    out = torch.zeros(1000, dtype=torch.uint8), torch.zeros(16)
    assert quantize_blockwise(x, SIGNED, block=64, out=out) is not None
    assert_same(out[0], codes)
    assert_same(out[1], absmax)
    y = torch.zeros(1000, dtype=dtype)
    dequantize_blockwise(codes, absmax, SIGNED, block=64, out=y)
    assert_same(y, dequantize_blockwise(codes, absmax, SIGNED, block=64, dtype=dtype))


def test_tensorwise_is_one_block():
    x = spread(1000, seed(5)).view(10, 100)
    codes, absmax = quantize_tensorwise(x, SIGNED)
    assert absmax.shape == (1,)
    assert codes.shape == x.shape
    assert_same(codes, quantize_reference(x, SIGNED, 1000)[0])
    assert dequantize_tensorwise(codes, absmax, SIGNED).shape == x.shape


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 5)])
def test_any_shape_works(shape):
    x = torch.randn(shape, generator=seed(6))
    codes, absmax = quantize_blockwise(x, SIGNED, block=7)
    assert codes.shape == x.shape
    assert absmax.shape == (-(-x.numel() // 7),)
    assert dequantize_blockwise(codes, absmax, SIGNED, block=7).shape == x.shape
    assert quantize_tensorwise(x, SIGNED)[0].shape == x.shape


def test_the_ops_pass_the_checks_of_torch_library():
    x, out = spread(300, seed(7)), (torch.zeros(300, dtype=torch.uint8), torch.zeros(2))
    codes, absmax = quantize_blockwise(x, SIGNED)
    ops = torch.ops.trimtab
    torch.library.opcheck(ops.quantize_blockwise.default, (x, SIGNED, 256))
    torch.library.opcheck(ops.dequantize_blockwise.default, (codes, absmax, SIGNED, 256, torch.bfloat16))
    torch.library.opcheck(ops.quantize_blockwise_out.default, (x, SIGNED, 256, *out))
    torch.library.opcheck(ops.dequantize_blockwise_out.default, (codes, absmax, SIGNED, 256, torch.zeros(300)))


def _quantize(x: Tensor = SIGNED, book: Tensor = SIGNED, **options: object) -> object:
    return quantize_blockwise(x, book, **options)  # type: ignore[arg-type]


codes4, scale1 = torch.zeros(4, dtype=torch.uint8), torch.zeros(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _quantize(torch.zeros(4, dtype=torch.int32)), "x must be float32 or bfloat16 or float16, got int32"),
        (lambda: _quantize(torch.zeros(4, dtype=torch.float64)), "got float64"),
        (lambda: _quantize(torch.zeros(4, 3).t()), r"contiguous, got shape \(3, 4\) with strides \(1, 3\)"),
        (lambda: _quantize(torch.zeros(1).expand(4)), "x must be contiguous"),
        (lambda: _quantize(torch.zeros(4).to_sparse()), "x must be dense"),
        (lambda: _quantize([1.0]), "x must be a tensor, got list"),
        (lambda: _quantize(torch.zeros(4, device="meta")), "codebook is on cpu but x is on meta"),
        (lambda: _quantize(book=torch.zeros(257)), "codebook must be a vector of 2 to 256"),
        (lambda: _quantize(book=SIGNED.double()), "codebook must be float32, got float64"),
        (lambda: _quantize(book=SIGNED.flip(0)), "codebook must be sorted"),
        (lambda: _quantize(book=SIGNED * math.nan), "free of NaN"),
        (
            lambda: _quantize(SIGNED, out=(torch.zeros(256, dtype=torch.uint8), torch.zeros(1, device="meta"))),
            "absmax is on meta",
        ),
        (lambda: _quantize(block=0), "block must be at least 1, got 0"),
        (lambda: _quantize(block=2.5), "block must be an int, got float"),
        (lambda: _quantize(out=(torch.zeros(256), scale1)), "codes must be uint8, got float32"),
        (lambda: _quantize(out=(codes4, scale1)), r"out\[0\] must have shape \(256,\)"),
        (
            lambda: _quantize(torch.zeros(4), out=(codes4, torch.zeros(2))),
            r"must have shape \(1,\) \(one per block of 256\)",
        ),
        (lambda: _quantize(SIGNED, out=(SIGNED.view(torch.uint8)[:256], scale1)), "share memory"),
        (lambda: dequantize_blockwise(codes4.view(torch.int8), scale1, SIGNED), "codes must be uint8, got int8"),
        (lambda: dequantize_blockwise(codes4, scale1, SIGNED, dtype=torch.float64), "dtype must be float32"),
        (lambda: dequantize_blockwise(codes4, scale1, SIGNED, out=torch.zeros(5)), "out must have shape"),
    ],
)
def test_bad_input_is_refused_with_what_would_work(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
