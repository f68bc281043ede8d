"""Simulated float8: round to the values of E4M3 or E5M2, and compute in float32.

    x --/absmax--> [-1, 1] --* largest--> float8 --/ largest * absmax--> the rounded x

E4M3 (largest 448) has more precision and suits activations and weights; E5M2 (largest 57344) has more range and
suits gradients. The rounding is PyTorch's own float8 conversion, nearest with ties to even. A tensor or row that
holds a NaN or an Inf becomes NaN; zeros stay zeros. No gradient flows through the rounding: a layer that uses it
defines its gradient itself.

Micikevicius et al. 2022; Wortsman et al. 2023, section 2.2. There is only a reference.
"""

from typing import Literal

import torch
from torch import Tensor

from trimtab.ops.checks import FLOATS, check_tensor

Format = Literal["e4m3", "e5m2"]
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@torch.no_grad()
def round_float8_tensorwise(x: Tensor, format: Format) -> Tensor:
    """Round with one scale for the whole tensor; same shape and dtype as `x`."""
    dtype = _check(x, format)
    return _round(x, x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32), dtype)


@torch.no_grad()
def round_float8_rowwise(x: Tensor, format: Format) -> Tensor:
    """Round with one scale per row, a row being the last dimension; same shape and dtype as `x`."""
    dtype = _check(x, format)
    if x.dim() == 0:
        raise ValueError("x has no rows (shape ()); use round_float8_tensorwise")
    return _round(x, x.abs().amax(dim=-1, keepdim=True).float(), dtype) if x.numel() else x.clone()


def _check(x: Tensor, format: Format) -> torch.dtype:
    check_tensor("x", x, dtypes=FLOATS)
    if format not in DTYPES:
        raise ValueError(f"unknown float8 format {format!r}; choose e4m3 or e5m2")
    return DTYPES[format]


def _round(x: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    finite = absmax.isfinite()
    scale = torch.where(finite & (absmax > 0), absmax, 1.0)
    # Both formats end at 7/8 of a power of two. Dividing by it as 7/8 and as a power makes the division exact where the
    # scale is a power of two, so ties stay ties: x / scale * largest would move some. A large scale is divided by 7/4
    # instead, or it could overflow; a small one must not be, or it could underflow.
    small = scale < 1
    power = largest / torch.where(small, 0.875, 1.75)
    factor = scale / torch.where(small, 0.875, 1.75)
    # x / factor may round to just above the largest value; float8_e4m3fn has no Inf, and PyTorch would make it a NaN.
    unit = (x.float() / factor * power).clamp(-largest, largest)
    rounded = unit.to(dtype).float() / power * factor
    return torch.where(finite, rounded, torch.nan).to(x.dtype)
