"""The fused optimizer step on the GPU: the Triton twin of fused.py, many tensors in one launch.

A table on the device has one line per tensor (the addresses of its parameter, gradient, states and scales, its size,
its first program), and `owner` holds the line of each program.

    program --owner--> line of the table --addresses--> p, g, codes, absmax --rule--> p, codes, absmax

A program processes ROWS blocks of one tensor, as in blockwise_triton.py. A block longer than TILE is computed two or
three times: to find its new scales (the quadratic code finds that of √v first), and to write. Tensors with the same
dtypes and alignment share a launch.

Parameters, moments, codes and scales equal the reference to the last bit. The sums of the norms do not: a program adds
in float32, and the programs' results are added in float64, always in the same order.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (the parameters of a kernel are Triton's values; the functions that Python calls are typed)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from trimtab.ops.blockwise_triton import (
    BOOK,
    INFINITY_BITS,
    boundaries,
    launch,
    magnitude_bits,
    narrow,
    nearest,
    stored_absmax,
    tile_shape,
    to_unit,
)
from trimtab.ops.step.fused import Arguments
from trimtab.ops.step.rules import RULES, SCALARS

UNIT = 1024  # float32 state has no blocks; this many values count as one
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# The columns of the table. Up to three states: m, the slow m, v.
PARAM, GRAD, STATE, SCALE, COUNT, FIRST, PROGRAMS, ROW, COLUMNS = map(tl.constexpr, (0, 1, 2, 5, 8, 9, 10, 11, 12))
# The columns of `scalars`.
GRAD_SCALE, COUPLED, DECAY, LR, BETA1, GAIN1, BETA2, GAIN2, BETA3, GAIN3, DEBIAS, EPS, MIX_M, MIX_G, STEP = map(
    tl.constexpr, range(len(SCALARS))
)
WIDTH = tl.constexpr(len(SCALARS))
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def step(*arguments: Any) -> None:
    a = Arguments(*arguments)
    books = _books(a)
    for group in _groups(a):
        group.run(_step_kernel, a.scalars, books)


def norms(*arguments: Any) -> Tensor:
    a = Arguments(*arguments)
    books, result = _books(a), a.scalars.new_zeros(len(a.params), 2)
    for group in _groups(a):
        sums = result.new_empty(2, group.owner.numel())
        group.run(_norms_kernel, a.scalars, books, sums, RATIOS=False)
        result[group.members] = group.add_up(sums).T
    return result


def ratios(grads: Sequence[Tensor], *arguments: Any) -> Tensor:
    """The first pass of rule "rms" with the gradients as parameters; nothing depends on the parameters."""
    states, absmax, scalars, unsigned, code, block = arguments
    uncoupled, result = scalars.clone(), grads[0].new_zeros(len(grads), dtype=torch.float32)
    uncoupled[:, COUPLED.value] = 0
    a = Arguments(grads, grads, states, absmax, uncoupled, unsigned, unsigned, "rms", code, block)
    books = _books(a)
    for group in _groups(a):
        sums = result.new_empty(1, group.owner.numel())
        group.run(_norms_kernel, uncoupled, books, sums, RATIOS=True)
        result[group.members] = group.add_up(sums)[0]
    return result


def gradient_norms(grads: Sequence[Tensor]) -> Tensor:
    result = grads[0].new_zeros(len(grads), dtype=torch.float32)
    for group in _groups(Arguments(grads, grads, (), (), result, result, result, "", "", UNIT)):
        sums = result.new_empty(1, group.owner.numel())
        group.run(_gradient_norms_kernel, sums)
        result[group.members] = group.add_up(sums)[0]
    return result


@dataclass(frozen=True)
class _Group:
    """Tensors with the same dtypes and alignment: their indices, their table, and the tensor of each program."""

    members: list[int]
    table: Tensor
    owner: Tensor
    block: int
    constants: dict[str, Any]

    def run(self, kernel: Any, *arguments: Tensor, **constants: Any) -> None:
        constants |= self.constants
        launch(kernel, (self.owner.numel(),), self.table, self.owner, *arguments, self.block, **constants)

    def add_up(self, sums: Tensor) -> Tensor:
        """From one column per program to one per tensor: in float64, without atomics."""
        lengths = self.table[:, PROGRAMS.value].repeat(len(sums))
        totals = torch.segment_reduce(sums.double().flatten(), "sum", lengths=lengths, unsafe=True, initial=0)
        return totals.view(len(sums), -1).float()


def _groups(a: Arguments) -> Iterator[_Group]:
    count, block = len(a.params), a.block if a.absmax else UNIT
    rows, tile = tile_shape(block)
    alike: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, (p, g) in enumerate(zip(a.params, a.grads, strict=True)):
        aligned = all(x.data_ptr() % 16 == 0 for x in (p, g, *a.states[i::count])) and p.numel() % 16 == 0
        alike.setdefault((p.dtype, g.dtype, aligned), []).append(i)
    for (p_dtype, g_dtype, aligned), members in alike.items():
        programs = [triton.cdiv(a.params[i].numel(), rows * block) for i in members]
        if sum(programs) == 0:
            continue
        lines = []
        for i, length, first in zip(members, programs, accumulate(programs, initial=0), strict=False):
            line = [a.params[i].data_ptr(), a.grads[i].data_ptr(), *6 * [0], a.params[i].numel(), first, length, i]
            for column, stored in ((STATE, a.states), (SCALE, a.absmax)):
                for k, x in enumerate(stored[i::count]):
                    line[column.value + _place(k, a.rule)] = x.data_ptr()
            lines.append(line)
        table = torch.tensor(lines, dtype=torch.int64).to(a.params[0].device, non_blocking=True)
        # Expanded on the device: a large model has a million programs, so this map is not copied from the host.
        owner = torch.arange(len(members), device=table.device).repeat_interleave(
            table[:, PROGRAMS.value], output_size=sum(programs)
        )
        constants = {"G_TYPE": TYPES[g_dtype], "ALIGNED": aligned, "MANY": block > tile, "ROWS": rows, "TILE": tile}
        if a.rule:
            quantized = 0 if not a.absmax else 2 if a.code == "quadratic" else 1
            keeps = sum(1 << _place(k, a.rule) for k in range(len(RULES[a.rule].signed)))
            constants |= {"P_TYPE": TYPES[p_dtype], "RULE": a.rule, "KEEPS": keeps, "QUANTIZED": quantized}
        yield _Group(members, table, owner, block, constants)


def _place(k: int, rule: str) -> int:
    """The column of the rule's state k: m comes first, then the slow m, then v."""
    return k if RULES[rule].signed[k] else 2


def _books(a: Arguments) -> Tensor:
    """[4, BOOK]: the signed values and their boundaries, then the unsigned ones."""
    books = ((pad(book, (0, BOOK.value - book.numel())), boundaries(book)) for book in (a.signed, a.unsigned))
    return torch.stack([row for pair in books for row in pair])


# --- The rules: the equations of rules.py, operation by operation. `row_ptr` is the tensor's row of scalars.


@triton.jit
def _mix(row_ptr, A: tl.constexpr, a, B: tl.constexpr, b):
    return tl.load(row_ptr + A) * a + tl.load(row_ptr + B) * b


@triton.jit
def _denominator(row_ptr, v):
    return tl.sqrt_rn(v) * tl.load(row_ptr + DEBIAS) + tl.load(row_ptr + EPS)


@triton.jit
def _adamw(row_ptr, g, m, slow, v):
    m = _mix(row_ptr, BETA1, m, GAIN1, g)
    v = _mix(row_ptr, BETA2, v, GAIN2, g * g)
    return tl.div_rn(m, _denominator(row_ptr, v)), (m, slow, v)


@triton.jit
def _momentum(row_ptr, g, m, slow, v):
    m = _mix(row_ptr, BETA1, m, GAIN1, g)
    return _mix(row_ptr, MIX_M, m, MIX_G, g), (m, slow, v)


@triton.jit
def _lion(row_ptr, g, m, slow, v):
    c = _mix(row_ptr, MIX_M, m, MIX_G, g)
    update = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))  # the sign of NaN is NaN
    return update, (_mix(row_ptr, BETA1, m, GAIN1, g), slow, v)


@triton.jit
def _rms(row_ptr, g, m, slow, v):
    v = _mix(row_ptr, BETA2, v, GAIN2, g * g)
    return tl.div_rn(g, _denominator(row_ptr, v)), (m, slow, v)


@triton.jit
def _ademamix(row_ptr, g, m, slow, v):
    m = _mix(row_ptr, BETA1, m, GAIN1, g)
    slow = _mix(row_ptr, BETA3, slow, GAIN3, g)
    v = _mix(row_ptr, BETA2, v, GAIN2, g * g)
    return tl.div_rn(_mix(row_ptr, MIX_M, m, MIX_G, slow), _denominator(row_ptr, v)), (m, slow, v)


@triton.jit
def _rms_momentum(row_ptr, g, m, slow, v):
    v = _mix(row_ptr, BETA2, v, GAIN2, g * g)
    m = _mix(row_ptr, BETA1, m, GAIN1, tl.div_rn(g, _denominator(row_ptr, v)))
    return m, (m, slow, v)


@triton.jit
def _rms_centered(row_ptr, g, mean, v):
    mean = _mix(row_ptr, BETA3, mean, GAIN3, g)
    v = _mix(row_ptr, BETA2, v, GAIN2, g * g)
    variance = v - mean * mean
    return tl.div_rn(g, _denominator(row_ptr, tl.where(variance < 0, 0.0, variance))), mean, v


# --- The skeleton. Bit K of KEEPS: the rule has state K (0 m, 1 the slow m, 2 v). QUANTIZED: 0 float32, 1 by codebook,
# 2 quadratic. `at` is a program's position: its line, row, codebooks, blocks, block size and the tensor's size.


@triton.jit
def _locate(table_ptr, owner_ptr, ALIGNED: tl.constexpr, ROWS: tl.constexpr):
    """This program's line of the table, the size of that tensor, and which of its blocks to work on."""
    program = tl.program_id(0)
    line_ptr = table_ptr + tl.load(owner_ptr + program) * COLUMNS
    blocks = (program - tl.load(line_ptr + FIRST)) * ROWS + tl.arange(0, ROWS)
    count = tl.load(line_ptr + COUNT)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    return line_ptr, count, blocks[:, None]


@triton.jit
def _pointer(line_ptr, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(line_ptr + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:  # lets the compiler read and write 16 bytes at a time
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _cells(at, start, TILE: tl.constexpr):
    """The values [start, start + TILE) of each block: their offsets in the tensor, and which of them exist."""
    _, _, _, blocks, block, count = at
    columns = start + tl.arange(0, TILE)[None, :]
    offsets = blocks * block + columns
    return offsets, (columns < block) & (offsets < count)


@triton.jit
def _codes(at, K: tl.constexpr, offsets, mask, ALIGNED: tl.constexpr):
    line_ptr, _, _, _, _, _ = at
    return tl.load(_pointer(line_ptr, STATE + K, tl.uint8, ALIGNED) + offsets, mask=mask, other=0)


@triton.jit
def _read(at, K: tl.constexpr, offsets, mask, KEEPS: tl.constexpr, QUANTIZED: tl.constexpr, ALIGNED: tl.constexpr):
    line_ptr, _, books_ptr, blocks, block, count = at
    if (KEEPS >> K) & 1 == 0:
        return tl.zeros(offsets.shape, tl.float32)
    elif QUANTIZED > 0:
        codes = _codes(at, K, offsets, mask, ALIGNED)
        scale_ptr = _pointer(line_ptr, SCALE + K, tl.float32, False) + blocks
        scale = tl.load(scale_ptr, mask=blocks * block < count, other=0.0)
        if QUANTIZED == 2:
            return _decode_quadratic(codes, scale, K, KEEPS)
        return tl.load(books_ptr + K // 2 * 2 * BOOK + codes.to(tl.int32), mask=mask, other=0.0) * scale
    else:
        return tl.load(_pointer(line_ptr, STATE + K, tl.float32, ALIGNED) + offsets, mask=mask, other=0.0)


@triton.jit
def _twice(x):
    return tl.maximum((x.to(tl.int32, bitcast=True) << 1) - 0x3F800000, 0).to(tl.float32, bitcast=True)


@triton.jit
def _halve(x):
    return ((x.to(tl.int32, bitcast=True) >> 1) + 0x1FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _top(K: tl.constexpr, KEEPS: tl.constexpr):
    """The value of the largest code, in units of code 1."""
    return 65024.0 if K == 2 else (16128.0 if KEEPS >> 2 else 260046848.0)


@triton.jit
def _decode_quadratic(codes, scale, K: tl.constexpr, KEEPS: tl.constexpr):
    """√v, or a first moment, as in quadratic.py."""
    unit = tl.div_rn(scale, _top(K, KEEPS))
    if K == 2:
        return _twice(codes.to(tl.float32)) * unit
    else:
        c = codes.to(tl.int8, bitcast=True).to(tl.float32)
        value = _twice(tl.abs(c)) if KEEPS >> 2 else _twice(_twice(tl.abs(c)))
        return tl.where(c < 0, -value, value) * unit


@triton.jit
def _dither(row_ptr, start, K: tl.constexpr, TILE: tl.constexpr):
    """Between 0 and 4095, for moment K: the upper bits of a phase that advances per step and per value of a block."""
    step = tl.load(row_ptr + STEP).to(tl.int64)
    per_step: tl.constexpr = 0xD1B54A33 if K == 0 else (0xABC98389 if K == 1 else 0x8CB92BA7)
    per_value: tl.constexpr = 0x9E3779B1 if K == 0 else (0xC13FA9A9 if K == 1 else 0x91E10DA5)
    places = start + tl.arange(0, TILE)[None, :].to(tl.int64)
    return ((step * per_step + places * per_value & 0xFFFFFFFF) >> 20).to(tl.int32)


@triton.jit
def _encode_quadratic(x, dither, bits, K: tl.constexpr, KEEPS: tl.constexpr):
    """Codes of what `_as_kept` returns. Adding 1.5 * 2^23 rounds half to even."""
    absmax = tl.where((bits > 0) & (bits < INFINITY_BITS), bits, 0x3F800000).to(tl.float32, bitcast=True)
    inverse = tl.minimum(tl.div_rn(tl.full(absmax.shape, _top(K, KEEPS), tl.float32), absmax), LARGEST)
    z = tl.where(bits < INFINITY_BITS, tl.abs(x) * inverse, 0.0)
    if K == 2:
        parts = _halve(z) * 4096.0
    elif KEEPS >> 2:
        parts = tl.minimum(tl.minimum(_halve(z) * 4096.0, z * 4096.0), z * (4096 / 3) + 8192 / 3)
    else:
        parts = tl.minimum(tl.minimum(_halve(_halve(z)) * 4096.0, z * 4096.0), z * (4096 / 15) + 57344 / 15)
        parts = tl.minimum(tl.minimum(parts, z * (4096 / 48) + 20480 / 3), z * (4096 / 192) + 32768 / 3)
    codes = ((parts + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + dither) >> 12
    if K == 2:
        return tl.where((x > 0) & (bits < INFINITY_BITS), tl.maximum(codes, 4), codes)  # quadratic.SMALLEST
    else:
        return tl.where(x < 0, -codes, codes)


@triton.jit
def _keep_21_bits(bits):
    """An absmax as it is stored: float32 state dicts restore it exactly."""
    return tl.where(bits < INFINITY_BITS, tl.minimum((bits + 4) & -8, 0x7F7FFFF8), bits)


@triton.jit
def _roots(moments, KEEPS: tl.constexpr, QUANTIZED: tl.constexpr):
    """The quadratic code keeps √v instead of v."""
    m, slow, v = moments
    if (QUANTIZED == 2) and (KEEPS >> 2 == 1):
        v = tl.sqrt_rn(v)
        v = tl.where(v == float("inf"), 1.8446742e19, v)
    return m, slow, v


@triton.jit
def _unit(codes):
    """The largest power of two in the value of a root's code; for code 0 that of the smallest other code."""
    value = _twice(tl.maximum(codes.to(tl.float32), 4.0))
    return (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _as_kept(at, start, moments, root_bits, KEEPS: tl.constexpr, QUANTIZED: tl.constexpr, TILE: tl.constexpr):
    """What is stored of the moments: in the quadratic code the first ones in units of the stored root."""
    m, slow, v = moments
    if (QUANTIZED == 2) and (KEEPS >> 2 == 1):
        _, row_ptr, _, _, _, _ = at
        codes = _encode_quadratic(v, _dither(row_ptr, start, 2, TILE), root_bits, 2, KEEPS)
        # 1 / unit, exactly
        per_unit = (0x7F000000 - _unit(codes).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        per_unit = tl.where(root_bits < INFINITY_BITS, per_unit, float("nan"))  # such a block is NaN in every moment
        m, slow = m * per_unit, slow * per_unit
    return m, slow, v


@triton.jit
def _advance(
    at,
    start,
    P_TYPE: tl.constexpr,
    G_TYPE: tl.constexpr,
    RULE: tl.constexpr,
    KEEPS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Decode a tile and apply the rule: the old parameter, the gradient, the update and the new moments."""
    line_ptr, row_ptr, _, _, _, _ = at
    offsets, mask = _cells(at, start, TILE)
    p = tl.load(_pointer(line_ptr, PARAM, P_TYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(_pointer(line_ptr, GRAD, G_TYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
    g = g * tl.load(row_ptr + GRAD_SCALE)
    coupled = tl.load(row_ptr + COUPLED)
    g = tl.where(coupled != 0, g + coupled * p, g)
    m = _read(at, 0, offsets, mask, KEEPS, QUANTIZED, ALIGNED)
    slow = _read(at, 1, offsets, mask, KEEPS, QUANTIZED, ALIGNED)
    v = _read(at, 2, offsets, mask, KEEPS, QUANTIZED, ALIGNED)
    if (QUANTIZED == 2) and (KEEPS >> 2 == 1):
        unit = _unit(_codes(at, 2, offsets, mask, ALIGNED))
        m, slow, v = m * unit, slow * unit, v * v
    if RULE == "adamw":
        update, moments = _adamw(row_ptr, g, m, slow, v)
    elif RULE == "momentum":
        update, moments = _momentum(row_ptr, g, m, slow, v)
    elif RULE == "lion":
        update, moments = _lion(row_ptr, g, m, slow, v)
    elif RULE == "rms":
        update, moments = _rms(row_ptr, g, m, slow, v)
    elif RULE == "rms_momentum":
        update, moments = _rms_momentum(row_ptr, g, m, slow, v)
    elif RULE == "rms_centered":  # the mean is where m is
        update, m, v = _rms_centered(row_ptr, g, m, v)
        moments = (m, slow, v)
    elif RULE == "rms_centered_momentum":
        update, slow, v = _rms_centered(row_ptr, g, slow, v)
        update = _mix(row_ptr, BETA1, m, GAIN1, update)
        moments = (update, slow, v)
    else:
        update, moments = _ademamix(row_ptr, g, m, slow, v)
    return p, g, update, moments


@triton.jit
def _write(
    at,
    start,
    p,
    update,
    moments,
    bits,
    P_TYPE: tl.constexpr,
    KEEPS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Move the parameter and store the moments of a tile; `bits` is each block's new absmax."""
    line_ptr, row_ptr, books_ptr, _, _, _ = at
    offsets, mask = _cells(at, start, TILE)
    p = tl.load(row_ptr + DECAY) * p - tl.load(row_ptr + LR) * update
    tl.store(_pointer(line_ptr, PARAM, P_TYPE, ALIGNED) + offsets, narrow(p, P_TYPE), mask=mask)
    for K in tl.static_range(3):
        if (KEEPS >> K) & 1:
            if QUANTIZED == 2:
                codes = _encode_quadratic(moments[K], _dither(row_ptr, start, K, TILE), bits[K], K, KEEPS)
                tl.store(_pointer(line_ptr, STATE + K, tl.uint8, ALIGNED) + offsets, codes.to(tl.uint8), mask=mask)
            elif QUANTIZED == 1:
                codes = nearest(to_unit(moments[K], bits[K]), books_ptr + (K // 2 * 2 + 1) * BOOK)
                if K == 2:  # a positive second moment is never stored as zero
                    codes = tl.where((moments[K] > 0) & (codes == 0) & (bits[K] < INFINITY_BITS), 1, codes)
                tl.store(_pointer(line_ptr, STATE + K, tl.uint8, ALIGNED) + offsets, codes.to(tl.uint8), mask=mask)
            else:
                tl.store(_pointer(line_ptr, STATE + K, tl.float32, ALIGNED) + offsets, moments[K], mask=mask)


@triton.jit
def _largest(at, start, moments, TILE: tl.constexpr):
    """The largest magnitude of each block's part of this tile, for each moment."""
    _, mask = _cells(at, start, TILE)
    m, slow, v = moments
    return (
        tl.max(magnitude_bits(m, mask), axis=1, keep_dims=True),
        tl.max(magnitude_bits(slow, mask), axis=1, keep_dims=True),
        tl.max(magnitude_bits(v, mask), axis=1, keep_dims=True),
    )


@triton.jit
def _larger(a, b):
    return tl.maximum(a[0], b[0]), tl.maximum(a[1], b[1]), tl.maximum(a[2], b[2])


# --- Kernels


@triton.jit
def _step_kernel(
    table_ptr,
    owner_ptr,
    scalars_ptr,
    books_ptr,
    block,
    P_TYPE: tl.constexpr,
    G_TYPE: tl.constexpr,
    RULE: tl.constexpr,
    KEEPS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ALIGNED: tl.constexpr,
    MANY: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    line_ptr, count, blocks = _locate(table_ptr, owner_ptr, ALIGNED, ROWS)
    row_ptr = scalars_ptr + tl.load(line_ptr + ROW) * WIDTH
    columns = tl.arange(0, 16)
    row = tl.load(row_ptr + columns, mask=columns < WIDTH, other=0.0)
    # A tensor whose row is not finite counts as empty: nothing of it is read or written.
    count = tl.where(tl.max(magnitude_bits(row, columns < WIDTH), axis=0) < INFINITY_BITS, count, 0)
    at = (line_ptr, row_ptr, books_ptr, blocks, block, count)

    p, _, update, moments = _advance(at, 0, P_TYPE, G_TYPE, RULE, KEEPS, QUANTIZED, ALIGNED, TILE)
    moments = _roots(moments, KEEPS, QUANTIZED)
    bits = _largest(at, 0, moments, TILE)
    end = tl.minimum(tl.cast(block, tl.int64), count)
    if (QUANTIZED > 0) and MANY:
        for start in range(TILE, end, TILE):
            _, _, _, later = _advance(at, start, P_TYPE, G_TYPE, RULE, KEEPS, QUANTIZED, ALIGNED, TILE)
            bits = _larger(bits, _largest(at, start, _roots(later, KEEPS, QUANTIZED), TILE))
    if (QUANTIZED == 2) and (KEEPS >> 2 == 1):
        # The first moments are divided by the stored root, whose scale is known only now; then they have new scales.
        root_bits = _keep_21_bits(bits[2])
        moments = _as_kept(at, 0, moments, root_bits, KEEPS, QUANTIZED, TILE)
        found = _largest(at, 0, moments, TILE)
        if MANY:
            for start in range(TILE, end, TILE):
                _, _, _, later = _advance(at, start, P_TYPE, G_TYPE, RULE, KEEPS, QUANTIZED, ALIGNED, TILE)
                later = _as_kept(at, start, _roots(later, KEEPS, QUANTIZED), root_bits, KEEPS, QUANTIZED, TILE)
                found = _larger(found, _largest(at, start, later, TILE))
        bits = (found[0], found[1], bits[2])
    if QUANTIZED == 2:
        bits = (_keep_21_bits(bits[0]), _keep_21_bits(bits[1]), _keep_21_bits(bits[2]))
    _write(at, 0, p, update, moments, bits, P_TYPE, KEEPS, QUANTIZED, ALIGNED, TILE)
    if MANY:
        for start in range(TILE, end, TILE):
            p, _, update, moments = _advance(at, start, P_TYPE, G_TYPE, RULE, KEEPS, QUANTIZED, ALIGNED, TILE)
            moments = _roots(moments, KEEPS, QUANTIZED)
            moments = _as_kept(at, start, moments, bits[2], KEEPS, QUANTIZED, TILE)
            _write(at, start, p, update, moments, bits, P_TYPE, KEEPS, QUANTIZED, ALIGNED, TILE)
    if QUANTIZED > 0:
        tl.debug_barrier()  # several warps may share a block: none of them may still have to read its old scale
        for K in tl.static_range(3):
            if (KEEPS >> K) & 1:
                scale_ptr = _pointer(line_ptr, SCALE + K, tl.float32, False) + blocks
                tl.store(scale_ptr, stored_absmax(bits[K]), mask=blocks * block < count)


@triton.jit
def _norms_kernel(
    table_ptr,
    owner_ptr,
    scalars_ptr,
    books_ptr,
    sums_ptr,
    block,
    P_TYPE: tl.constexpr,
    G_TYPE: tl.constexpr,
    RULE: tl.constexpr,
    KEEPS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ALIGNED: tl.constexpr,
    MANY: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    RATIOS: tl.constexpr,
):
    line_ptr, count, blocks = _locate(table_ptr, owner_ptr, ALIGNED, ROWS)
    row_ptr = scalars_ptr + tl.load(line_ptr + ROW) * WIDTH
    at = (line_ptr, row_ptr, books_ptr, blocks, block, count)
    floor = tl.load(row_ptr + EPS) * tl.load(row_ptr + EPS)
    first = tl.zeros((ROWS, TILE), tl.float32)
    second = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, tl.minimum(tl.cast(block, tl.int64), count) if MANY else TILE, TILE):
        p, g, update, moments = _advance(at, start, P_TYPE, G_TYPE, RULE, KEEPS, QUANTIZED, ALIGNED, TILE)
        _, mask = _cells(at, start, TILE)
        if RATIOS:
            v = moments[2]
            first += tl.where(mask, tl.div_rn(g * g, tl.where(v < floor, floor, v)), 0.0)
        else:
            change = (tl.load(row_ptr + DECAY) - 1.0) * p - tl.load(row_ptr + LR) * update
            first += p * p
            second += tl.where(mask, change * change, 0.0)
    out_ptr = sums_ptr + tl.program_id(0)
    tl.store(out_ptr, tl.sum(first))
    if not RATIOS:
        tl.store(out_ptr + tl.num_programs(0), tl.sum(second))


@triton.jit
def _gradient_norms_kernel(
    table_ptr,
    owner_ptr,
    sums_ptr,
    block,
    G_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MANY: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    line_ptr, count, blocks = _locate(table_ptr, owner_ptr, ALIGNED, ROWS)
    at = (line_ptr, line_ptr, line_ptr, blocks, block, count)
    squares = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, tl.minimum(tl.cast(block, tl.int64), count) if MANY else TILE, TILE):
        offsets, mask = _cells(at, start, TILE)
        g = tl.load(_pointer(line_ptr, GRAD, G_TYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
        squares += g * g
    tl.store(sums_ptr + tl.program_id(0), tl.sum(squares))
