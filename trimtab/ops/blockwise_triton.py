"""Block-wise 8-bit quantization on the GPU: the Triton kernels of blockwise.py, equal to its reference to the last bit.

A program processes a tile of ROWS blocks by TILE values. A block longer than TILE is read twice, tile by tile: once for
its absmax, once to encode.

                  columns: TILE values of a block
    program 0   [ block 0 ............................. | next tile -> ]
                [ block 1 ............................. | next tile -> ]
    program 1   [ block 2 ...

Encoding is a branch-free binary search: a code is the number of decision boundaries strictly below the value. The first
steps choose between numbers in registers, the others read a table in shared memory. Divisions are correctly rounded and
products are not fused into sums, so the codes are the reference's.

Where a block begins is a 64-bit number; within a tile offsets have 32 bits. A thread takes 16 values, so that it reads
and writes 128 bits at a time, also of codes.

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

# Values per program, where blocks are not longer than that: 16 per thread of 4 warps. With at most 64 registers a
# multiprocessor holds 8 programs, which is 32 warps; 12 would be enough to keep its share of the memory busy.
TILE = 2048
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
    shape = {"ROWS": rows, "TILE": tile, "ALIGN": alignment(x.numel(), block)}
    launch(_quantize_kernel, grid, *operands, MANY=block > tile, **shape)


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
    operands = (codes, absmax, padded(codebook), out, codes.numel(), block, tiles)
    launch(_dequantize_kernel, grid, *operands, ROWS=rows, TILE=tile, ALIGN=alignment(codes.numel(), block))


# --- Shared with step/fused_triton.py, int8_triton.py and gelu_triton.py


def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first tensor, without fusing a * b + c: that would round once less."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants, enable_fp_fusion=False)


def tile_shape(block: int) -> tuple[int, int]:
    """How many blocks a program processes together, and how many values of each at a time. Powers of two."""
    tile = min(TILE, triton.next_power_of_2(block))
    return TILE // tile, tile


def alignment(count: int, block: int) -> int:
    """What divides the first and the last place of every block: 16 lets the compiler use 128-bit accesses."""
    return 16 if count % 16 == 0 and block % 16 == 0 else 1


def padded(codebook: Tensor) -> Tensor:
    return codebook if codebook.numel() == BOOK.value else pad(codebook, (0, BOOK.value - codebook.numel()))


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
def look_up(book_ptr, codes):
    """The entries of a padded table, which is read from memory once and then held in shared memory."""
    book = tl.load(book_ptr + tl.arange(0, BOOK))
    return tl.reshape(tl.gather(book, tl.reshape(codes, (codes.numel,)), 0), codes.shape)


@triton.jit
def nearest(unit, boundaries_ptr):
    """The number of boundaries strictly below each value, one bit of it per step. Indices stay in the padded table."""
    upper = tl.load(boundaries_ptr + 127) < unit
    second = tl.where(upper, tl.load(boundaries_ptr + 191), tl.load(boundaries_ptr + 63)) < unit
    high = tl.where(second, tl.load(boundaries_ptr + 223), tl.load(boundaries_ptr + 159))
    low = tl.where(second, tl.load(boundaries_ptr + 95), tl.load(boundaries_ptr + 31))
    code = tl.where(upper, 128, 0) + tl.where(second, 64, 0) + tl.where(tl.where(upper, high, low) < unit, 32, 0)
    for i in tl.static_range(5):
        step = 16 >> i
        code += tl.where(look_up(boundaries_ptr, code + step - 1) < unit, step, 0)
    return code


@triton.jit
def columns_inside(left, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """[ROWS, TILE]: which columns of a tile exist, if `left` values of each row do. Compared in 32 bits."""
    left = tl.minimum(tl.maximum(left, 0), TILE).to(tl.int32) // ALIGN * ALIGN  # tells the compiler what divides it
    return tl.arange(0, TILE)[None, :] < left


INTERPRETED = tl.constexpr(not isinstance(nearest, triton.JITFunction))


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round float32 to `dtype`, half to even, as the GPU's conversion does; Triton's interpreter would truncate."""
    if INTERPRETED and dtype == tl.bfloat16:
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
    ALIGN: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (blocks * block)[:, None]
    left = tl.minimum(count - first, block)
    columns = tl.arange(0, TILE)[None, :]
    mask = columns_inside(left, TILE, ALIGN)
    x = tl.load(x_ptr + first + columns, mask=mask, other=0.0).to(tl.float32)
    bits = magnitude_bits(x, mask)
    end = tl.minimum(tl.cast(block, tl.int64), count)
    if MANY:
        for start in range(TILE, end, TILE):
            inside = columns_inside(left - start, TILE, ALIGN)
            later = tl.load(x_ptr + (first + start) + columns, mask=inside, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, magnitude_bits(later, inside))
    bits = tl.max(bits, axis=1)
    tl.store(absmax_ptr + blocks, stored_absmax(bits), mask=blocks * block < count)
    codes = nearest(to_unit(x, bits[:, None]), boundaries_ptr)
    tl.store(codes_ptr + first + columns, codes.to(tl.uint8), mask=mask)
    if MANY:
        for start in range(TILE, end, TILE):
            inside = columns_inside(left - start, TILE, ALIGN)
            later = tl.load(x_ptr + (first + start) + columns, mask=inside, other=0.0).to(tl.float32)
            codes = nearest(to_unit(later, bits[:, None]), boundaries_ptr)
            tl.store(codes_ptr + (first + start) + columns, codes.to(tl.uint8), mask=inside)


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    absmax_ptr,
    codebook_ptr,
    out_ptr,
    count,
    block,
    tiles,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    blocks = program // tiles * ROWS + tl.arange(0, ROWS)
    start = program % tiles * TILE
    first = (blocks * block)[:, None]
    mask = columns_inside(tl.minimum(count - first, block) - start, TILE, ALIGN)
    offsets = (first + start) + tl.arange(0, TILE)[None, :]
    codes = tl.load(codes_ptr + offsets, mask=mask, other=0)
    absmax = tl.load(absmax_ptr + blocks, mask=blocks * block < count, other=0.0)
    values = look_up(codebook_ptr, codes.to(tl.int32)) * absmax[:, None]
    tl.store(out_ptr + offsets, narrow(values, out_ptr.dtype.element_ty), mask=mask)
