"""Block-wise 8-bit quantization on the GPU: the Triton kernels of blockwise.py, equal to its reference to the last bit.

A program processes a tile of ROWS blocks by TILE values. A block longer than TILE is read twice, tile by tile: once for
its absmax, once to encode.

                  columns: TILE values of a block
    program 0   [ block 0 ............................. | next tile -> ]
                [ block 1 ............................. | next tile -> ]
    program 1   [ block 2 ...

Encoding is a branch-free binary search: a code is the number of decision boundaries strictly below the value.
Divisions are correctly rounded and products are not fused into sums, so the codes are the reference's.

Dettmers et al. 2022, section 2.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (the parameters of a kernel are Triton's values; the functions that Python calls are typed)

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from trimtab.ops.codebook import midpoints

TILE = 2048  # values per program, where blocks are not longer than that
BOOK = tl.constexpr(256)  # a codebook, or its boundaries, is padded to this length
INFINITY_BITS = tl.constexpr(0x7F800000)


def quantize(x: Tensor, codebook: Tensor, block: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=torch.uint8)
    absmax = x.new_empty(triton.cdiv(x.numel(), block), dtype=torch.float32)
    quantize_out(x, codebook, block, codes, absmax)
    return codes, absmax


def quantize_out(x: Tensor, codebook: Tensor, block: int, codes: Tensor, absmax: Tensor) -> None:
    if x.numel() == 0:
        return
    rows, tile = tile_shape(block)
    grid = (triton.cdiv(absmax.numel(), rows),)
    operands = (x, boundaries(codebook), codes, absmax, x.numel(), block)
    launch(_quantize_kernel, grid, *operands, MANY=block > tile, ROWS=rows, TILE=tile)


def dequantize(codes: Tensor, absmax: Tensor, codebook: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(codes, dtype=dtype)
    dequantize_out(codes, absmax, codebook, block, out)
    return out


def dequantize_out(codes: Tensor, absmax: Tensor, codebook: Tensor, block: int, out: Tensor) -> None:
    if codes.numel() == 0:
        return
    rows, tile = tile_shape(block)
    tiles = triton.cdiv(block, tile)  # decoding reads a block once, so each tile is a program
    grid = (triton.cdiv(absmax.numel(), rows) * tiles,)
    sizes = (codes.numel(), codebook.numel(), block, tiles)
    launch(_dequantize_kernel, grid, codes, absmax, codebook, out, *sizes, ROWS=rows, TILE=tile)


# --- Shared with step/fused_triton.py, int8_triton.py and gelu_triton.py


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first tensor, without fusing a * b + c: that would round once less."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants, enable_fp_fusion=False)


def tile_shape(block: int) -> tuple[int, int]:
    """How many blocks a program processes together, and how many values of each at a time. Powers of two."""
    tile = min(TILE, triton.next_power_of_2(block))
    return TILE // tile, tile


def boundaries(codebook: Tensor) -> Tensor:
    """The decision boundaries, padded with infinities that no value exceeds: the search needs no length."""
    return pad(midpoints(codebook), (0, BOOK.value - codebook.numel() + 1), value=math.inf)


@triton.jit
def magnitude_bits(x, mask):
    """|x| as an integer: ordered like |x|, with NaN above Inf, so an integer maximum never drops a NaN."""
    return tl.where(mask, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def stored_absmax(bits):
    return tl.where(bits < INFINITY_BITS, bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def to_unit(x, bits):
    """x / absmax. A block of zeros is divided by one; a block that is not finite becomes zeros."""
    scale = tl.where((bits > 0) & (bits < INFINITY_BITS), bits, 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(bits < INFINITY_BITS, tl.div_rn(x, scale), 0.0)


@triton.jit
def nearest(unit, boundaries_ptr):
    """The number of boundaries strictly below each value, one bit of it per step. Indices stay in the padded table."""
    code = tl.zeros(unit.shape, tl.int32)
    for i in tl.static_range(8):
        step = 128 >> i
        code += tl.where(tl.load(boundaries_ptr + (code + step - 1)) < unit, step, 0)
    return code


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round float32 to `dtype`, half to even."""
    if dtype == tl.bfloat16:
        # In integers, because Triton's interpreter truncates: the tested code is the one that runs on the GPU.
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


# --- Kernels


@triton.jit
def _quantize_kernel(
    x_ptr,
    boundaries_ptr,
    codes_ptr,
    absmax_ptr,
    count,
    block,
    MANY: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (blocks * block)[:, None]
    columns = tl.arange(0, TILE)[None, :]
    mask = (columns < block) & (first + columns < count)
    x = tl.load(x_ptr + first + columns, mask=mask, other=0.0).to(tl.float32)
    bits = magnitude_bits(x, mask)
    end = tl.minimum(tl.cast(block, tl.int64), count)
    if MANY:
        for start in range(TILE, end, TILE):
            inside = (start + columns < block) & (first + start + columns < count)
            later = tl.load(x_ptr + first + start + columns, mask=inside, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, magnitude_bits(later, inside))
    bits = tl.max(bits, axis=1)
    tl.store(absmax_ptr + blocks, stored_absmax(bits), mask=blocks * block < count)
    codes = nearest(to_unit(x, bits[:, None]), boundaries_ptr)
    tl.store(codes_ptr + first + columns, codes.to(tl.uint8), mask=mask)
    if MANY:
        for start in range(TILE, end, TILE):
            inside = (start + columns < block) & (first + start + columns < count)
            later = tl.load(x_ptr + first + start + columns, mask=inside, other=0.0).to(tl.float32)
            codes = nearest(to_unit(later, bits[:, None]), boundaries_ptr)
            tl.store(codes_ptr + first + start + columns, codes.to(tl.uint8), mask=inside)


@triton.jit
def _dequantize_kernel(
    codes_ptr, absmax_ptr, codebook_ptr, out_ptr, count, entries, block, tiles, ROWS: tl.constexpr, TILE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    blocks = program // tiles * ROWS + tl.arange(0, ROWS)
    columns = program % tiles * TILE + tl.arange(0, TILE)
    offsets = (blocks * block)[:, None] + columns[None, :]
    mask = (columns < block)[None, :] & (offsets < count)
    codes = tl.load(codes_ptr + offsets, mask=mask, other=0).to(tl.int32)
    values = tl.load(codebook_ptr + codes, mask=mask & (codes < entries), other=0.0)
    absmax = tl.load(absmax_ptr + blocks, mask=blocks * block < count, other=0.0)
    tl.store(out_ptr + offsets, narrow(values * absmax[:, None], out_ptr.dtype.element_ty), mask=mask)
