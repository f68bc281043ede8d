"""int8 quantization and the int8 matrix product on the GPU: the Triton kernels of int8.py.

Quantizing: a row of up to WHOLE values is read once and stays in registers. Longer rows, tensors and columns are split
into parts, with one launch for the absmax and one to round.

    lane 0   [ part 0: TILE, TILE, ... | part 1 ... ]        absmax of a lane = largest absmax of its parts

A weight is stored in both layouts, because tensor cores read int8 only where the inner dimension is contiguous:

    Y = X W^T    inner dimension in:  codes of W   [out, in]
    dX = G W     inner dimension out: codes of W^T [in, out]

Its codes are made again only if it has changed. The read that finds the absmax also adds up a hash of every value and
its place; a program compares these marks with those of the stored codes, and if they are equal, the kernel that would
write codes ends at once. Nothing of it is read by the host.

The product: int8 tiles multiplied and added up in int32, which is exact, so every tile size, every division of the
inner dimension and cuBLASLt give the same sums. Scales and bias are applied to a tile before it is written ("triton"),
or in a second kernel after the sums of several programs ("split") or of `torch._int_mm` ("cublas"). The fastest is
measured once per shape. Codes, scales and products equal the reference to the last bit.

Wortsman et al. 2023, section 2.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (the parameters of a kernel are Triton's values; the functions that Python calls are typed)

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.ops.blockwise_triton import launch, magnitude_bits, narrow, stored_absmax, to_unit

WHOLE = 16384  # the longest row that a program keeps in registers: 32 values per thread of 16 warps
TILES = {0: (64, 32), 1: (1, 2048)}  # columns (rows) per program, and values of each at a time: 16 per thread
PART = {0: 256, 1: 8192}  # the shortest part of a column (row)
PROGRAMS = 1024  # enough programs to fill a large GPU; with fewer lanes than that, lanes are split
SQUARE = 64  # the tile that is stored in both layouts, 32 values per thread of 4 warps
RESCALE = {"M": 8, "N": 256}  # 16 values per thread

# Tiles of the product. The int32 sums take M * N / (32 * num_warps) registers per thread. With 64, one program of 8
# warps or two of 4 are on a multiprocessor, and the stages of (M + N) * K bytes hide the latency instead of more warps.
# With 128, no registers are left for operands: these tiles are for sm_90 and later, which read them from shared memory.
GROUP = 8  # rows of tiles that share columns in the cache
FIXED: dict[str, int] = {"M": 128, "N": 128, "K": 64, "num_warps": 8, "num_stages": 3}  # where nothing is measured
CONFIGS = [
    triton.Config({"M": m, "N": n, "K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (128, 128, 64, 8, 3),
        (128, 128, 128, 8, 3),
        (128, 128, 128, 4, 3),
        (128, 256, 64, 8, 3),
        (128, 256, 128, 8, 3),
        (64, 128, 128, 4, 4),
        (128, 64, 128, 4, 4),
        (64, 64, 128, 4, 4),
        (32, 64, 128, 4, 5),
    )
]
LONGEST = 128  # the largest K of a config

_fastest: dict[tuple[Any, ...], str] = {}  # the product of each shape and device
_one_at_a_time = Lock()
_tuned: set[tuple[Any, ...]] = set()  # what the tuned kernel has run with: it is loaded, and measures nothing more


def quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=torch.int8)
    lanes, length = x.shape[1 - dim], x.shape[dim]
    if x.numel() == 0:
        return codes, x.new_zeros(lanes, dtype=torch.float32)
    if dim == 1 and length <= WHOLE:
        absmax = x.new_empty(lanes, dtype=torch.float32)
        tile = triton.next_power_of_2(length)
        rows = max(1, 2048 // tile)
        shape = {"ROWS": rows, "TILE": tile, "num_warps": min(max(4, tile // 512), 16)}
        launch(_rows_kernel, (triton.cdiv(lanes, rows),), x, codes, absmax, lanes, length, **shape)
        return codes, absmax
    absmax, run = _measure(x, dim, codes)
    run(absmax, MEASURE=False)
    return codes, absmax


def quantize_both_layouts(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty_like(w, dtype=torch.int8)
    codes_t = w.new_empty(w.shape[1], w.shape[0], dtype=torch.int8)
    absmax = w.new_empty((), dtype=torch.float32)
    _both_layouts(w, codes, codes_t, absmax, None)
    return codes, codes_t, absmax


def requantize_both_layouts(w: Tensor, codes: Tensor, codes_t: Tensor, absmax: Tensor, marks: Tensor) -> None:
    # The launches of another thread on this stream must not come between: its codes would not be written yet.
    with _one_at_a_time:
        _both_layouts(w, codes, codes_t, absmax, marks)


def _both_layouts(w: Tensor, codes: Tensor, codes_t: Tensor, absmax: Tensor, marks: Tensor | None) -> None:
    """Without marks the codes are always written."""
    if w.numel() == 0:
        absmax.zero_()
        return
    tile, length = TILES[1][1], w.numel()
    parts = min(PROGRAMS, triton.cdiv(length, PART[1]))
    part = triton.cdiv(length, parts * tile) * tile
    found, changed = w.new_empty(3, PROGRAMS, dtype=torch.int32), w.new_empty(1, dtype=torch.int32)
    launch(_survey_kernel, (parts,), w, found, length, part, TILE=tile, PARTS=PROGRAMS)
    stored = (found if marks is None else marks, absmax, changed)
    launch(_settle_kernel, (1,), found, *stored, parts, COMPARE=marks is not None, PARTS=PROGRAMS)
    grid = (triton.cdiv(w.shape[1], SQUARE), triton.cdiv(w.shape[0], SQUARE))
    launch(_both_layouts_kernel, grid, w, codes, codes_t, absmax, changed, *w.shape, TILE=SQUARE)


def _measure(x: Tensor, dim: int, codes: Tensor) -> tuple[Tensor, Callable[..., None]]:
    """The absmax of each lane, and the launch that found the absmax of their parts."""
    lanes, length = x.shape[1 - dim], x.shape[dim]
    side, tile = TILES[dim]
    groups = triton.cdiv(lanes, side)
    parts = min(triton.cdiv(PROGRAMS, groups), triton.cdiv(length, PART[dim]))
    part = triton.cdiv(length, parts * tile) * tile
    sizes = (lanes, length, x.stride(1 - dim), x.stride(dim), part)

    def run(absmax: Tensor, **constants: bool) -> None:
        operands = (x, codes, absmax, *sizes)
        launch(_parts_kernel, (groups, parts), *operands, **constants, LANES=side, TILE=tile)

    found = x.new_empty(parts, lanes, dtype=torch.float32)
    run(found, MEASURE=True)
    return found.amax(dim=0), run


# --- The product


def matmul(a: Tensor, b: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if a.shape[0] * b.shape[1] == 0:
        return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    products: dict[str, Callable[..., Tensor]] = {
        "triton": multiply,
        "split": multiply_split,
        "cublas": multiply_cublas,
    }
    operands = (a, b, a_absmax, b_absmax, bias, dtype)
    runs = {name: partial(products[name], *operands) for name in candidates(a, b)}
    layout = (a.is_contiguous(), b.t().is_contiguous(), a_absmax.dim(), b_absmax.dim(), bias is None, dtype)
    key = (a.device, triton.next_power_of_2(a.shape[0]), *b.shape, *layout)
    with torch.cuda.device_of(a):
        return runs[choose(runs, key, measurable=can_measure(a))]()


def candidates(a: Tensor, b: Tensor) -> list[str]:
    """The products that can multiply these codes. `torch._int_mm` on CUDA refuses other shapes."""
    (rows, inner), columns = a.shape, b.shape[1]
    names = ["triton"]
    if a.is_contiguous() and b.t().is_contiguous() and rows > 16 and inner > 0 and inner % 8 == columns % 8 == 0:
        names.append("cublas")
    if splits(a, b) > 1:
        names.append("split")
    return names


def choose(runs: Mapping[str, Callable[[], object]], key: tuple[Any, ...], *, measurable: bool) -> str:
    """The name of the fastest, measured once per key. Where nothing may be measured, a known one or the first."""
    if key not in _fastest:
        if not measurable or len(runs) == 1:
            return next(iter(runs))
        times = {name: triton.testing.do_bench(run, warmup=5, rep=20) for name, run in usable(runs).items()}
        _fastest[key] = min(times, key=times.__getitem__)
    return _fastest[key] if _fastest[key] in runs else next(iter(runs))


def usable(runs: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """The first, and those that run here and give the same: cuBLASLt refuses int8 on some GPUs."""
    names = list(runs)
    found, expected = {names[0]: runs[names[0]]}, runs[names[0]]()
    for name in names[1:]:
        with suppress(RuntimeError):
            if torch.allclose(runs[name](), expected, rtol=0, atol=0, equal_nan=True):
                found[name] = runs[name]
    return found


def can_measure(x: Tensor) -> bool:
    """On a GPU, and not while a CUDA graph is captured: timing synchronises."""
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()


def splits(a: Tensor, b: Tensor) -> int:
    """Into how many parts the inner dimension may be divided, where there are too few tiles for all processors."""
    if not a.is_cuda:
        return 1
    tiles: int = triton.cdiv(a.shape[0], FIXED["M"]) * triton.cdiv(b.shape[1], FIXED["N"])
    processors: int = torch.cuda.get_device_properties(a.device).multi_processor_count
    return max(1, min(processors // tiles, a.shape[1] // 1024, 16))


def multiply(
    a: Tensor,
    b: Tensor,
    a_absmax: Tensor,
    b_absmax: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    _launch_product(a, b, a_absmax, b_absmax, bias, out, split=1, config=config)
    return out


def multiply_split(
    a: Tensor,
    b: Tensor,
    a_absmax: Tensor,
    b_absmax: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    split: int | None = None,
) -> Tensor:
    total = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.int32)
    _launch_product(a, b, a_absmax, b_absmax, None, total, split=split or splits(a, b), config=None)
    return rescale(total, a_absmax, b_absmax, bias, dtype)


def multiply_cublas(
    a: Tensor, b: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return rescale(torch._int_mm(a, b), a_absmax, b_absmax, bias, dtype)


def rescale(total: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows, columns = total.shape
    out = total.new_empty(rows, columns, dtype=dtype)
    grid = (triton.cdiv(rows, RESCALE["M"]), triton.cdiv(columns, RESCALE["N"]))
    operands = (total, a_absmax, b_absmax, out if bias is None else bias, out)
    sizes = (rows, columns, a_absmax.dim(), b_absmax.dim())
    launch(_rescale_kernel, grid, *operands, *sizes, HAS_BIAS=bias is not None, **RESCALE)
    return out


def _launch_product(
    a: Tensor,
    b: Tensor,
    a_absmax: Tensor,
    b_absmax: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    split: int,
    config: Mapping[str, int] | None,
) -> None:
    (rows, inner), columns = a.shape, b.shape[1]
    strides = (*a.stride(), *b.stride(), a_absmax.dim(), b_absmax.dim())  # a scalar scale has stride 0, a vector 1
    operands = (a, b, a_absmax, b_absmax, out if bias is None else bias, out)
    sizes = (rows, columns, inner, *strides, triton.next_power_of_2(rows))
    shape = {"HAS_BIAS": bias is not None, "SPLIT": split, "EVEN": inner % LONGEST == 0, "GROUP": GROUP}

    def grid(meta: Mapping[str, int]) -> tuple[int, int]:
        return triton.cdiv(rows, meta["M"]) * triton.cdiv(columns, meta["N"]), split

    # While a graph is captured, CUDA loads no kernel: what ran before must run again.
    known = (a.device, *sizes, split, None if bias is None else bias.dtype, out.dtype)
    if config is None and (known in _tuned or can_measure(a)):
        launch(_tuned_kernel, grid, *operands, *sizes, **shape)
        _tuned.add(known)
    else:
        launch(_matmul_kernel, grid, *operands, *sizes, **shape, **(config or FIXED))


def fits(configs: list[Any], arguments: Mapping[str, Any], **_: Any) -> list[Any]:
    """The configs whose stages fit into the shared memory of the device, and whose tile is not mostly empty."""
    properties = torch.cuda.get_device_properties(arguments["a_ptr"].device)
    memory = getattr(properties, "shared_memory_per_block_optin", 65536)
    rows, columns = max(32, arguments["bucket"]), max(64, triton.next_power_of_2(arguments["columns"]))
    found = []
    for config in configs:
        m, n, k = config.kwargs["M"], config.kwargs["N"], config.kwargs["K"]
        spills = sums_per_thread(config) > 64 and properties.major < 9
        if config.num_stages * (m + n) * k <= memory and m <= rows and n <= columns and not spills:
            found.append(config)
    return found or [configs[-1]]


def sums_per_thread(config: Any) -> int:
    sums: int = config.kwargs["M"] * config.kwargs["N"] // (32 * config.num_warps)
    return sums


# --- Kernels. Where a row begins is a 64-bit number.


@triton.jit
def _round(unit):
    # Near 1.5 * 2^23 neighbouring floats are 1 apart: adding it rounds half to even.
    return ((unit * 127.0 + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _rows_kernel(x_ptr, codes_ptr, absmax_ptr, rows, length, ROWS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, TILE)[None, :]
    mask = (row < rows)[:, None] & (columns < length)
    offsets = (row * length)[:, None] + columns
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    bits = tl.max(magnitude_bits(x, mask), axis=1)
    tl.store(absmax_ptr + row, stored_absmax(bits), mask=row < rows)
    tl.store(codes_ptr + offsets, _round(to_unit(x, bits[:, None])), mask=mask)


@triton.jit
def _parts_kernel(
    x_ptr,
    codes_ptr,
    absmax_ptr,
    lanes,
    length,
    lane_stride,
    stride,
    part,
    MEASURE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the absmax of a part of LANES lanes, or round it with the absmax of the whole lanes."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    first = tl.program_id(1).to(tl.int64) * part
    end = tl.minimum(first + part, length)
    bits = tl.zeros((LANES, TILE), tl.int32)
    if not MEASURE:
        absmax = magnitude_bits(tl.load(absmax_ptr + lane, mask=lane < lanes, other=0.0), lane < lanes)
    for start in range(first, end, TILE):
        columns = start + tl.arange(0, TILE).to(tl.int64)
        mask = (lane < lanes)[:, None] & (columns < end)[None, :]
        offsets = lane[:, None] * lane_stride + columns[None, :] * stride
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if MEASURE:
            bits = tl.maximum(bits, magnitude_bits(x, mask))
        else:
            tl.store(codes_ptr + offsets, _round(to_unit(x, absmax[:, None])), mask=mask)
    if MEASURE:
        out_ptr = absmax_ptr + tl.program_id(1).to(tl.int64) * lanes + lane
        tl.store(out_ptr, stored_absmax(tl.max(bits, axis=1)), mask=lane < lanes)


@triton.jit
def _survey_kernel(x_ptr, found_ptr, length, part, TILE: tl.constexpr, PARTS: tl.constexpr):
    """The marks of a part: the bits of its absmax, and two sums of hashes."""
    first = tl.program_id(0).to(tl.int64) * part
    end = tl.minimum(first + part, length)
    inside = tl.arange(0, TILE)
    bits, sum1, sum2 = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.uint32), tl.zeros((TILE,), tl.uint32)
    for start in range(first, end, TILE):
        mask = inside < tl.minimum(end - start, TILE).to(tl.int32)
        x = tl.load(x_ptr + start + inside, mask=mask, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, magnitude_bits(x, True))
        place = ((start - first).to(tl.uint32) + inside.to(tl.uint32)) * 0x9E3779B1
        # Each line is one-to-one in x: a change of one value always changes both sums.
        h = x.to(tl.uint32, bitcast=True) ^ place
        h = (h ^ (h >> 15)) * 0x2C1B3C6D
        h = h ^ (h >> 13)
        sum1 += h
        sum2 += h * (place | 1)
    out_ptr = found_ptr + tl.program_id(0)
    tl.store(out_ptr, tl.max(bits, axis=0))
    tl.store(out_ptr + PARTS, tl.sum(sum1, axis=0).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * PARTS, tl.sum(sum2, axis=0).to(tl.int32, bitcast=True))


@triton.jit
def _settle_kernel(found_ptr, marks_ptr, absmax_ptr, changed_ptr, parts, COMPARE: tl.constexpr, PARTS: tl.constexpr):
    """The absmax of all parts, and whether a mark differs from the stored ones, which are replaced."""
    part = tl.arange(0, PARTS)
    bits = tl.load(found_ptr + part, mask=part < parts, other=0)
    tl.store(absmax_ptr, stored_absmax(tl.max(bits, axis=0)))
    differ = tl.full((PARTS,), 0 if COMPARE else 1, tl.int32)
    if COMPARE:
        for k in tl.static_range(3):
            found = tl.load(found_ptr + k * PARTS + part, mask=part < parts, other=0)
            differ |= found ^ tl.load(marks_ptr + k * PARTS + part, mask=part < parts, other=0)
            tl.store(marks_ptr + k * PARTS + part, found, mask=part < parts)
    tl.store(changed_ptr, tl.max((differ != 0).to(tl.int32), axis=0))


@triton.jit
def _both_layouts_kernel(w_ptr, codes_ptr, codes_t_ptr, absmax_ptr, changed_ptr, rows, columns, TILE: tl.constexpr):
    if tl.load(changed_ptr) == 0:
        return
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    j = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    offsets = i.to(tl.int64)[:, None] * columns + j[None, :]
    w = tl.load(w_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    absmax = tl.load(absmax_ptr + tl.zeros((1, 1), tl.int32))
    codes = _round(to_unit(w, magnitude_bits(absmax, True)))
    tl.store(codes_ptr + offsets, codes, mask=mask)
    mask = (j < columns)[:, None] & (i < rows)[None, :]
    tl.store(codes_t_ptr + j.to(tl.int64)[:, None] * rows + i[None, :], tl.trans(codes), mask=mask)


@triton.jit
def _rescaled(
    total, i, j, a_absmax_ptr, b_absmax_ptr, bias_ptr, rows, columns, a_scale, b_scale, HAS_BIAS: tl.constexpr
):
    row = tl.div_rn(tl.load(a_absmax_ptr + i * a_scale, mask=i < rows, other=0.0), 127.0)
    column = tl.div_rn(tl.load(b_absmax_ptr + j * b_scale, mask=j < columns, other=0.0), 127.0)
    y = total.to(tl.float32) * row[:, None] * column[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + j, mask=j < columns, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _rescale_kernel(
    total_ptr,
    a_absmax_ptr,
    b_absmax_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    a_scale,
    b_scale,
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.program_id(0) * M + tl.arange(0, M)
    j = tl.program_id(1) * N + tl.arange(0, N)
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    offsets = i.to(tl.int64)[:, None] * columns + j[None, :]
    total = tl.load(total_ptr + offsets, mask=mask, other=0)
    y = _rescaled(total, i, j, a_absmax_ptr, b_absmax_ptr, bias_ptr, rows, columns, a_scale, b_scale, HAS_BIAS)
    tl.store(out_ptr + offsets, narrow(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["bucket"])
def _matmul_kernel(
    a_ptr,
    b_ptr,
    a_absmax_ptr,
    b_absmax_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    a_row,
    a_inner,
    b_inner,
    b_column,
    a_scale,
    b_scale,
    bucket,  # `rows` rounded up, for which the tile is chosen
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    # Programs that run at the same time work on GROUP rows of tiles, so that they read the same columns of b.
    program, across = tl.program_id(0), tl.cdiv(columns, N)
    top = program // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(rows, M) - top, GROUP)
    program = program % (GROUP * across)
    i = (top + program % height) * M + tl.arange(0, M)
    j = (program // height) * N + tl.arange(0, N)
    part = tl.cdiv(tl.cdiv(inner, K), SPLIT) * K
    first = tl.program_id(1) * part
    k = tl.arange(0, K)
    # Rows and columns beyond the end are others' that are not stored: no masks in the loop.
    a_ptrs = a_ptr + (i % rows).to(tl.int64)[:, None] * a_row + (first + k).to(tl.int64)[None, :] * a_inner
    b_ptrs = b_ptr + (first + k).to(tl.int64)[:, None] * b_inner + (j % columns).to(tl.int64)[None, :] * b_column
    a_step, b_step = tl.cast(a_inner, tl.int64) * K, tl.cast(b_inner, tl.int64) * K

    total = tl.zeros((M, N), tl.int32)
    for start in range(first, tl.minimum(first + part, inner), K):
        if EVEN:
            a, b = tl.load(a_ptrs), tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(k < inner - start)[None, :], other=0)
            b = tl.load(b_ptrs, mask=(k < inner - start)[:, None], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
        a_ptrs += a_step
        b_ptrs += b_step

    mask = (i < rows)[:, None] & (j < columns)[None, :]
    out_ptrs = out_ptr + i.to(tl.int64)[:, None] * columns + j[None, :]
    if SPLIT == 1:
        y = _rescaled(total, i, j, a_absmax_ptr, b_absmax_ptr, bias_ptr, rows, columns, a_scale, b_scale, HAS_BIAS)
        tl.store(out_ptrs, narrow(y, out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.atomic_add(out_ptrs, total, mask=mask, sem="relaxed")


# While it measures, the programs of each trial add to the same sums: they start from zero.
_tuned_kernel = triton.autotune(
    CONFIGS,
    key=["bucket", "columns", "inner", "a_inner", "b_inner", "SPLIT"],
    prune_configs_by={"early_config_prune": fits},
    reset_to_zero=["out_ptr"],
    cache_results=True,
)(_matmul_kernel)
