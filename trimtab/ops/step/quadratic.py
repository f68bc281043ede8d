"""The 8-bit code of optimizer state: √v as a shortened float32, first moments in units of the stored √v.

    root     s = √v       s₈: a float32 without its last `shift` bits; the code is its place in a window of 256
    unit     u = m / w    code -127 … 127     m₈ = c w absmax / 127                               w: a power of two
    plain    m            code -127 … 127     m₈ = ± twice(twice(|c|)) absmax / twice(twice(127))   rules without v

Adam moves a parameter by m / √v. If both are stored separately, a small m next to large ones in its block loses its
digits. Divided by a unit w that follows its stored root, all values of a block have similar sizes, whatever the sizes
of their gradients. w is the largest power of two in the stored root, so that multiplying and dividing by it is exact,
but not below 2^-12 of the block's largest: for β1 > √β2, m / √v of an element without gradient grows, and with it the
scale of its block.
Rules without a second moment (SGD, Lion) store m itself, whose sizes differ as much as those of the gradients: fourth
powers span eight decades. So does the momentum of RMSprop, which is divided by √v before it is averaged.

Roots. The bits of a positive float32 are an integer that grows with the number, linearly between powers of two. Cut
off the last `shift` bits, and 2^(23 - shift) numbers remain per power of two. The code counts places in a window of 256
such numbers; absmax holds the end of the window, and in its last three bits the shift. Each block takes the smallest
shift from 13 to 18 whose window holds all its roots: neighbours differ by 0.1 % where the roots span a fifth of a power
of two, by 3 % where they span 8. If they span more, the window is wide: 160 codes with shift 18 for the five upper
powers of two, 96 codes with shift 20 for the 12 below; what is smaller is stored as its first number. So a block of
similar roots has small errors, and neither an outlier nor an element without gradient takes the digits of the others.

The unit follows the *stored* root, so m₈ has only the rounding error of its own code. With units of the exact root,
every rounding error of s₈ would multiply m, and an s₈ held at its smallest code would let m grow without bound.

Dither. Rounding to nearest loses every change smaller than half a code, which is most of them: with β2 = 0.999 a step
changes √v by 0.05 %. So c = floor(y + d), y the exact code, with a d in (0, 1) that differs at every step and value.
As the code is linear between neighbours, E[s₈] = s and E[m₈] = m: the averages follow their equations. d is a low-
discrepancy sequence, frac(step · a + place in the block · b): consecutive steps spread evenly over (0, 1), so their
rounding errors cancel faster than those of random numbers. Replicas, and shards of whole blocks, use the same d.

Encoding what was decoded gives the same values, also after a round trip of m and v through float32 with a relative
error of 1e-7: d stays away from 0 and 1, windows of all shifts contain the same numbers, and absmax of first moments is
kept to 21 bits.

`twice`, for fourth powers, doubles a float's exponent and mantissa, bits -> 2 bits - bits of 1, which interpolates c²
linearly between 1, 1.5, 2, 3, 4, 6, 8, 12 …; `halve` is its inverse. Two integer operations replace a square root and
give the same bits on every machine.

A positive second moment is never stored as zero. A block with a NaN or an Inf is stored as NaN, as in blockwise.py.
Negative codes are two's complement. This file is the definition; the kernels are in quadratic.h, fused.cpp and
fused_triton.py.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.ops.sharding import widen

Kind = Literal["unit", "plain"]
TOP: dict[Kind, float] = {"unit": 127.0, "plain": 260046848.0}  # value of the largest code
COARSEST, FINEST = 18, 13  # shifts
KNEE = 96  # the code of a wide window above which all numbers have a code, and below which every fourth has
LOWEST = (127 - 80) << 23  # the bits of 2^-80, the smallest root of a window: its square is zero in float32
LARGEST_ROOT = (127 + 63) << 23  # of 2^63: one code more does not overflow in the square
_LARGEST = torch.finfo(torch.float32).max
_ONE, _EXPONENT, _NAN = 0x3F80_0000, 0x7F80_0000, 0x7FC0_0000  # the bits of 1.0, of Inf and of NaN

# (slope, offset) of the lines from code 0 to 1, from 1 to 2, from 2 to 3 and from 3 to 4 of fourth powers.
_LINES = [(1, 0), (1 / 15, 14 / 15), (1 / 48, 5 / 3), (1 / 192, 8 / 3)]

# Dither advances by these 2^-32ths of a code per step and per value of a block: one pair for each moment of a rule,
# second moments last. Per step: the powers of 1 / 1.2207440846, which fill the unit cube evenly (Roberts 2018).
PER_STEP = (0xD1B54A33, 0xABC98389, 0x8CB92BA7)
PER_VALUE = (0x9E3779B1, 0xC13FA9A9, 0x91E10DA5)
SECOND = 2


def encode_moments(
    moments: Sequence[Tensor], kinds: str, block: int, *, step: int | Tensor = 0
) -> list[tuple[Tensor, Tensor]]:
    """Codes and absmax of each float32 moment of one tensor; a second moment comes last. `step` chooses the dither.

    `kinds` are the letters of trimtab/ops/native/table.py.
    """
    if kinds[-1] != "v":
        return [quantize_first(m, "plain", block, (k, step)) for k, m in enumerate(moments)]
    codes, absmax = quantize_root(exact_root(moments[-1]), block, step)
    per_unit = 1 / unit_of(codes, absmax, block)  # exact; NaN where the root is
    stored = []
    for k, (m, kind) in enumerate(zip(moments[:-1], kinds, strict=False)):
        u = m * per_unit if kind == "m" else torch.where(per_unit.isnan(), torch.nan, m)
        stored.append(quantize_first(u, _kind(kind), block, (k, step)))
    return [*stored, (codes, absmax)]


def decode_moments(codes: Sequence[Tensor], absmax: Sequence[Tensor], kinds: str, block: int) -> list[Tensor]:
    """The inverse of `encode_moments`, in float32."""
    if kinds[-1] != "v":
        return [dequantize_first(c, a, "plain", block) for c, a in zip(codes, absmax, strict=True)]
    root, unit = dequantize_root(codes[-1], absmax[-1], block), unit_of(codes[-1], absmax[-1], block)
    firsts = zip(codes[:-1], absmax[:-1], kinds, strict=False)
    return [*(dequantize_first(c, a, _kind(k), block, unit if k == "m" else 1.0) for c, a, k in firsts), root * root]


def start_quadratic(value: float, signed: bool) -> tuple[int, float]:
    """Code and absmax of a new moment that is `value` everywhere; only a second moment can start above zero."""
    if signed or not value:
        return 0, 0.0
    codes, absmax = encode_moments([torch.full((1,), value)], "v", 1)[0]
    return int(codes), float(absmax)


def quantize_root(root: Tensor, block: int, step: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shaped like `root`) and one absmax per block, the end of its window."""
    bits, size = _blocks(root.abs().view(torch.int32), block, 0), root.numel()
    most = bits.amax(dim=1, keepdim=True)
    least = _blocks(root.abs().view(torch.int32), block, _EXPONENT).amin(dim=1, keepdim=True)
    broken = most > _EXPONENT
    # An Inf is a g² that overflowed although the gradient was finite.
    bits, least, most = (x.clamp(max=LARGEST_ROOT) for x in (bits, least, most))
    shift = torch.full_like(most, COARSEST)
    for finer in range(COARSEST - 1, FINEST - 1, -1):
        shift = torch.where(_fits(least, most, finer), finer, shift)
    wide = ~_fits(least, most, COARSEST)
    low, knee = _low(_end(most, shift), shift), _knee(_end(most, COARSEST))
    noise = ((_phase(SECOND, step, bits) >> 23) * 2 + 1).int()
    place = torch.maximum(bits + (noise << (shift - 10)), low << shift) >> shift
    steps = COARSEST + 2 * (bits < knee).int()
    lowest = knee - (KNEE << (COARSEST + 2))
    far = (torch.maximum(bits + (noise << (steps - 10)), lowest) - knee) >> steps
    codes = torch.where(broken, 255, torch.where(wide, far + KNEE, place - low))
    choice = torch.where(wide, 0, COARSEST + 1 - shift)
    end = torch.where(broken, _NAN, (_end(most, shift) << shift) | choice)
    return codes.to(torch.uint8).flatten()[:size].view(root.shape), end.flatten().view(torch.float32)


def dequantize_root(codes: Tensor, absmax: Tensor, block: int) -> Tensor:
    end = absmax.view(torch.int32)
    wide = (end & 7) == 0
    shift = torch.where(wide, COARSEST, COARSEST + 1 - (end & 7))
    scales = wide, _low(end >> shift, shift), shift, _knee(end >> COARSEST)
    wide, low, shift, knee = (_spread(x, codes, block) for x in scales)
    y = codes.int() - KNEE
    far = knee + (y << (COARSEST + 2 * (y < 0).int()))
    return torch.where(wide, far, (codes.int() + low) << shift).view(torch.float32)


def quantize_first(
    x: Tensor, kind: Kind, block: int, dither: tuple[int, int | Tensor] = (0, 0)
) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shaped like `x`) and one absmax per block. `dither`: the number of the moment, and the step."""
    blocks = _blocks(x, block, 0)
    noise = ((_phase(*dither, blocks) >> 22).float() - 511.5) / 1024
    absmax = _keep_21_bits(blocks.abs().amax(dim=1, keepdim=True))
    finite = absmax.isfinite()
    # Where absmax is zero, or too small to divide by, the largest number instead of the quotient: zeros stay zero.
    top = torch.full_like(absmax, TOP[kind])  # a tensor: number / tensor is rounded twice in PyTorch
    z = torch.where(finite, blocks * (top / absmax).clamp(max=_LARGEST), 0.0)
    if kind == "plain":
        y = _fourth_root(z.abs()) + noise
        f = torch.where(z.signbit() & ~y.signbit(), -y, y)
    else:
        f = z + noise
    codes = f.round().to(torch.int8).view(torch.uint8)
    return codes.flatten()[: x.numel()].view(x.shape), torch.where(finite, absmax, torch.nan).flatten()


def dequantize_first(codes: Tensor, absmax: Tensor, kind: Kind, block: int, unit: Tensor | float = 1.0) -> Tensor:
    """Values in float32; `unit` is that of `unit_of`."""
    c = codes.view(torch.int8).float()
    value = twice(twice(c.abs())).copysign(c) if kind == "plain" else c
    return value * (_spread(absmax / TOP[kind], codes, block) * unit)


def twice(x: Tensor) -> Tensor:
    """x² at powers of two, and linear between 1, 1.5, 2, 3, 4, 6 …; 0 at 0. For numbers that are not negative."""
    return ((x.view(torch.int32) << 1) - _ONE).clamp(min=0).view(torch.float32)


def halve(x: Tensor) -> Tensor:
    """The inverse of `twice`."""
    return ((x.view(torch.int32) >> 1) + (_ONE >> 1)).view(torch.float32)


def unit_of(codes: Tensor, absmax: Tensor, block: int) -> Tensor:
    """The largest power of two in a stored root; in a wide window not below the knee / 2^7. NaN where the root is."""
    root, end = dequantize_root(codes, absmax, block), absmax.view(torch.int32)
    lowest = torch.where((end & 7) == 0, _knee(end >> COARSEST) - (7 << 23), 0)
    power = torch.maximum(root.view(torch.int32), _spread(lowest, codes, block)) & _EXPONENT
    return torch.where(root.isnan(), torch.nan, power.view(torch.float32))


def exact_root(x: Tensor) -> Tensor:
    # PyTorch's float32 square root may be off in the last bit on some machines; the rounded float64 one is not.
    return widen(x).sqrt().float()


def _kind(letter: str) -> Kind:
    """Of a moment beside a second one."""
    return "unit" if letter == "m" else "plain"


def _end(most: Tensor, shift: int | Tensor) -> Tensor:
    """The place of the first number that is not smaller."""
    return ((most - 1) >> shift) + 1


def _fits(least: Tensor, most: Tensor, shift: int) -> Tensor:
    return _end(most, shift) - (least >> shift) <= 255


def _low(end: Tensor, shift: Tensor) -> Tensor:
    """The first place of the window that ends at this one."""
    return torch.maximum(end - 255, torch.full_like(end, LOWEST) >> shift)


def _knee(end: Tensor) -> Tensor:
    """The bits of the number with code KNEE in a wide window: a multiple of those below."""
    return ((end - 252 + KNEE) & ~3).clamp(min=(LOWEST >> COARSEST) + 4 * KNEE) << COARSEST


def _fourth_root(z: Tensor) -> Tensor:
    """The exact code of a magnitude in units of code 1: linear between any two codes."""
    code = halve(halve(z))
    # Between the smallest codes the bits have corners of their own; the straight lines from code to code lie below.
    for slope, offset in _LINES:
        code = torch.minimum(code, z * slope + offset)
    return code


def _phase(moment: int, step: int | Tensor, blocks: Tensor) -> Tensor:
    """The dither of each place in a block, in 2^-32ths of a code."""
    places = torch.arange(blocks.shape[1], device=blocks.device)
    return (step * PER_STEP[moment] + places * PER_VALUE[moment]) & 0xFFFF_FFFF


def _blocks(x: Tensor, block: int, filler: int) -> Tensor:
    """One row per block."""
    block = min(block, max(1, x.numel()))
    return pad(x.flatten(), (0, -x.numel() % block), value=filler).view(-(-x.numel() // block), block)


def _spread(scales: Tensor, like: Tensor, block: int) -> Tensor:
    """One number per block to one per value."""
    return scales.repeat_interleave(min(block, max(1, like.numel())))[: like.numel()].view(like.shape)


def _keep_21_bits(x: Tensor) -> Tensor:
    """Round to nearest, to a float32 whose last three bits are zero. Inf and NaN stay what they are."""
    bits = (x.view(torch.int32).clamp(max=0x7FFF_FFF0) + 4) & ~7
    return torch.where(x.isfinite(), bits.clamp(max=0x7F7F_FFF8).view(torch.float32), x)
