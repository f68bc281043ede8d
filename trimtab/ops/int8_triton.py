"""int8 quantization and the int8 matrix product on the GPU: the Triton kernels of int8.py.

Quantizing: a program reads LANES rows (or columns), TILE values at a time, once for the absmax and once to round. With
a few long lanes, such as a whole tensor, most of the GPU would be idle: they are split into parts, and the two passes
become two launches.

    lane 0   [ part 0: TILE, TILE, ... | part 1 ... ]        absmax of a lane = largest absmax of its parts

The product: int8 tiles multiplied and added up in int32, which is exact; scales and bias are applied before the result
is written. Codes, scales and products equal the reference to the last bit.

Wortsman et al. 2023, section 2.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (the parameters of a kernel are Triton's values; the functions that Python calls are typed)

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.ops.blockwise_triton import launch, magnitude_bits, narrow, stored_absmax, to_unit

TILES = {0: (64, 64), 1: (16, 256)}  # columns (rows) per quantizing program, and values of each at a time
PART = 4096  # the shortest part of a lane
PROGRAMS = 512  # enough programs to fill a large GPU; with fewer lanes than that, lanes are split
M, N, K, GROUP = 128, 128, 64, 8  # the tile of the product, and the rows of tiles that share columns in the cache


def quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=torch.int8)
    lanes, length = x.shape[1 - dim], x.shape[dim]
    if x.numel() == 0:
        return codes, x.new_zeros(lanes, dtype=torch.float32)
    side, tile = TILES[dim]
    groups = triton.cdiv(lanes, side)
    parts = min(triton.cdiv(PROGRAMS, groups), triton.cdiv(length, PART))
    part = triton.cdiv(length, parts * tile) * tile
    absmax = x.new_empty(parts, lanes, dtype=torch.float32)
    sizes = (lanes, length, x.stride(1 - dim), x.stride(dim), part)
    shape = {"LANES": side, "TILE": tile}
    launch(_quantize_kernel, (groups, parts), x, codes, absmax, *sizes, MEASURE=True, ROUND=parts == 1, **shape)
    absmax = absmax.amax(dim=0)
    if parts > 1:
        launch(_quantize_kernel, (groups, parts), x, codes, absmax, *sizes, MEASURE=False, ROUND=True, **shape)
    return codes, absmax


def matmul(a: Tensor, b: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    (rows, inner), columns = a.shape, b.shape[1]
    out = a.new_empty(rows, columns, dtype=dtype)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(rows, M) * triton.cdiv(columns, N),)
    strides = (*a.stride(), *b.stride(), a_absmax.dim(), b_absmax.dim())  # a scalar scale has stride 0, a vector 1
    operands = (a, b, a_absmax, b_absmax, out if bias is None else bias, out)
    shape = {"HAS_BIAS": bias is not None, "M": M, "N": N, "K": K, "GROUP": GROUP, "num_warps": 8}
    launch(_matmul_kernel, grid, *operands, rows, columns, inner, *strides, **shape)
    return out


@triton.jit
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    absmax_ptr,
    lanes,
    length,
    lane_stride,
    stride,
    part,
    MEASURE: tl.constexpr,
    ROUND: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    first = tl.program_id(1).to(tl.int64) * part
    end = tl.minimum(first + part, length)
    bits = tl.zeros((LANES, TILE), tl.int32)
    if MEASURE:
        for start in range(first, end, TILE):
            columns = start + tl.arange(0, TILE)
            mask = (lane < lanes)[:, None] & (columns < end)[None, :]
            offsets = lane[:, None] * lane_stride + columns[None, :] * stride
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, magnitude_bits(x, mask))
        bits = tl.max(bits, axis=1)
        tl.store(absmax_ptr + tl.program_id(1) * lanes + lane, stored_absmax(bits), mask=lane < lanes)
    else:
        bits = magnitude_bits(tl.load(absmax_ptr + lane, mask=lane < lanes, other=0.0), lane < lanes)
    if ROUND:
        for start in range(first, end, TILE):
            columns = start + tl.arange(0, TILE)
            mask = (lane < lanes)[:, None] & (columns < end)[None, :]
            offsets = lane[:, None] * lane_stride + columns[None, :] * stride
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            # Near 1.5 * 2^23 neighbouring floats are 1 apart: adding it rounds half to even.
            codes = (to_unit(x, bits[:, None]) * 127.0 + 12582912.0) - 12582912.0
            tl.store(codes_ptr + offsets, codes.to(tl.int8), mask=mask)


@triton.jit
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
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run at the same time work on GROUP rows of tiles, so that they read the same columns of b.
    program, across = tl.program_id(0), tl.cdiv(columns, N)
    top = program // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(rows, M) - top, GROUP)
    program = program % (GROUP * across)
    i = (top + program % height).to(tl.int64) * M + tl.arange(0, M)
    j = (program // height).to(tl.int64) * N + tl.arange(0, N)

    total = tl.zeros((M, N), tl.int32)
    for start in range(0, inner, K):
        k = start + tl.arange(0, K).to(tl.int64)
        a_mask = (i < rows)[:, None] & (k < inner)[None, :]
        b_mask = (k < inner)[:, None] & (j < columns)[None, :]
        a = tl.load(a_ptr + i[:, None] * a_row + k[None, :] * a_inner, mask=a_mask, other=0)
        b = tl.load(b_ptr + k[:, None] * b_inner + j[None, :] * b_column, mask=b_mask, other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)

    row = tl.div_rn(tl.load(a_absmax_ptr + i * a_scale, mask=i < rows, other=0.0), 127.0)
    column = tl.div_rn(tl.load(b_absmax_ptr + j * b_scale, mask=j < columns, other=0.0), 127.0)
    y = total.to(tl.float32) * row[:, None] * column[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + j, mask=j < columns, other=0.0).to(tl.float32)[None, :]
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(out_ptr + i[:, None] * columns + j[None, :], narrow(y, out_ptr.dtype.element_ty), mask=mask)
