"""The quadratic code for optimizer state: one byte per value, and first moments kept in units of √v.

    root     s = √v         c = floor(255 √(s / absmax) + d)               0 … 255        s = c² absmax / 255²
    unit     u = m / √v     c = floor(127 u / absmax + d)               -127 … 127        u = c absmax / 127
    plain    m              c = floor(± 127 √(|m| / absmax) + d)        -127 … 127        m = c |c| absmax / 127²

Why not a table of the dynamic kind: Adam moves a parameter by m / √v. Kept apart, a small m beside large ones of its
block loses its digits, and its √v does not know. Kept as m / √v, every value of a block matters alike, whatever the
size of its gradient, so even steps are right for it; and an error of s cancels, because it stretches the m decoded with
it by the same factor. Squares give small values finer steps than large ones, as the dynamic table does, but smoothly.
Decoding takes one or two multiplications, encoding one root or none. docs/log.md has the numbers.

The dither d, between 0 and 1, makes the rounding right on average. With β2 = 0.999 a step changes s by less than
half a code, and rounding to nearest would lose all of it: v would stand still, and an m without gradients would stop
decaying at the last code and push its parameter for ever. The noise is made of the digits of the number
and of a number that the step brings along, the same for every replica; what was decoded is still stored as the same
codes.

Rules without a second moment (SGD, Lion) keep m plain. A positive s is never stored as zero; u is 0 where s is. A block
with a NaN or an Inf gets the scale NaN, as in blockwise.py. Codes below zero are stored as a signed byte. The kernels
are in quadratic.h, step.cpp and step_triton.py; this is the definition.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Kind = Literal["root", "unit", "plain"]
LEVELS: dict[Kind, int] = {"root": 255, "unit": 127, "plain": 127}
PARTS = 4096  # of a code: as fine as the dither is
LARGEST_ROOT = 1.8446742e19  # of the largest float32
_LARGEST = torch.finfo(torch.float32).max


def kinds(signed: Sequence[bool]) -> list[Kind]:
    """How each moment of a rule is kept; the second moment, if there is one, comes last."""
    if all(signed):
        return ["plain"] * len(signed)
    return ["unit"] * (len(signed) - 1) + ["root"]  # type: ignore[return-value]


def encode_moments(
    moments: Sequence[Tensor], signed: Sequence[bool], block: int, seed: int | Tensor = 0
) -> list[tuple[Tensor, Tensor]]:
    """Codes and absmax of each float32 moment of one tensor. `seed` is another at every step."""
    if not signed[-1]:
        s = exact_root(moments[-1])
        s = torch.where(s == torch.inf, LARGEST_ROOT, s)  # g² overflowed, but the gradient was finite
        moments = [*(torch.where(s > 0, m / s, 0.0) for m in moments[:-1]), s]
    return [quantize_quadratic(x, kind, block, seed) for x, kind in zip(moments, kinds(signed), strict=True)]


def decode_moments(
    codes: Sequence[Tensor], absmax: Sequence[Tensor], signed: Sequence[bool], block: int
) -> list[Tensor]:
    """The way back, in float32."""
    stored = zip(codes, absmax, kinds(signed), strict=True)
    kept = [dequantize_quadratic(c, a, kind, block) for c, a, kind in stored]
    if signed[-1]:
        return kept
    return [u * kept[-1] for u in kept[:-1]] + [kept[-1] * kept[-1]]


def quantize_quadratic(x: Tensor, kind: Kind, block: int, seed: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shaped like `x`) and one absmax per block."""
    block = min(block, max(1, x.numel()))
    blocks, noise = (
        pad(y.flatten(), (0, -x.numel() % block)).view(-(-x.numel() // block), block) for y in (x, dither(x, seed))
    )
    absmax, levels = blocks.abs().amax(dim=1), LEVELS[kind]
    finite = absmax.isfinite()
    # Where there is nothing to divide by, or it is too small, the largest number: zeros stay zero.
    # (PyTorch would turn a number divided by a tensor into a product, which rounds twice.)
    top = torch.full_like(absmax, levels * PARTS if kind == "unit" else 1)
    inverse = (top / absmax).clamp(max=_LARGEST)[:, None]
    if kind == "unit":
        parts = blocks * inverse
    else:
        parts = (exact_root(blocks.abs() * inverse) * (levels * PARTS)).copysign(blocks)
    codes = (torch.where(finite[:, None], parts, 0.0).round().int() + noise) // PARTS
    if kind == "root":
        codes = torch.where((blocks > 0) & (codes == 0), 1, codes)
    codes = torch.where(finite[:, None], codes, 0).to(torch.uint8)  # two's complement
    return codes.flatten()[: x.numel()].view(x.shape), torch.where(finite, absmax, torch.nan)


def dither(x: Tensor, seed: int | Tensor) -> Tensor:
    """As good as random, in parts of a code: the digits of the number and the seed, mixed by a multiplication."""
    bits = (x.view(torch.int32) & 0x7FFFFF) ^ seed
    return ((bits.long() * 0x9E3779B1 & 0xFFFF_FFFF) >> 20).int()


def dequantize_quadratic(codes: Tensor, absmax: Tensor, kind: Kind, block: int) -> Tensor:
    c = (codes if kind == "root" else codes.view(torch.int8)).float()
    block = min(block, max(1, codes.numel()))
    unit = (absmax / LEVELS[kind] ** (1 if kind == "unit" else 2)).repeat_interleave(block)
    return (c if kind == "unit" else c * c.abs()) * unit[: codes.numel()].view(codes.shape)


def exact_root(x: Tensor) -> Tensor:
    # PyTorch may hand a float32 square root to a library that misses the last bit; rounding the float64 one does not.
    return x.double().sqrt().float()
