"""The Triton kernels against the references, in Triton's interpreter on the CPU. test_kernels.py compiles them."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from tests.ops.rows import row
from trimtab.ops import (
    blockwise,
    blockwise_triton,
    gelu,
    gelu_triton,
    int8,
    int8_triton,
)
from trimtab.ops.checks import FLOATS
from trimtab.ops.codebook import dynamic, linear, load_codebook, midpoints
from trimtab.ops.step import fused as step
from trimtab.ops.step import fused_triton
from trimtab.ops.step.quadratic import encode_moments
from trimtab.ops.step.rules import MIX_G

SIGNED, UNSIGNED = load_codebook(), load_codebook(signed=False)
SIZES = [1, 63, 256, 257, 1031]  # below, at and above a block; a prime
RULES = {
    "adamw": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    "momentum": ("SGD", {"momentum": 0.9, "lr": 1e-2, "weight_decay": 0.1, "nesterov": True}),
    "lion": ("Lion", {"lr": 1e-2, "weight_decay": 0.1}),
    "rms": ("RMSprop", {"lr": 1e-2}),
    "ademamix": ("AdEMAMix", {"lr": 1e-2, "weight_decay": 0.1}),
    "rms_momentum": ("RMSprop", {"lr": 1e-2, "momentum": 0.9}),
    "rms_centered": ("RMSprop", {"lr": 1e-2, "alpha": 0.9}),
    "rms_centered_momentum": ("RMSprop", {"lr": 1e-2, "alpha": 0.9, "momentum": 0.9}),
}


@pytest.fixture(autouse=True)
def _no_numpy_warnings() -> Iterator[None]:
    """Some tests overflow or produce NaN on purpose; numpy, which interprets the kernels, would warn."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def small_tile(monkeypatch: pytest.MonkeyPatch) -> int:
    """A tile so small that blocks exceed it."""
    monkeypatch.setattr(blockwise_triton, "TILE", 128)
    return blockwise_triton.TILE


def assert_identical(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal values whose scales spread over ten decades, so that every decade of a codebook is used."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (-10 * torch.rand(shape, generator=generator) ** 3)


def test_the_interpreter_is_what_runs() -> None:
    assert type(blockwise_triton._quantize_kernel).__name__ == "InterpretedFunction"


# --- blockwise


@pytest.mark.parametrize("block", [1, 33, 64, 256, 300, 2048])
@pytest.mark.parametrize("n", SIZES)
def test_quantizing_matches_the_reference_exactly(n: int, block: int, small_tile: int) -> None:
    x = random(n)
    codes, absmax = blockwise.quantize_reference(x, SIGNED, block)
    assert_identical(blockwise_triton.quantize(x, SIGNED, block), (codes, absmax))
    expected = blockwise.dequantize_reference(codes, absmax, SIGNED, block, torch.float32)
    assert_identical(blockwise_triton.dequantize(codes, absmax, SIGNED, block, torch.float32), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_matches_the_reference_exactly(dtype: torch.dtype) -> None:
    x = random(1031).clamp(min=-0.9).to(dtype)
    x[x.float().abs() < 1e-6] = 0  # the interpreter reads denormal bfloat16 as zero
    codes, absmax = blockwise.quantize_reference(x, SIGNED, 64)
    assert_identical(blockwise_triton.quantize(x, SIGNED, 64), (codes, absmax))
    expected = blockwise.dequantize_reference(codes, absmax, SIGNED, 64, dtype)
    assert_identical(blockwise_triton.dequantize(codes, absmax, SIGNED, 64, dtype), expected)


@pytest.mark.parametrize("bits", [2, 5, 8])
@pytest.mark.parametrize("make", [dynamic, linear])
def test_a_value_on_a_boundary_goes_to_the_lower_code(make: Any, bits: int) -> None:
    codebook = make(bits=bits, **({"exponent_bits": bits - 1} if make is dynamic else {}))
    edges = midpoints(codebook)
    x = torch.cat([edges, edges.nextafter(torch.tensor(2.0)), edges.nextafter(torch.tensor(-2.0)), torch.ones(1)])
    expected = blockwise.quantize_reference(x, codebook, x.numel())
    assert_identical(blockwise_triton.quantize(x, codebook, x.numel()), expected)


@pytest.mark.parametrize("block", [64, 300])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_affects_only_its_own_block(bad: float, block: int, small_tile: int) -> None:
    x = random(1031)
    x[310] = bad
    x[600:] = 0  # and blocks of zeros stay zeros
    codes, absmax = blockwise_triton.quantize(x, SIGNED, block)
    assert_identical((codes, absmax), blockwise.quantize_reference(x, SIGNED, block))
    assert absmax.isnan().sum() == 1


def test_empty_tensors_and_given_outputs() -> None:
    codes, absmax = blockwise_triton.quantize(torch.empty(0, 3), SIGNED, 64)
    assert codes.shape == (0, 3)
    assert absmax.shape == (0,)
    assert blockwise_triton.dequantize(codes, absmax, SIGNED, 64, torch.float16).shape == (0, 3)
    x = random(5, 7)
    codes, absmax, out = torch.empty(5, 7, dtype=torch.uint8), torch.empty(2), torch.empty(5, 7)
    blockwise_triton.quantize_out(x, SIGNED, 33, codes, absmax)
    blockwise_triton.dequantize_out(codes, absmax, SIGNED, 33, out)
    assert_identical((codes, absmax), blockwise.quantize_reference(x, SIGNED, 33))
    assert_identical(out, blockwise.dequantize_reference(codes, absmax, SIGNED, 33, torch.float32))


# --- step


def arguments(
    rule: str,
    *,
    bits: int,
    block: int = 256,
    code: str = "codebook",
    sizes: list[int] = SIZES,
    params: Any = torch.float32,
    grads: Any = torch.float32,
) -> tuple[Any, ...]:
    """What `step` takes, for one tensor per size; `params` and `grads` are a dtype, or one per tensor."""
    p_dtypes, g_dtypes = ([d] * len(sizes) if isinstance(d, torch.dtype) else d for d in (params, grads))
    p = [random(n, seed=i).to(d) for i, (n, d) in enumerate(zip(sizes, p_dtypes, strict=True))]
    g = [random(n, seed=100 + i).to(d) for i, (n, d) in enumerate(zip(sizes, g_dtypes, strict=True))]
    signed = step.RULES[rule].signed
    stored: list[list[Any]] = []  # per tensor, per state
    for i, n in enumerate(sizes):
        moments = [random(n, seed=1000 * (k + 1) + i) for k in range(len(signed))]
        moments = [m if is_signed else m.square() for m, is_signed in zip(moments, signed, strict=True)]
        if code == "quadratic":
            stored.append(encode_moments(moments, step.RULES[rule].states, block))
        elif bits == 8:
            books = [SIGNED if is_signed else UNSIGNED for is_signed in signed]
            stored.append(
                [blockwise.quantize_reference(m, book, block) for m, book in zip(moments, books, strict=True)]
            )
        else:
            stored.append([(m,) for m in moments])
    states = [tensor[k][0] for k in range(len(signed)) for tensor in stored]
    absmax = [tensor[k][1] for k in range(len(signed)) for tensor in stored if bits == 8]
    kind, options = RULES[rule]
    scalars = row(kind, torch.arange(len(sizes)) + 1, **options)
    return p, g, states, absmax, scalars, SIGNED, UNSIGNED, rule, code, block


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([x.clone() for x in value] if isinstance(value, list) else value for value in args)


def stepped(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Parameters, states and scales after a step from a copy of these arguments."""
    args = copied(args)
    function(*args)
    return args[0], args[2], args[3]


@pytest.mark.parametrize(("bits", "code"), [(8, "codebook"), (8, "quadratic"), (32, "codebook")])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_on_many_tensors_matches_the_reference_exactly(rule: str, bits: int, code: str) -> None:
    args = arguments(rule, bits=bits, code=code, sizes=[1, 63, 0, 256, 257, 1031])
    assert_identical(stepped(fused_triton.step, args), stepped(step.step_reference, args))


@pytest.mark.parametrize(("rule", "block"), [*((rule, 300) for rule in RULES), ("adamw", 2048)])
@pytest.mark.parametrize("code", ["codebook", "quadratic"])
def test_a_block_may_be_longer_than_a_tile(rule: str, block: int, code: str, small_tile: int) -> None:
    args = arguments(rule, bits=8, block=block, code=code, sizes=[257, 700])
    assert_identical(stepped(fused_triton.step, args), stepped(step.step_reference, args))


@pytest.mark.parametrize("block", [1, 33, 64])
@pytest.mark.parametrize("code", ["codebook", "quadratic"])
def test_a_program_may_take_many_short_blocks(block: int, code: str) -> None:
    args = arguments("adamw", bits=8, block=block, code=code)
    assert_identical(stepped(fused_triton.step, args), stepped(step.step_reference, args))


@pytest.mark.parametrize("bits", [8, 32])
def test_dtypes_and_alignments_may_be_mixed_in_one_call(bits: int) -> None:
    sizes = [64, 63, 256, 257, 96, 64]
    mixed = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.bfloat16, torch.float32]
    args = arguments("adamw", bits=bits, params=mixed, grads=mixed[1:] + mixed[:1], sizes=sizes)
    assert_identical(stepped(fused_triton.step, args), stepped(step.step_reference, args))
    groups = list(fused_triton._groups(step.Arguments(*args)))
    rows = torch.cat([group.table[:, fused_triton.ROW.value] for group in groups])
    assert rows.sort().values.tolist() == list(range(len(sizes)))


def test_a_captured_step_gets_its_addresses_as_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("ademamix", bits=8)
    expected = [group.table for group in fused_triton._groups(step.Arguments(*args))]
    monkeypatch.setattr(fused_triton, "_is_captured", lambda device: True)
    assert_identical([group.table for group in fused_triton._groups(step.Arguments(*args))], expected)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_skips_its_tensor(bad: float, bits: int) -> None:
    args = arguments("adamw", bits=bits)
    args[4][3, MIX_G] = bad  # a number that this rule does not even use
    before, after = stepped(lambda *_: None, args), stepped(fused_triton.step, args)
    assert_identical(after, stepped(step.step_reference, args))
    for old, new in zip(before, after, strict=True):
        assert_identical(new[3 :: len(SIZES)], old[3 :: len(SIZES)])


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("rule", RULES)
def test_a_nan_gradient_reaches_its_parameter_and_its_block(rule: str, bits: int) -> None:
    args = arguments(rule, bits=bits, sizes=[257, 1031])
    args[1][1][300] = math.nan
    params, *stored = stepped(fused_triton.step, args)
    expected, *expected_stored = stepped(step.step_reference, args)
    assert params[1][300].isnan()
    params[1][300] = expected[1][300] = 0
    assert_identical((params, stored), (expected, expected_stored))
    assert any(x.isnan().any() for x in stored[1 if bits == 8 else 0])


def test_a_positive_second_moment_is_never_stored_as_zero() -> None:
    args = arguments("rms", bits=8, sizes=[256])
    args[1][0][:] = 1e-12
    args[1][0][7] = 1.0
    args[2][0][:] = 0
    _, (codes,), _ = stepped(fused_triton.step, args)
    assert (codes > 0).all()
    assert_identical(codes, stepped(step.step_reference, args)[1][0])


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("rule", RULES)
def test_norms_match_the_reference(rule: str, bits: int, small_tile: int) -> None:
    args = arguments(rule, bits=bits, block=300, sizes=[63, 0, 400], params=torch.bfloat16)
    args[4][0, step.LR] = math.nan  # not skipped here: the caller should see it
    args[4][2, step.EPS] = 0  # then 0 / 0 where a tile reaches beyond the tensor
    before = copied(args)
    actual = fused_triton.norms(*args)
    # A program adds a few hundred float32 numbers, which costs a few units in the last place.
    torch.testing.assert_close(actual, step.norms_reference(*args), rtol=1e-6, atol=0, equal_nan=True)
    assert_identical(fused_triton.norms(*args), actual)
    assert_identical(args[:4], before[:4])


@pytest.mark.parametrize("bits", [8, 32])
def test_gradient_ratios_match_the_reference(bits: int, small_tile: int) -> None:
    args = arguments("rms", bits=bits, block=300, sizes=[63, 0, 400])
    args[4][2, step.EPS] = 0
    args[4][0, step.COUPLED] = 0.5  # has no effect here
    torch.testing.assert_close(fused_triton.ratios(*args), step.ratios_reference(*args), rtol=1e-6, atol=0)


def test_gradient_norms_match_the_reference() -> None:
    grads = [random(n, seed=n).to(dtype) for n in (0, 1, 257, 5000) for dtype in FLOATS]
    grads[6][5] = math.inf
    expected = step.gradient_norms_reference(grads)
    torch.testing.assert_close(fused_triton.gradient_norms(grads), expected, rtol=1e-6, atol=0)


# --- int8


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1), (3, 0), (0, 3), (17, 300), (300, 17), (1, 1031)])
@pytest.mark.parametrize("whole", [64, 4096])
def test_int8_codes_match_the_reference_exactly(
    shape: tuple[int, int], dim: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_triton, "WHOLE", whole)  # longer rows are divided, as columns are
    monkeypatch.setattr(int8_triton, "PART", {0: 64, 1: 64})
    monkeypatch.setattr(int8_triton, "TILES", {0: (16, 64), 1: (1, 64)})
    x = random(*shape)
    if min(shape) > 1:
        x[1, 2] = math.nan
        x[0], x[:, 0] = 0, 0
    assert_identical(int8_triton.quantize(x, dim), int8.quantize_reference(x, dim))


@pytest.mark.parametrize("shape", [(1, 1), (3, 0), (17, 70), (130, 64)])
def test_a_weight_in_both_layouts_matches_the_reference_exactly(shape: tuple[int, int]) -> None:
    w = random(*shape).bfloat16()
    assert_identical(int8_triton.quantize_both_layouts(w), int8.both_layouts_reference(w))
    if w.numel():
        w[-1, -1] = math.inf
        assert_identical(int8_triton.quantize_both_layouts(w), int8.both_layouts_reference(w))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (17, 70), (130, 64)])
def test_a_weight_is_quantized_again_only_if_it_has_changed(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_triton, "PART", {1: 64})
    monkeypatch.setattr(int8_triton, "TILES", {1: (1, 64)})
    assert int8.MARKS[1] == int8_triton.PROGRAMS
    w = random(*shape).to(dtype)
    kept = int8.empty_both_layouts(w)

    def was_written() -> bool:
        """Whether codes were, which then are those of the reference."""
        kept[0].fill_(99)
        int8_triton.requantize_both_layouts(w, *kept)
        written = not (kept[0] == 99).all()
        if written:
            assert_identical(kept[:3], int8.both_layouts_reference(w))
        return written

    assert was_written()
    assert not was_written()
    w[-1, -1] = torch.nextafter(w[-1, -1], w.new_tensor(9.0))
    assert was_written()
    if w.numel() > 1:
        w[0, 0], w[-1, -1] = w[-1, -1].clone(), w[0, 0].clone()  # the same values at other places
        assert was_written()
        w.neg_()  # the same absmax
        assert was_written()
        assert not was_written()
        w[0, 0] = math.nan
        assert was_written()
        w[0, 0] = 0.0
        assert was_written()
    w.zero_()
    assert was_written()
    assert not was_written()


def test_marks_of_close_weights_differ() -> None:
    """Two sums of 32 bits each: neither repeats, nor do both depend on the same bits."""
    seen = []
    for k in range(64):
        w = torch.zeros(1, 64)
        w[0, k % 32], w[0, 32 + k // 2] = 2.0**-100 * (k + 1), -(2.0**-100)
        kept = int8.empty_both_layouts(w)
        int8_triton.requantize_both_layouts(w, *kept)
        seen.append(kept[3][1:, 0].tolist())
    for sums in zip(*seen, strict=True):
        assert len(set(sums)) == len(seen)
        # Each bit is set in about half of them: 32 of 64, with a deviation of 4.
        for bit in range(32):
            assert 12 <= sum(x >> bit & 1 for x in sums) <= 52


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_rounds_half_to_even(dtype: torch.dtype) -> None:
    x = torch.cat([torch.arange(-126.5, 127), torch.tensor([127.0])]).to(dtype)[None]
    codes, absmax = int8_triton.quantize(x, 1)
    assert_identical((codes, absmax), int8.quantize_reference(x, 1))


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 0, 4), (0, 3, 4), (130, 70, 129), (5, 300, 7)])
def test_int8_products_match_the_reference_exactly(size: tuple[int, int, int], scalar: bool) -> None:
    rows, inner, columns = size
    a = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
    b = torch.randint(-127, 128, (inner, columns), dtype=torch.int8)
    scales = [torch.rand(()) if scalar else torch.rand(n) for n in (rows, columns)]
    views = a.t().contiguous().t(), b.t().contiguous().t()
    biases = None, torch.randn(columns), torch.randn(columns).half()
    for dtype, bias in zip(FLOATS, biases, strict=True):
        expected = int8.matmul_reference(a, b, *scales, bias, dtype)
        assert_identical(int8_triton.matmul(a, b, *scales, bias, dtype), expected)
        assert_identical(int8_triton.matmul(*views, *scales, bias, dtype), expected)


def test_int8_products_do_not_depend_on_how_they_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_triton, "GROUP", 2)  # five rows of tiles: the last group is a short one
    a = torch.randint(-127, 128, (70, 128), dtype=torch.int8)
    b = torch.randint(-127, 128, (50, 128), dtype=torch.int8).t()
    operands = a, b, torch.rand(70), torch.rand(50), torch.randn(50), torch.float32
    expected = int8.matmul_reference(*operands)
    for config in ({"M": 16, "N": 16, "K": 32}, {"M": 32, "N": 64, "K": 16}):
        assert_identical(int8_triton.multiply(*operands, config), expected)
        monkeypatch.setattr(int8_triton, "FIXED", config)
        assert_identical(int8_triton.multiply_split(*operands, 3), expected)
    assert_identical(int8_triton.multiply_cublas(*operands), expected)


def test_the_fastest_product_is_measured_once_and_never_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def time_it(run: Any, **_: Any) -> float:
        timed.append(next(name for name, known in runs.items() if known is run))
        return {"triton": 2.0, "cublas": 1.0, "split": 3.0}[timed[-1]]

    monkeypatch.setattr(triton.testing, "do_bench", time_it)
    monkeypatch.setattr(int8_triton, "_fastest", {})
    runs = {name: lambda name=name: torch.ones(2) for name in ("triton", "cublas", "split")}
    assert int8_triton.choose(runs, (8, 8), measurable=False) == "triton"
    assert timed == []
    assert [int8_triton.choose(runs, (8, 8), measurable=True) for _ in range(2)] == ["cublas", "cublas"]
    assert timed == ["triton", "cublas", "split"]
    assert int8_triton.choose(runs, (8, 8), measurable=False) == "cublas"
    assert (
        int8_triton.choose({"triton": runs["triton"]}, (8, 8), measurable=True) == "triton"
    )  # a shape that it refuses


def test_a_graph_gets_the_tile_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(int8_triton, "launch", lambda kernel, *_, **__: launched.append(kernel))
    monkeypatch.setattr(int8_triton, "_tuned", set())
    a = torch.zeros(20, 32, dtype=torch.int8)
    for measurable in (False, True, False):
        monkeypatch.setattr(int8_triton, "can_measure", lambda x, measurable=measurable: measurable)
        int8_triton.multiply(a, a.t(), torch.ones(20), torch.ones(()), None, torch.float32)
    tuned = int8_triton._tuned_kernel
    assert launched == [int8_triton._matmul_kernel, tuned, tuned]


def test_a_product_that_is_refused_or_wrong_is_not_used() -> None:
    def refuse() -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    right = lambda: torch.tensor([1.0, torch.nan])  # noqa: E731
    runs: dict[str, Any] = {"triton": right, "cublas": refuse, "split": right}
    assert list(int8_triton.usable(runs)) == ["triton", "split"]
    assert list(int8_triton.usable(runs | {"cublas": lambda: torch.ones(2)})) == ["triton", "split"]


def test_cublas_is_offered_only_the_shapes_that_it_takes() -> None:
    def names(rows: int, inner: int, columns: int) -> list[str]:
        a, b = torch.empty(rows, inner, dtype=torch.int8), torch.empty(columns, inner, dtype=torch.int8)
        assert int8_triton.candidates(a, b.t().contiguous()) == ["triton"]
        return int8_triton.candidates(a, b.t())

    assert names(17, 8, 8) == ["triton", "cublas"]
    for refused in ((16, 8, 8), (17, 12, 8), (17, 8, 12)):
        assert names(*refused) == ["triton"]


def test_tiles_that_do_not_fit_or_would_spill_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {"A100": (8, 166912), "RTX 4090": (8, 101376), "H100": (9, 232448)}
    arguments = {"a_ptr": torch.empty(0), "bucket": 4096, "columns": 4096}
    found = {}
    for name, (major, memory) in gpus.items():
        device = SimpleNamespace(major=major, shared_memory_per_block_optin=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, device=device: device)
        found[name] = int8_triton.fits(int8_triton.CONFIGS, arguments)
        assert int8_triton.fits(int8_triton.CONFIGS, arguments | {"bucket": 1})[0].kwargs["M"] == 32
    assert found["H100"] == int8_triton.CONFIGS
    assert set(found["RTX 4090"]) <= set(found["A100"])
    assert all(int8_triton.sums_per_thread(config) <= 64 for config in found["A100"])


# --- gelu


@pytest.mark.parametrize("n", [0, *SIZES])
def test_gelu_and_its_slope_match_the_definition_in_float64(n: int) -> None:
    x, grad = 12 * torch.linspace(-1, 1, n) ** 3, random(n)
    expected = gelu.gelu_reference(x.double()).float()
    torch.testing.assert_close(gelu_triton.run(x, None), expected, rtol=1e-6, atol=1e-37)
    # The slope passes through zero near -0.75, where its two terms cancel.
    expected = gelu.backward_reference(grad.double(), x.double()).float()
    assert ((gelu_triton.run(x, grad) - expected).abs() <= 1e-6 * grad.abs()).all()


def test_gelu_has_its_limits_far_out() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e38, -1e38, 0.0])
    expected = torch.tensor([math.inf, 0, math.nan, 1e38, 0, 0])
    assert_identical(gelu_triton.run(x, None), expected)
    assert_identical(gelu_triton.run(x, torch.ones(6)), torch.tensor([1, 0, math.nan, 1, 0, 0.5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(1031, generator=torch.Generator().manual_seed(0))).to(dtype)
    expected = gelu.gelu_reference(x.double())
    wrong = gelu_triton.run(x, None).double() - expected
    assert (wrong.abs() <= 0.51 * torch.finfo(dtype).eps * expected.abs() + 1e-7).all()


# --- More than 2^31 values. Memory that is not written takes no space, and only the last program runs.

MANY = 2**31 + 2048


@pytest.fixture
def last_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        sizes = grid(constants) if callable(grid) else grid
        last = tuple(n - 1 for n in (*sizes, 1, 1)[:3])
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda *_: None)
        monkeypatch.setattr(interpreter_builder, "grid_idx", last, raising=False)
        kernel[(1,)](*arguments, **constants)

    for module in (blockwise_triton, fused_triton, gelu_triton, int8_triton):
        monkeypatch.setattr(module, "launch", launch)


def sparse(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose last 2048 values are random, and the others are not touched."""
    x = torch.empty(shape, dtype=dtype)
    x.view(-1)[-2048:] = random(2048).to(dtype) if dtype.is_floating_point else torch.randint(0, 100, (2048,))
    return x


@pytest.mark.usefixtures("last_program")
def test_blocks_beyond_2_31_values_match_the_reference() -> None:
    x = sparse(MANY, dtype=torch.bfloat16)
    end, one_block = x[-2048:].clone(), MANY
    codes, absmax = blockwise_triton.quantize(x, SIGNED, 256)
    assert_identical((codes[-2048:], absmax[-8:]), blockwise.quantize_reference(end, SIGNED, 256))
    out = blockwise_triton.dequantize(codes, absmax, SIGNED, 256, torch.bfloat16)
    expected = blockwise.dequantize_reference(codes[-2048:], absmax[-8:], SIGNED, 256, torch.bfloat16)
    assert_identical(out[-2048:], expected)
    out = blockwise_triton.dequantize(codes, torch.ones(1), SIGNED, one_block, torch.bfloat16)
    assert_identical(out[-2048:], SIGNED[codes[-2048:].int()].bfloat16())
    assert_identical(gelu_triton.run(x, None)[-1024:], gelu_triton.run(end, None)[-1024:])  # its tile


@pytest.mark.usefixtures("last_program")
def test_matrices_beyond_2_31_values_match_the_reference() -> None:
    x = sparse(MANY // 2048, 2048, dtype=torch.bfloat16)
    codes, absmax = int8_triton.quantize(x, 1)
    assert_identical((codes[-1:], absmax[-1:]), int8.quantize_reference(x[-1:], 1))
    _, run = int8_triton._measure(x.view(1, -1), 1, codes)
    run(absmax[-1:], MEASURE=False)
    assert_identical(codes[-1:], int8.quantize_reference(x[-1:], 1)[0])
    found = torch.zeros(int8.MARKS, dtype=torch.int32)
    part = 1025 * 2048  # the last of 1024 parts has two tiles, of which the first is zeros
    int8_triton.launch(int8_triton._survey_kernel, (1024,), x, found, x.numel(), part, TILE=2048, PARTS=1024)
    assert found[0, -1].view(torch.float32) == absmax[-1]
    codes_t, changed = torch.empty(2048, MANY // 2048, dtype=torch.int8), torch.ones(1, dtype=torch.int32)
    tensors = (x, codes.fill_(0), codes_t, absmax[-1:], changed)
    int8_triton.launch(int8_triton._both_layouts_kernel, (32, MANY // 2048 // 64 + 1), *tensors, *x.shape, TILE=64)
    assert_identical(codes[-1, -64:], int8.quantize_reference(x[-1:], 1)[0][0, -64:])
    assert_identical(codes_t[-64:, -1], codes[-1, -64:])
    total, scale = sparse(MANY // 2048, 2048, dtype=torch.int32), torch.ones(MANY // 2048)
    expected = int8.rescale_reference(total[-1:], scale[-1:], scale[:2048], None, torch.bfloat16)
    assert_identical(
        int8_triton.rescale(total, scale, scale[:2048], None, torch.bfloat16)[-1, -256:], expected[0, -256:]
    )
    b = torch.randint(-127, 128, (16, 2048), dtype=torch.int8).t()
    one = torch.ones(())
    expected = int8.matmul_reference(codes[-1:], b, one, one, None, torch.float32)
    assert_identical(int8_triton.multiply(codes, b, one, one, None, torch.float32)[-1:], expected)


@pytest.mark.usefixtures("last_program")
def test_a_step_beyond_2_31_values_matches_the_reference() -> None:
    args = arguments("momentum", bits=8, code="quadratic", sizes=[2048])
    (p,), (g,), (codes,), (absmax,), *rest = args
    large = [sparse(MANY, dtype=x.dtype) for x in (p, g, codes)]
    for x, end in zip(large, (p, g, codes), strict=True):
        x[-2048:] = end
    scales = torch.cat([torch.ones(MANY // 256 - 8), absmax])
    fused_triton.step([large[0]], [large[1]], [large[2]], [scales], *rest)
    step.step_reference(*args)
    assert_identical((large[0][-2048:], large[2][-2048:], scales[-8:]), (p, codes, absmax))
