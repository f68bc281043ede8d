"""A bfloat16 parameter with eight more bits: together the upper 24 bits of a float32 weight.

    weight   sign, exponent and 15 bits of the fraction      |weight| = (|param| << 8) + extra, as integers
    param    bfloat16, the nearest one: what the model uses
    extra    int8, from -128 to 127

float32 is rounded to 24 bits with a dither: the lower byte plus 0 to 255, then cut. Rounded to nearest instead, updates
below half a spacing would be lost (docs/log.md). The dither of a value runs through a low-discrepancy sequence over the
steps, so errors cancel and do not grow as those of random rounding do. A weight that does not move is not changed.

A parameter that was assigned from outside keeps its old extra bits: the weight is then within half a spacing of it.

Kernel: fused.cpp (CPU); on GPUs these functions, chunk by chunk.
"""

import torch
from torch import Tensor

KEPT = {"kahan": "compensation", "split": "extra_bits"}  # what a way of rounding keeps of each value, by its key
PER_STEP, PER_VALUE = 0x9E37_79B9, 0xC13F_A9A9  # of the dither's phase, in 2^-32ths


def join(param: Tensor, extra: Tensor) -> Tensor:
    """The weight in float32."""
    bits = param.view(torch.int16).int()
    # Not below zero: a zero that was assigned from outside, with a negative rest.
    magnitude = (((bits & 0x7FFF) << 8) + extra).clamp(min=0)
    return ((magnitude << 8) | ((bits & 0x8000) << 16)).view(torch.float32)


def split(weight: Tensor, *, step: int | Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Parameter and extra bits of a float32 weight. `start` is the index of its first value in the whole tensor."""
    places = torch.arange(start, start + weight.numel(), device=weight.device).view(weight.shape)
    noise = (((step * PER_STEP + places * PER_VALUE) & 0xFFFF_FFFF) >> 24).int()
    kept = ((weight.view(torch.int32) + noise) >> 8) & 0xFF_FFFF
    nearest = (kept + 128) >> 8
    param = torch.where(weight.isnan(), 0x7FC0, nearest).to(torch.int16).view(torch.bfloat16)
    return param, torch.where(weight.isnan(), 0, kept - (nearest << 8)).to(torch.int8)
