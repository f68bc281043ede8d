"""float8: round to the values of E4M3 or E5M2, and compute in float32 (simulated), or multiply in float8.

    x --/absmax--> [-1, 1] --* largest--> float8 --/ largest * absmax--> the rounded x

E4M3 (largest 448) has more precision and suits activations and weights; E5M2 (largest 57344) has more range and
suits gradients. The rounding is PyTorch's own float8 conversion, nearest with ties to even. A tensor or row that
holds a NaN or an Inf becomes NaN; zeros stay zeros. No gradient flows through the rounding: a layer that uses it
defines its gradient itself.

The product of float8 codes is PyTorch's (`torch._scaled_mm`), on GPUs that have it (NVIDIA from sm_89 on). It is tried
once per device against the simulation and used only if it agrees. Sums are in float32.

Micikevicius et al. 2022; Wortsman et al. 2023, section 2.2.
"""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from trimtab.ops.checks import FLOATS, check_tensor

Format = Literal["e4m3", "e5m2"]
DTYPES: dict[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MULTIPLE = 16  # of the sizes of a weight that `torch._scaled_mm` takes


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


@torch.no_grad()
def cast_float8(x: Tensor, format: Format, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, and the float32 scales they are multiplied by: [rows, 1], or [1, 1] for the whole matrix."""
    dtype = _check(x, format)
    absmax = (
        x.abs().amax(dim=1, keepdim=True) if by_row else x.abs().amax().view(1, 1) if x.numel() else x.new_zeros(1, 1)
    )
    codes, factor, power = _cast(x, absmax.float(), dtype)
    return codes, torch.where(absmax.isfinite(), factor / power, torch.nan)


def float8_matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`a` [M, K] times the transpose of `b` [N, K], both float8. `a_scale` is [M, 1] or [1, 1], `b_scale` [1, 1].

    K and N must be multiples of MULTIPLE. With one scale per row PyTorch returns bfloat16 only; for other dtypes, rows
    are scaled here.
    """
    if len(a) == 0:
        return a_scale.new_empty(0, len(b), dtype=dtype)
    by_row = a_scale.numel() > 1
    if by_row and dtype == torch.bfloat16:
        columns = b_scale.expand(1, len(b)).contiguous()
        return torch._scaled_mm(a, b.t(), a_scale, columns, out_dtype=dtype)
    one = torch.ones_like(b_scale) if by_row else a_scale
    y = torch._scaled_mm(a, b.t(), one.view(()), b_scale.view(()), out_dtype=torch.float32)
    return (y * a_scale if by_row else y).to(dtype)


def has_product(device: torch.device) -> bool:
    """Whether this device multiplies float8 codes, and as the simulation does."""
    return why_simulated(device) is None


# torch.compile calls it while compiling, and takes the result as a constant.
has_product._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def why_simulated(device: torch.device) -> str | None:
    """Why float8 is simulated on this device, or None."""
    if device.type != "cuda":
        return "only GPUs have float8 products"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        return "float8 products need compute capability 8.9 (RTX 4090, H100) or later"
    return try_product(device)


def try_product(device: torch.device) -> str | None:
    """Multiply small matrices in all ways that the layers use; what is wrong, or None."""
    x = torch.linspace(-3, 3, 48 * 64, device=device).sin().view(48, 64)
    w = torch.linspace(-2, 2, 32 * 64, device=device).cos().view(32, 64)
    b, b_scale = cast_float8(w, "e4m3", by_row=False)
    for format in DTYPES:
        for dtype in FLOATS:
            for by_row in (True, False):
                a, a_scale = cast_float8(x, format, by_row=by_row)
                expected = (a.float() * a_scale) @ (b.float() * b_scale).t()
                try:
                    got = float8_matmul(a, b, a_scale, b_scale, dtype).float()
                except RuntimeError as error:
                    return f"torch._scaled_mm refuses {format} with results in {dtype}: {error}"
                if not (got - expected).abs().max() <= 0.02 * expected.abs().max():
                    return f"torch._scaled_mm gives wrong results for {format} in {dtype}"
    return None


def _round(x: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    codes, factor, power = _cast(x, absmax, dtype)
    return torch.where(absmax.isfinite(), codes.float() / power * factor, torch.nan).to(x.dtype)


def _cast(x: Tensor, absmax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, and the two numbers, the second one a power of two, whose quotient is their scale."""
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
    return (x.float() / factor * power).clamp(-largest, largest).to(dtype), factor, power
