"""The quadratic code for optimizer state: one byte per value, first moments in units of the stored √v.

    root     s = √v       code 0, 4 … 255     s₈ = twice(c) absmax / twice(255)                      twice(c) ≈ c²
    unit     u = m / w    code -127 … 127     m₈ = ± w twice(|c|) absmax / twice(127)                w: a power of two
    plain    m            code -127 … 127     m₈ = ± twice(twice(|c|)) absmax / twice(twice(127))    rules without v

Adam moves a parameter by m / √v. If both are stored separately, a small m next to large ones in its block loses its
digits. Divided by a unit w that follows its stored root, all values of a block have similar sizes, whatever the sizes
of their gradients. w is the largest power of two in the root's code value, so that multiplying and dividing by it is
exact. Squares give small values finer steps than large ones: a range of 4,064 for roots, 16,128 for units. Rules
without a second moment (SGD, Lion) store m itself, whose sizes differ as much as those of the gradients: fourth
powers span eight decades.

The unit follows the *stored* root, so m₈ has only the rounding error of its own code. With units of the exact root,
every rounding error of s₈ would multiply m, and an s₈ held at its smallest code would let m grow without bound.

The square is that of the bits: `twice` doubles a float's exponent and mantissa, bits -> 2 bits - bits of 1, which
interpolates c² linearly between 1, 1.5, 2, 3, 4, 6, 8, 12 …; `halve` is its inverse. Two integer operations replace a
square root, give the same bits on every machine, and make the code piecewise linear, with all corners on codes.

Dither. Rounding to nearest loses every change smaller than half a code, which is most of them: with β2 = 0.999 a step
changes √v by 0.05 %. So c = floor(y + d), y the exact code, with a d in [0, 1) that differs at every step and value.
As the code is linear between neighbours, E[s₈] = s and E[m₈] = m: the averages follow their equations. d is a low-
discrepancy sequence, frac(step · a + place in the block · b): consecutive steps spread evenly over [0, 1), so their
rounding errors cancel faster than those of random numbers. Replicas, and shards of whole blocks, use the same d.

Encoding what was decoded gives the same codes and the same absmax, also after a round trip of m and v through float32
with a relative error of 1e-7: absmax is kept to 21 bits, so float32 state dicts restore it exactly.

A positive root takes code 4 or more: below, one code more or less would change it by more than 1.5x, and the update
with it. A block with a NaN or an Inf gets the scale NaN, as in blockwise.py. Negative codes are
two's complement. This file is the definition; the kernels are in quadratic.h, fused.cpp and fused_triton.py.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Kind = Literal["root", "unit", "plain"]
LEVELS: dict[Kind, int] = {"root": 255, "unit": 127, "plain": 127}  # the largest code
TOP: dict[Kind, float] = {"root": 65024.0, "unit": 16128.0, "plain": 260046848.0}  # its value, in units of code 1
SMALLEST = 4  # code of a positive root
PARTS = 4096  # the resolution of the dither: parts of a code
LARGEST_ROOT = 1.8446742e19  # of the largest float32
_LARGEST = torch.finfo(torch.float32).max
_ONE = 0x3F800000  # the bits of 1.0

# (slope, offset) of the lines from code 0 to 1, from 1 to 2, and for fourth powers from 2 to 3 and from 3 to 4.
_LINES: dict[Kind, list[tuple[float, float]]] = {
    "root": [],
    "unit": [(1, 0), (1 / 3, 2 / 3)],
    "plain": [(1, 0), (1 / 15, 14 / 15), (1 / 48, 5 / 3), (1 / 192, 8 / 3)],
}

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
    per_unit = 1 / unit_of(codes)  # exact
    per_unit = torch.where(_spread(absmax, s, block).isnan(), torch.nan, per_unit)  # NaN in every moment
    first = [quantize_quadratic(m * per_unit, "unit", block, dither(k, step)) for k, m in enumerate(moments[:-1])]
    return [*first, (codes, absmax)]


def decode_moments(
    codes: Sequence[Tensor], absmax: Sequence[Tensor], signed: Sequence[bool], block: int
) -> list[Tensor]:
    """The inverse of `encode_moments`, in float32."""
    first: Kind = "plain" if signed[-1] else "unit"
    kinds: list[Kind] = [first if s else "root" for s in signed]
    stored = [dequantize_quadratic(c, a, kind, block) for c, a, kind in zip(codes, absmax, kinds, strict=True)]
    if signed[-1]:
        return stored
    unit = unit_of(codes[-1])
    return [u * unit for u in stored[:-1]] + [stored[-1] * stored[-1]]


def quantize_quadratic(
    x: Tensor, kind: Kind, block: int, phase: tuple[int | Tensor, int] = (0, PER_VALUE[0])
) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shaped like `x`) and one absmax per block. `phase` is that of `dither`."""
    block = min(block, max(1, x.numel()))
    blocks = pad(x.flatten(), (0, -x.numel() % block)).view(-(-x.numel() // block), block)
    first, advance = phase
    noise = (((first + torch.arange(block, device=x.device) * advance) & 0xFFFF_FFFF) >> 20).int()  # below PARTS
    absmax = _keep_21_bits(blocks.abs().amax(dim=1))
    finite = absmax.isfinite()
    # Where absmax is zero, or too small to divide by, the largest number instead of the quotient: zeros stay zero.
    # (PyTorch would turn a number divided by a tensor into a product, which rounds twice.)
    inverse = (torch.full_like(absmax, TOP[kind]) / absmax).clamp(max=_LARGEST)[:, None]
    parts = _exact_code(torch.where(finite[:, None], blocks.abs() * inverse, 0.0), kind)
    codes = (parts.round().int() + noise) // PARTS
    if kind == "root":
        codes = torch.where(blocks > 0, codes.clamp(min=SMALLEST), codes)
    codes = torch.where(finite[:, None], torch.where(blocks < 0, -codes, codes), 0).to(torch.uint8)  # two's complement
    return codes.flatten()[: x.numel()].view(x.shape), torch.where(finite, absmax, torch.nan)


def dequantize_quadratic(codes: Tensor, absmax: Tensor, kind: Kind, block: int) -> Tensor:
    c = (codes if kind == "root" else codes.view(torch.int8)).float()
    value = twice(twice(c.abs()) if kind == "plain" else c.abs()).copysign(c)
    return value * _spread(absmax / TOP[kind], codes, block)


def twice(x: Tensor) -> Tensor:
    """x² at powers of two, and linear between 1, 1.5, 2, 3, 4, 6 …; 0 at 0. For numbers that are not negative."""
    return ((x.view(torch.int32) << 1) - _ONE).clamp(min=0).view(torch.float32)


def halve(x: Tensor) -> Tensor:
    """The inverse of `twice`."""
    return ((x.view(torch.int32) >> 1) + (_ONE >> 1)).view(torch.float32)


def _exact_code(z: Tensor, kind: Kind) -> Tensor:
    """The code of a magnitude in units of code 1, in parts and before rounding: linear between any two codes in use."""
    code = (halve(halve(z)) if kind == "plain" else halve(z)) * PARTS
    # Between the smallest codes the bits have corners of their own; the straight lines from code to code lie below.
    for slope, offset in _LINES[kind]:
        code = torch.minimum(code, z * (slope * PARTS) + offset * PARTS)
    return code


def _spread(scales: Tensor, like: Tensor, block: int) -> Tensor:
    """One scale per block to one per value."""
    return scales.repeat_interleave(min(block, max(1, like.numel())))[: like.numel()].view(like.shape)


def unit_of(codes: Tensor) -> Tensor:
    """The largest power of two in the value of a root's code; for code 0 that of the smallest other code."""
    return (twice(codes.float().clamp(min=SMALLEST)).view(torch.int32) & 0x7F80_0000).view(torch.float32)


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
