"""The fused optimizer step on the GPU: the Triton kernels of fused.py, many tensors in one launch.

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
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from trimtab.ops.blockwise_triton import (
    BOOK,
    INFINITY_BITS,
    alignment,
    boundaries,
    columns_inside,
    launch,
    look_up,
    magnitude_bits,
    narrow,
    nearest,
    stored_absmax,
    tile_shape,
    to_unit,
)
from trimtab.ops.step import quadratic
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
COARSEST, FINEST = tl.constexpr(quadratic.COARSEST), tl.constexpr(quadratic.FINEST)
LOWEST, KNEE, LARGEST_ROOT = tl.constexpr(quadratic.LOWEST), tl.constexpr(quadratic.KNEE), tl.constexpr(float(2**63))


def step(*arguments: Any) -> None:
    a = Arguments(*arguments)
    assert not a.extras, "trimtab/optim/chunks.py steps parameters with extra bits on GPUs"
    books = _books(a)
    for group in _groups(a):
        group.run(_step_kernel, a.scalars, books)


def norms(*arguments: Any) -> Tensor:
    return _sums("norms", 2, Arguments(*arguments))


def ratios(*arguments: Any) -> Tensor:
    a = Arguments(*arguments)
    uncoupled = a.scalars.clone()
    uncoupled[:, COUPLED.value] = 0  # nothing depends on the parameters
    return _sums("ratios", 1, a._replace(scalars=uncoupled))[:, 0]


def gradient_norms(grads: Sequence[Tensor]) -> Tensor:
    unused = grads[0].new_empty(0, dtype=torch.float32)
    return _sums("gradients", 1, Arguments(grads, grads, (), (), unused, unused, unused, "", "", UNIT))[:, 0]


def _sums(what: str, count: int, a: Arguments) -> Tensor:
    """[tensors, count]: the sums of each tensor."""
    books, result = _books(a), a.scalars.new_zeros(len(a.params), count)
    for group in _groups(a):
        sums = result.new_empty(count, group.owner.numel())
        group.run(_sums_kernel, a.scalars, books, sums, WHAT=what)
        result.index_copy_(0, group.table[:, ROW.value], group.add_up(sums).T)
    return result


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for."""

    p_type: Any
    g_type: Any
    rule: str
    keeps: int  # bit K: the rule has state K (0 m, 1 the slow m, 2 v)
    quantized: int  # 0 float32, 1 by codebook, 2 quadratic
    aligned: bool  # addresses to 16 bytes, and blocks to 16 values
    many: bool  # a block is longer than a tile
    rows: int
    tile: int

    @property
    def has_v(self) -> bool:
        return self.keeps >> 2 == 1

    @property
    def roots(self) -> bool:
        """The quadratic code keeps √v instead of v."""
        return self.quantized == 2 and self.has_v

    @property
    def units(self) -> int:
        """Bit K: the quadratic code keeps state K in units of √v."""
        states = RULES[self.rule].states if self.rule else ""
        return sum(1 << k for k, kind in enumerate(states) if kind == "m") if self.has_v else 0


@dataclass(frozen=True)
class _Group:
    """Tensors with the same dtypes and alignment: their table, and the tensor of each program."""

    table: Tensor
    owner: Tensor
    block: int
    form: Form

    def run(self, kernel: Any, *arguments: Tensor, **constants: Any) -> None:
        # 16 values per thread. With one or two states a thread has at most 160 registers, so a multiprocessor 12 warps,
        # with three states 8 warps: the 5 to 16 loads of 128 bits that each thread has under way are enough for the
        # memory. A long block keeps its first tile while the others are read; with 8 values per thread it fits.
        constants |= {"FORM": self.form, "num_warps": 8 if self.form.many else 4}
        grid = (self.owner.numel(),)
        launch(kernel, grid, self.table, self.owner, *arguments, self.block, **constants)

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
        aligned = alignment(p.numel(), block) == 16
        aligned = aligned and all(x.data_ptr() % 16 == 0 for x in (p, g, *a.states[i::count]))
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
        table = _upload(lines, a.params[0].device)
        # Expanded on the device: a large model has a million programs, so this map is not copied from the host.
        owner = torch.arange(len(members), device=table.device).repeat_interleave(
            table[:, PROGRAMS.value], output_size=sum(programs)
        )
        quantized = 0 if not a.absmax else 2 if a.code == "quadratic" else 1
        types = TYPES[p_dtype], TYPES[g_dtype]
        form = Form(*types, a.rule, keeps_of(a.rule), quantized, aligned, block > tile, rows, tile)
        yield _Group(table, owner, block, form)


def _upload(lines: list[list[int]], device: torch.device) -> Tensor:
    """The table on the device, without waiting for it."""
    if not _is_captured(device):
        pinned = device.type == "cuda"  # a copy from other memory would wait
        if pinned:
            _load_line_kernel(device)
        return torch.tensor(lines, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)
    # A graph repeats kernels with their arguments, but would copy host memory that has other contents by then.
    table = torch.empty(len(lines), COLUMNS.value, dtype=torch.int64, device=device)
    write_lines(table, lines)
    return table


@cache
def _load_line_kernel(device: torch.device) -> None:
    """It runs in graphs only, and while one is captured CUDA refuses to load a kernel: loaded by the steps before."""
    write_lines(torch.empty(1, COLUMNS.value, dtype=torch.int64, device=device), [[0] * COLUMNS.value])


def write_lines(table: Tensor, lines: list[list[int]]) -> None:
    for i, line in enumerate(lines):
        launch(_line_kernel, (1,), table[i], *line)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keeps_of(rule: str) -> int:
    """`Form.keeps` of a rule; "" is none."""
    return sum(1 << _place(k, rule) for k in range(len(RULES[rule].states))) if rule else 0


def _place(k: int, rule: str) -> int:
    """The column of the rule's state k: m comes first, then the slow m, then v."""
    return 2 if RULES[rule].states[k] == "v" else k


def _books(a: Arguments) -> Tensor:
    """[4, BOOK]: the signed values and their boundaries, then the unsigned ones. Only codes of a codebook need them."""
    if not a.absmax or a.code != "codebook":
        return a.scalars
    books = ((pad(book, (0, BOOK.value - book.numel())), boundaries(book)) for book in (a.signed, a.unsigned))
    return torch.stack([row for pair in books for row in pair])


_INTEGERS = ["p", "g", "state0", "state1", "state2", "scale0", "scale1", "scale2", "count", "first", "programs", "row"]


@triton.jit(do_not_specialize=_INTEGERS)
def _line_kernel(
    line_ptr,
    p: tl.int64,
    g: tl.int64,
    state0: tl.int64,
    state1: tl.int64,
    state2: tl.int64,
    scale0: tl.int64,
    scale1: tl.int64,
    scale2: tl.int64,
    count: tl.int64,
    first: tl.int64,
    programs: tl.int64,
    row: tl.int64,
):
    """Write a line of the table."""
    line = (p, g, state0, state1, state2, scale0, scale1, scale2, count, first, programs, row)
    for k in tl.static_range(COLUMNS):
        tl.store(line_ptr + k, line[k])


# --- The rules: the equations of rules.py, operation by operation. `row_ptr` is the tensor's row of scalars.


@triton.jit
def _mix(row_ptr, A: tl.constexpr, a, B: tl.constexpr, b):
    return tl.load(row_ptr + A) * a + tl.load(row_ptr + B) * b


@triton.jit
def _over_root(row_ptr, x, v):
    return tl.div_rn(x, tl.sqrt_rn(v) * tl.load(row_ptr + DEBIAS) + tl.load(row_ptr + EPS))


@triton.jit
def _variance(v, mean):
    variance = v - mean * mean
    return tl.where(variance < 0, 0.0, variance)


@triton.jit
def _update(row_ptr, g, m, slow, v, RULE: tl.constexpr):
    """The update, and the new moments."""
    if (RULE != "momentum") and (RULE != "lion"):
        v = _mix(row_ptr, BETA2, v, GAIN2, g * g)
    if RULE == "adamw":
        m = _mix(row_ptr, BETA1, m, GAIN1, g)
        update = _over_root(row_ptr, m, v)
    elif RULE == "momentum":
        m = _mix(row_ptr, BETA1, m, GAIN1, g)
        update = _mix(row_ptr, MIX_M, m, MIX_G, g)
    elif RULE == "lion":
        c = _mix(row_ptr, MIX_M, m, MIX_G, g)
        m = _mix(row_ptr, BETA1, m, GAIN1, g)
        update = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))  # the sign of NaN is NaN
    elif RULE == "rms":
        update = _over_root(row_ptr, g, v)
    elif RULE == "ademamix":
        m = _mix(row_ptr, BETA1, m, GAIN1, g)
        slow = _mix(row_ptr, BETA3, slow, GAIN3, g)
        update = _over_root(row_ptr, _mix(row_ptr, MIX_M, m, MIX_G, slow), v)
    elif RULE == "rms_momentum":
        m = _mix(row_ptr, BETA1, m, GAIN1, _over_root(row_ptr, g, v))
        update = m
    elif RULE == "rms_centered":  # the mean is where m is
        m = _mix(row_ptr, BETA3, m, GAIN3, g)
        update = _over_root(row_ptr, g, _variance(v, m))
    else:  # rms_centered_momentum: the mean is where the slow m is
        slow = _mix(row_ptr, BETA3, slow, GAIN3, g)
        m = _mix(row_ptr, BETA1, m, GAIN1, _over_root(row_ptr, g, _variance(v, slow)))
        update = m
    return update, (m, slow, v)


# --- The parts of the kernels


class At(NamedTuple):
    """What a program works on."""

    line_ptr: Any  # of the table
    row_ptr: Any  # of the scalars
    books_ptr: Any
    blocks: Any  # [ROWS, 1]: their numbers
    first: Any  # [ROWS, 1]: the place of their first values
    left: Any  # [ROWS, 1]: their lengths, not positive beyond the end of the tensor
    count: Any  # the values of the tensor


@triton.jit
def _locate(table_ptr, owner_ptr, scalars_ptr, books_ptr, block, SKIP: tl.constexpr, FORM: tl.constexpr):
    program = tl.program_id(0)
    line_ptr = table_ptr + tl.load(owner_ptr + program) * COLUMNS
    blocks = (program - tl.load(line_ptr + FIRST)) * FORM.rows + tl.arange(0, FORM.rows)
    row_ptr = scalars_ptr + tl.load(line_ptr + ROW) * WIDTH
    count = tl.load(line_ptr + COUNT)
    if SKIP:  # a tensor whose row is not finite counts as empty: nothing of it is read or written
        columns = tl.arange(0, 16)
        row = tl.load(row_ptr + columns, mask=columns < WIDTH, other=0.0)
        count = tl.where(tl.max(magnitude_bits(row, columns < WIDTH), axis=0) < INFINITY_BITS, count, 0)
    first = blocks[:, None] * block
    return At(line_ptr, row_ptr, books_ptr, blocks[:, None], first, tl.minimum(count - first, block), count)


@triton.jit
def _pointer(at, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(at.line_ptr + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:  # lets the compiler read and write 16 bytes at a time
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _cells(at, start, FORM: tl.constexpr):
    """The values [start, start + tile) of each block: their offsets in the tensor, and which of them exist."""
    offsets = (at.first + start) + tl.arange(0, FORM.tile)[None, :]
    return offsets, columns_inside(at.left - start, FORM.tile, 16 if FORM.aligned else 1)


@triton.jit
def _codes(at, K: tl.constexpr, offsets, mask, FORM: tl.constexpr):
    return tl.load(_pointer(at, STATE + K, tl.uint8, FORM.aligned) + offsets, mask=mask, other=0)


@triton.jit
def _scale(at, K: tl.constexpr):
    scale_ptr = _pointer(at, SCALE + K, tl.float32, False) + at.blocks
    return tl.load(scale_ptr, mask=at.left > 0, other=0.0)


@triton.jit
def _read(at, K: tl.constexpr, offsets, mask, unit, FORM: tl.constexpr):
    if (FORM.keeps >> K) & 1 == 0:
        return tl.zeros(offsets.shape, tl.float32)
    elif FORM.quantized > 0:
        codes = _codes(at, K, offsets, mask, FORM)
        scale = _scale(at, K)
        if FORM.quantized == 2:
            return _decode_quadratic(codes, scale, unit, K, FORM)
        return look_up(at.books_ptr + K // 2 * 2 * BOOK, codes.to(tl.int32)) * scale
    else:
        return tl.load(_pointer(at, STATE + K, tl.float32, FORM.aligned) + offsets, mask=mask, other=0.0)


@triton.jit
def _gradient(at, offsets, mask, FORM: tl.constexpr):
    return tl.load(_pointer(at, GRAD, FORM.g_type, FORM.aligned) + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _twice(x):
    return tl.maximum((x.to(tl.int32, bitcast=True) << 1) - 0x3F800000, 0).to(tl.float32, bitcast=True)


@triton.jit
def _halve(x):
    return ((x.to(tl.int32, bitcast=True) >> 1) + 0x1FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _top(K: tl.constexpr, FORM: tl.constexpr):
    """The value of the largest code of a first moment, in units of code 1."""
    return 127.0 if (FORM.units >> K) & 1 else 260046848.0


@triton.jit
def _end(most, shift):
    """The place of the first root that is not smaller, in numbers without their last `shift` bits."""
    return ((most - 1) >> shift) + 1


@triton.jit
def _low(end, shift):
    """The first place of the window that ends at this one."""
    return tl.maximum(end - 255, (end * 0 + LOWEST) >> shift)


@triton.jit
def _knee(end):
    """The bits of the number with code KNEE in a wide window."""
    return tl.maximum((end - 252 + KNEE) & ~3, (LOWEST >> COARSEST) + 4 * KNEE) << COARSEST


@triton.jit
def _choice(least, most):
    """0 for a wide window, else COARSEST + 1 - shift: the finest of each block that holds all its roots."""
    choice = most * 0
    for i in tl.static_range(COARSEST - FINEST + 1):
        shift = COARSEST - i
        choice = tl.where(_end(most, shift) - (least >> shift) <= 255, i + 1, choice)
    return tl.where(most < INFINITY_BITS, choice, 0)


@triton.jit
def _shift(choice):
    return tl.where(choice == 0, COARSEST, COARSEST + 1 - choice)


@triton.jit
def _window(end, choice):
    """Of each block: the bits that code 0, or KNEE in a wide window, stands for; that code; how far codes are shifted.

    Codes below the second number are two powers of two coarser.
    """
    shift = _shift(choice)
    base = tl.where(choice == 0, _knee(end), _low(end, shift) << shift)
    return base, tl.where(choice == 0, KNEE, 0), shift


@triton.jit
def _decode_root(codes, scale):
    bits = scale.to(tl.int32, bitcast=True)
    choice = bits & 7
    base, middle, shift = _window(bits >> _shift(choice), choice)
    c = codes.to(tl.int32)
    return (base + ((c - middle) << tl.where(c < middle, shift + 2, shift))).to(tl.float32, bitcast=True)


@triton.jit
def _decode_quadratic(codes, scale, unit, K: tl.constexpr, FORM: tl.constexpr):
    """√v, or a first moment, as in quadratic.py. `unit` is that of the root."""
    if K == 2:
        return _decode_root(codes, scale)
    else:
        c = ((codes.to(tl.int32) ^ 0x4B000080).to(tl.float32, bitcast=True)) - 8388736.0  # as int8, without conversion
        if (FORM.units >> K) & 1 == 0:
            value = _twice(_twice(tl.abs(c)))
            c = tl.where(c < 0, -value, value)
            return c * tl.div_rn(scale, _top(K, FORM))
        return c * (tl.div_rn(scale, _top(K, FORM)) * unit)


@triton.jit
def _phase(at, start, K: tl.constexpr, FORM: tl.constexpr):
    """The dither of moment K, in 2^-32ths of a code: it advances per step and per value of a block."""
    step = tl.load(at.row_ptr + STEP).to(tl.int64).to(tl.uint32)
    per_step: tl.constexpr = 0xD1B54A33 if K == 0 else (0xABC98389 if K == 1 else 0x8CB92BA7)
    per_value: tl.constexpr = 0x9E3779B1 if K == 0 else (0xC13FA9A9 if K == 1 else 0x91E10DA5)
    places = (start + tl.arange(0, FORM.tile)[None, :]).to(tl.uint32)
    return step * per_step + places * per_value


@triton.jit
def _dithered_root(at, start, x, choice, most, FORM: tl.constexpr):
    """The bits of a root with its dither, and how many of the last ones are not stored."""
    base, middle, shift = _window(_end(most, _shift(choice)), choice)
    root = x.to(tl.int32, bitcast=True)
    lowest = base - (middle << (COARSEST + 2))
    shift = tl.where(root < tl.where(choice == 0, base, 0), shift + 2, shift)
    noise = ((_phase(at, start, 2, FORM) >> 22) | 1).to(tl.int32) << (shift - 10)
    return tl.maximum(root + noise, lowest), shift


@triton.jit
def _encode_root(at, start, x, choice, most, FORM: tl.constexpr):
    root, shift = _dithered_root(at, start, x, choice, most, FORM)
    base, middle, _ = _window(_end(most, _shift(choice)), choice)
    return tl.where(most < INFINITY_BITS, ((root - base) >> shift) + middle, 255)


@triton.jit
def _encode_first(at, start, x, bits, K: tl.constexpr, FORM: tl.constexpr):
    """Codes of what `_as_kept` returns."""
    # Its upper 10 bits as 1 + n / 1024, which is (n - 511.5) / 1024 above the number that is subtracted.
    dither = ((_phase(at, start, K, FORM) >> 9) & 0x7FE000 | 0x3F800000).to(tl.float32, bitcast=True) - 1.49951171875
    absmax = tl.where((bits > 0) & (bits < INFINITY_BITS), bits, 0x3F800000).to(tl.float32, bitcast=True)
    inverse = tl.minimum(tl.div_rn(_top(K, FORM) + tl.zeros(absmax.shape, tl.float32), absmax), LARGEST)
    z = tl.where(bits < INFINITY_BITS, x * inverse, 0.0)
    if (FORM.units >> K) & 1:
        f = z + dither
    else:
        y = tl.abs(z)
        code = tl.minimum(tl.minimum(_halve(_halve(y)), y), y * (1 / 15) + 14 / 15)
        code = tl.minimum(tl.minimum(code, y * (1 / 48) + 5 / 3), y * (1 / 192) + 8 / 3) + dither
        f = tl.where((z < 0) & (code > 0), -code, code)
    return (f + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # half to even


@triton.jit
def _keep_21_bits(bits):
    """An absmax as it is stored: float32 state dicts restore it exactly."""
    return tl.where(bits < INFINITY_BITS, tl.minimum((bits + 4) & -8, 0x7F7FFFF8), bits)


@triton.jit
def _unit(root, choice, end):
    """The largest power of two in a stored root, as bits; in a wide window not below the knee / 2^7."""
    lowest = tl.where(choice == 0, _knee(end) - (7 << 23), 0)
    return tl.maximum(root, lowest) & 0x7F800000


@triton.jit
def _as_kept(at, start, moments, most, choice, FORM: tl.constexpr):
    """What is stored of the moments: in the quadratic code the first ones in units of the stored root."""
    m, slow, v = moments
    if FORM.roots:
        root, _ = _dithered_root(at, start, v, choice, most, FORM)
        unit = _unit(root, choice, _end(most, COARSEST))
        per_unit = (0x7F000000 - unit).to(tl.float32, bitcast=True)  # 1 / unit, exactly
        per_unit = tl.where(most < INFINITY_BITS, per_unit, float("nan"))  # such a block is NaN in every moment
        m = m * per_unit if FORM.units & 1 else m
        slow = slow * per_unit if FORM.units & 2 else slow
    return m, slow, v


@triton.jit
def _advance(at, start, FORM: tl.constexpr):
    """Decode a tile and apply the rule: the old parameter, the gradient, the update and the new moments."""
    offsets, mask = _cells(at, start, FORM)
    p = tl.load(_pointer(at, PARAM, FORM.p_type, FORM.aligned) + offsets, mask=mask, other=0.0).to(tl.float32)
    g = _gradient(at, offsets, mask, FORM) * tl.load(at.row_ptr + GRAD_SCALE)
    coupled = tl.load(at.row_ptr + COUPLED)
    g = tl.where(coupled != 0, g + coupled * p, g)
    unit = 1.0
    if FORM.roots:
        scale = _scale(at, 2)
        root, end = _decode_root(_codes(at, 2, offsets, mask, FORM), scale), scale.to(tl.int32, bitcast=True)
        unit = _unit(root.to(tl.int32, bitcast=True), end & 7, end >> COARSEST).to(tl.float32, bitcast=True)
    m = _read(at, 0, offsets, mask, unit, FORM)
    slow = _read(at, 1, offsets, mask, unit, FORM)
    v = _read(at, 2, offsets, mask, unit, FORM)
    if FORM.roots:
        v = v * v
    update, moments = _update(at.row_ptr, g, m, slow, v, FORM.rule)
    return p, g, update, moments


@triton.jit
def _advance_to_store(at, start, FORM: tl.constexpr):
    """The old parameter, the update, and the new moments with √v instead of v where the code keeps that."""
    p, _, update, moments = _advance(at, start, FORM)
    m, slow, v = moments
    if FORM.roots:
        v = tl.sqrt_rn(v)
        v = tl.where(v > LARGEST_ROOT, LARGEST_ROOT, v)
    return p, update, (m, slow, v)


@triton.jit
def _write(at, start, p, update, moments, bits, choice, FORM: tl.constexpr):
    """Move the parameter and store the moments of a tile; `bits` is each block's new absmax."""
    offsets, mask = _cells(at, start, FORM)
    p = tl.load(at.row_ptr + DECAY) * p - tl.load(at.row_ptr + LR) * update
    tl.store(_pointer(at, PARAM, FORM.p_type, FORM.aligned) + offsets, narrow(p, FORM.p_type), mask=mask)
    for K in tl.static_range(3):
        if (FORM.keeps >> K) & 1:
            if FORM.quantized == 0:
                tl.store(_pointer(at, STATE + K, tl.float32, FORM.aligned) + offsets, moments[K], mask=mask)
            else:
                if FORM.quantized == 2 and K == 2:
                    codes = _encode_root(at, start, moments[K], choice, bits[K], FORM)
                elif FORM.quantized == 2:
                    codes = _encode_first(at, start, moments[K], bits[K], K, FORM)
                else:
                    codes = nearest(to_unit(moments[K], bits[K]), at.books_ptr + (K // 2 * 2 + 1) * BOOK)
                    if K == 2:  # a positive second moment is never stored as zero
                        codes = tl.where((moments[K] > 0) & (codes == 0) & (bits[K] < INFINITY_BITS), 1, codes)
                tl.store(_pointer(at, STATE + K, tl.uint8, FORM.aligned) + offsets, codes.to(tl.uint8), mask=mask)


@triton.jit
def _largest(at, start, moments, FORM: tl.constexpr):
    """The largest magnitude of each block's part of this tile, for each moment."""
    _, mask = _cells(at, start, FORM)
    m, slow, v = moments
    return (
        tl.max(magnitude_bits(m, mask), axis=1, keep_dims=True),
        tl.max(magnitude_bits(slow, mask), axis=1, keep_dims=True),
        tl.max(magnitude_bits(v, mask), axis=1, keep_dims=True),
    )


@triton.jit
def _smallest(at, start, v, FORM: tl.constexpr):
    """The smallest root of each block's part of this tile, as bits."""
    _, mask = _cells(at, start, FORM)
    return tl.min(tl.where(mask, v.to(tl.int32, bitcast=True), 0x7FFFFFFF), axis=1, keep_dims=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a[0], b[0]), tl.maximum(a[1], b[1]), tl.maximum(a[2], b[2])


# --- Kernels


@triton.jit
def _step_kernel(table_ptr, owner_ptr, scalars_ptr, books_ptr, block, FORM: tl.constexpr):
    at = _locate(table_ptr, owner_ptr, scalars_ptr, books_ptr, block, True, FORM)
    p, update, moments = _advance_to_store(at, 0, FORM)
    bits = _largest(at, 0, moments, FORM)
    smallest = _smallest(at, 0, moments[2], FORM)
    end = tl.minimum(tl.cast(block, tl.int64), at.count)
    if (FORM.quantized > 0) and FORM.many:
        for start in range(FORM.tile, end, FORM.tile):
            _, _, later = _advance_to_store(at, start, FORM)
            bits = _larger(bits, _largest(at, start, later, FORM))
            smallest = tl.minimum(smallest, _smallest(at, start, later[2], FORM))
    choice = smallest * 0
    if FORM.roots:
        # The first moments are divided by the stored root, whose scale is known only now; then they have new scales.
        choice = _choice(smallest, bits[2])
        moments = _as_kept(at, 0, moments, bits[2], choice, FORM)
        found = _largest(at, 0, moments, FORM)
        if FORM.many:
            for start in range(FORM.tile, end, FORM.tile):
                _, _, later = _advance_to_store(at, start, FORM)
                later = _as_kept(at, start, later, bits[2], choice, FORM)
                found = _larger(found, _largest(at, start, later, FORM))
        bits = (found[0], found[1], bits[2])
    if FORM.quantized == 2:
        bits = (_keep_21_bits(bits[0]), _keep_21_bits(bits[1]), bits[2])
    _write(at, 0, p, update, moments, bits, choice, FORM)
    if FORM.many:
        for start in range(FORM.tile, end, FORM.tile):
            p, update, moments = _advance_to_store(at, start, FORM)
            _write(at, start, p, update, _as_kept(at, start, moments, bits[2], choice, FORM), bits, choice, FORM)
    if FORM.roots:
        shift = _shift(choice)
        window = (_end(bits[2], shift) << shift) | choice
        bits = (bits[0], bits[1], tl.where(bits[2] < INFINITY_BITS, window, bits[2]))
    if FORM.quantized > 0:
        tl.debug_barrier()  # several warps may share a block: none of them may still have to read its old scale
        for K in tl.static_range(3):
            if (FORM.keeps >> K) & 1:
                scale_ptr = _pointer(at, SCALE + K, tl.float32, False) + at.blocks
                tl.store(scale_ptr, stored_absmax(bits[K]), mask=at.left > 0)


@triton.jit
def _sums_kernel(table_ptr, owner_ptr, scalars_ptr, books_ptr, sums_ptr, block, WHAT: tl.constexpr, FORM: tl.constexpr):
    at = _locate(table_ptr, owner_ptr, scalars_ptr, books_ptr, block, False, FORM)
    first = tl.zeros((FORM.rows, FORM.tile), tl.float32)
    second = tl.zeros((FORM.rows, FORM.tile), tl.float32)
    for start in range(0, tl.minimum(tl.cast(block, tl.int64), at.count) if FORM.many else FORM.tile, FORM.tile):
        offsets, mask = _cells(at, start, FORM)
        if WHAT == "gradients":
            g = _gradient(at, offsets, mask, FORM)
            first += g * g
        else:
            p, g, update, moments = _advance(at, start, FORM)
            if WHAT == "ratios":
                floor = tl.load(at.row_ptr + EPS) * tl.load(at.row_ptr + EPS)
                v = moments[2]
                first += tl.where(mask, tl.div_rn(g * g, tl.where(v < floor, floor, v)), 0.0)
            else:
                change = (tl.load(at.row_ptr + DECAY) - 1.0) * p - tl.load(at.row_ptr + LR) * update
                first += p * p
                second += tl.where(mask, change * change, 0.0)
    out_ptr = sums_ptr + tl.program_id(0)
    tl.store(out_ptr, tl.sum(first))
    if WHAT == "norms":
        tl.store(out_ptr + tl.num_programs(0), tl.sum(second))
