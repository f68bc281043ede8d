"""The quadratic code for optimizer state: one byte per value, first moments in units of the stored √v.

    root     s = √v       code 0 … 255        s₈ = twice(o + c) absmax / twice(o + 255)             twice(c) ≈ c²
    unit     u = m / w    code ±2 … ±127      m₈ = ± w (twice(|c|) - 4) absmax / (twice(127) - 4)   w: a power of two
    plain    m            code -127 … 127     m₈ = ± twice(twice(|c|)) absmax / twice(twice(127))   rules without v

Adam moves a parameter by m / √v. If both are stored separately, a small m next to large ones in its block loses its
digits. Divided by a unit w that follows its stored root, all values of a block have similar sizes, whatever the sizes
of their gradients. w is the largest power of two in the root's code value, so that multiplying and dividing by it is
exact. Squares give small values finer steps than large ones: a range of 4,064 for roots and 4,031 for units. Rules
without a second moment (SGD, Lion) store m itself, whose sizes differ as much as those of the gradients: fourth
powers span eight decades.

The unit follows the *stored* root, so m₈ has only the rounding error of its own code. With units of the exact root,
every rounding error of s₈ would multiply m, and an s₈ held at its smallest code would let m grow without bound.

The square is that of the bits: `twice` doubles a float's exponent and mantissa, bits -> 2 bits - bits of 1, which
interpolates c² linearly between 1, 1.5, 2, 3, 4, 6, 8, 12 …; `halve` is its inverse. Two integer operations replace a
square root, give the same bits on every machine, and make the code piecewise linear, with all corners on codes.

A block whose roots are of similar size needs less range, and a finer code reduces its rounding error: o is 256, 768 or
1,792 instead of 0 if the smallest root is more than 0.25, 0.50 or 0.75 of the largest (`FINE`). absmax is kept to 21
bits, and the last two of the others hold the choice.

Dither. Rounding to nearest loses every change smaller than half a code, which is most of them: with β2 = 0.999 a step
changes √v by 0.05 %. So c = floor(y + d), y the exact code, with a d in (0, 1) that differs at every step and value.
As the code is linear between neighbours, E[s₈] = s and E[m₈] = m: the averages follow their equations. d is a low-
discrepancy sequence, frac(step · a + place in the block · b): consecutive steps spread evenly over (0, 1), so their
rounding errors cancel faster than those of random numbers. Replicas, and shards of whole blocks, use the same d.

Encoding what was decoded gives the same codes and the same absmax, also after a round trip of m and v through float32
with a relative error of 1e-7: d stays 1/2048 away from 0 and 1, float32 state dicts restore 21 bits of absmax exactly,
and the limits of `FINE` lie on codes.

A root takes code 4 or more where o is 0: below, one code more or less would change it by more than 1.5x, and the update
with it. A block with a NaN or an Inf gets the scale NaN, as in blockwise.py. Negative codes are
two's complement. This file is the definition; the kernels are in quadratic.h, fused.cpp and fused_triton.py.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

Kind = Literal["root", "unit", "plain"]
TOP: dict[Kind, float] = {"root": 65024.0, "unit": 16124.0, "plain": 260046848.0}  # value of the largest code
STEPS = 1024  # the resolution of the dither: parts of a code
LARGEST_ROOT = 1.8446742e19  # of the largest float32
_LARGEST = torch.finfo(torch.float32).max
_ONE = 0x3F800000  # the bits of 1.0
_CHOICE = 3  # the bits of absmax that hold the index in FINE


class Fine(NamedTuple):
    """A code of roots."""

    offset: int  # o
    lowest: int  # the smallest o + c
    top: float  # twice(o + 255)
    limit: float  # smallest root of a block over its largest, above which the block uses this code


# A limit is a code of the line above: a block just below it, rounded up, is still not above it. It is 5e-7 larger,
# so that the rounding errors of float32 do not matter. The lowest code is the first one above the limit.
FINE = (
    Fine(0, 4, 65024.0, -1.0),
    Fine(256, 257, 261120.0, 16384 / 65024 * (1 + 5e-7)),
    Fine(768, 769, 1046528.0, 131072 / 261120 * (1 + 5e-7)),
    Fine(1792, 1793, 4190208.0, 786432 / 1046528 * (1 + 5e-7)),
)

# (slope, offset) of the lines from code 0 to 1, from 1 to 2, from 2 to 3 and from 3 to 4 of fourth powers.
_LINES = [(1, 0), (1 / 15, 14 / 15), (1 / 48, 5 / 3), (1 / 192, 8 / 3)]

# Dither advances by these 2^-32ths of a code per step and per value of a block: one pair for each moment of a rule,
# second moments last. Per step: the powers of 1 / 1.2207440846, which fill the unit cube evenly (Roberts 2018).
PER_STEP = (0xD1B54A33, 0xABC98389, 0x8CB92BA7)
PER_VALUE = (0x9E3779B1, 0xC13FA9A9, 0x91E10DA5)
SECOND = 2


def encode_moments(
    moments: Sequence[Tensor], signed: Sequence[bool], block: int, *, step: int | Tensor = 0
) -> list[tuple[Tensor, Tensor]]:
    """Codes and absmax of each float32 moment of one tensor; a second moment comes last. `step` chooses the dither."""
    if signed[-1]:
        return [quantize_quadratic(m, "plain", block, dither(k, step)) for k, m in enumerate(moments)]
    s = exact_root(moments[-1])
    s = torch.where(s == torch.inf, LARGEST_ROOT, s)  # g² overflowed, but the gradient was finite
    codes, absmax = quantize_quadratic(s, "root", block, dither(SECOND, step))
    per_unit = 1 / unit_of(codes, absmax, block)  # exact
    per_unit = torch.where(_spread(absmax, s, block).isnan(), torch.nan, per_unit)  # NaN in every moment
    first = [quantize_quadratic(m * per_unit, "unit", block, dither(k, step)) for k, m in enumerate(moments[:-1])]
    return [*first, (codes, absmax)]


def decode_moments(
    codes: Sequence[Tensor], absmax: Sequence[Tensor], signed: Sequence[bool], block: int
) -> list[Tensor]:
    """The inverse of `encode_moments`, in float32."""
    if signed[-1]:
        return [dequantize_quadratic(c, a, "plain", block) for c, a in zip(codes, absmax, strict=True)]
    unit = unit_of(codes[-1], absmax[-1], block)
    firsts = zip(codes[:-1], absmax[:-1], strict=True)
    root = dequantize_quadratic(codes[-1], absmax[-1], "root", block)
    return [*(dequantize_quadratic(c, a, "unit", block, unit) for c, a in firsts), root * root]


def start_quadratic(value: float, signed: bool) -> tuple[int, float]:
    """Code and absmax of a new moment that is `value` everywhere; only a second moment can start above zero."""
    if signed:
        return 2, 0.0
    codes, absmax = encode_moments([torch.full((1,), value)], [False], 1)[0]
    return int(codes), float(absmax)


def quantize_quadratic(
    x: Tensor, kind: Kind, block: int, phase: tuple[int | Tensor, int] = (0, PER_VALUE[0])
) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shaped like `x`) and one absmax per block. `phase` is that of `dither`."""
    block = min(block, max(1, x.numel()))
    last = -x.numel() % block
    blocks = pad(x.flatten(), (0, last)).view(-(-x.numel() // block), block)
    first, advance = phase
    places = torch.arange(block, device=x.device)
    noise = ((((first + places * advance) & 0xFFFF_FFFF) >> 22).float() + 0.5) / STEPS
    absmax = _keep_21_bits(blocks.abs().amax(dim=1))
    finite = absmax.isfinite()
    smallest = pad(x.flatten(), (0, last), value=torch.inf).view_as(blocks).amin(dim=1)
    choice = _choose(smallest, absmax) if kind == "root" else torch.zeros_like(absmax, dtype=torch.int32)
    offset, lowest, top = (_of_choice(choice, name)[:, None] for name in ("offset", "lowest", "top"))
    top = top if kind == "root" else torch.full_like(top, TOP[kind])
    # Where absmax is zero, or too small to divide by, the largest number instead of the quotient: zeros stay zero.
    inverse = (top / absmax[:, None]).clamp(max=_LARGEST)
    z = torch.where(finite[:, None], blocks.abs() * inverse, 0.0)
    f = _exact_code(z, kind) + noise
    codes = (torch.maximum(f, lowest).int() - offset.int()).clamp(max=255) if kind == "root" else f.int()
    codes = torch.where(finite[:, None], torch.where(blocks.signbit(), -codes, codes), 0)
    stored = torch.where(finite, (absmax.view(torch.int32) | choice).view(torch.float32), torch.nan)
    return codes.to(torch.uint8).flatten()[: x.numel()].view(x.shape), stored  # two's complement


def dequantize_quadratic(codes: Tensor, absmax: Tensor, kind: Kind, block: int, unit: Tensor | float = 1.0) -> Tensor:
    """Values in float32; `unit` is that of `unit_of` for first moments."""
    if kind == "root":
        choice, scale = _split(absmax)
        return twice(_whole_code(codes, choice, block)) * _spread(scale / _of_choice(choice, "top"), codes, block)
    c = codes.view(torch.int8).float()
    magnitude = twice(twice(c.abs())) if kind == "plain" else twice(c.abs()) - 4
    return magnitude.copysign(c) * (_spread(absmax / TOP[kind], codes, block) * unit)


def twice(x: Tensor) -> Tensor:
    """x² at powers of two, and linear between 1, 1.5, 2, 3, 4, 6 …; 0 at 0. For numbers that are not negative."""
    return ((x.view(torch.int32) << 1) - _ONE).clamp(min=0).view(torch.float32)


def halve(x: Tensor) -> Tensor:
    """The inverse of `twice`."""
    return ((x.view(torch.int32) >> 1) + (_ONE >> 1)).view(torch.float32)


def _exact_code(z: Tensor, kind: Kind) -> Tensor:
    """The code of a magnitude in units of code 1, before rounding: linear between any two codes in use."""
    if kind == "root":
        return halve(z)
    if kind == "unit":
        return halve(z + 4)
    code = halve(halve(z))
    # Between the smallest codes the bits have corners of their own; the straight lines from code to code lie below.
    for slope, offset in _LINES:
        code = torch.minimum(code, z * slope + offset)
    return code


def _choose(smallest: Tensor, absmax: Tensor) -> Tensor:
    """The index in FINE of each block's code."""
    limits = torch.tensor([fine.limit for fine in FINE[1:]], dtype=torch.float32, device=absmax.device)
    return (smallest[:, None] > limits * absmax[:, None]).sum(dim=1, dtype=torch.int32)


def _of_choice(choice: Tensor, name: Literal["offset", "lowest", "top"]) -> Tensor:
    values = [float(getattr(fine, name)) for fine in FINE]
    return torch.tensor(values, dtype=torch.float32, device=choice.device)[choice.long()]


def _split(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """The index in FINE, and absmax itself."""
    bits = absmax.view(torch.int32)
    return bits & _CHOICE, (bits & ~_CHOICE).view(torch.float32)


def _whole_code(codes: Tensor, choice: Tensor, block: int) -> Tensor:
    """o + c of roots."""
    return codes.float() + _spread(_of_choice(choice, "offset"), codes, block)


def _spread(scales: Tensor, like: Tensor, block: int) -> Tensor:
    """One scale per block to one per value."""
    return scales.repeat_interleave(min(block, max(1, like.numel())))[: like.numel()].view(like.shape)


def unit_of(codes: Tensor, absmax: Tensor, block: int) -> Tensor:
    """The largest power of two in the value of a root's code."""
    value = twice(_whole_code(codes, _split(absmax)[0], block))
    return (value.view(torch.int32) & 0x7F80_0000).view(torch.float32)


def dither(moment: int, step: int | Tensor) -> tuple[int | Tensor, int]:
    """The phase of a block's first value, and by how much it advances per value, in 2^-32ths of a code."""
    return step * PER_STEP[moment], PER_VALUE[moment]


def exact_root(x: Tensor) -> Tensor:
    # PyTorch's float32 square root may be off in the last bit on some machines; the rounded float64 one is not.
    return x.double().sqrt().float()


def _keep_21_bits(x: Tensor) -> Tensor:
    """Round to nearest, to a float32 whose last three bits are zero. Inf and NaN stay what they are."""
    bits = (x.view(torch.int32).clamp(max=0x7FFF_FFF0) + 4) & ~7
    return torch.where(x.isfinite(), bits.clamp(max=0x7F7F_FFF8).view(torch.float32), x)
