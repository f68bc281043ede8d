"""GELU on the GPU: the Triton kernel of gelu.py, value by value.

The exponent of float32 values is computed in float64, because its last bit in float32 would affect the result. That of
half precision is float32, which is exact enough there; GPUs for games have few float64 units. The rest is float32, with
a polynomial for 2^-f in place of the hardware's approximate power of two.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (the parameters of a kernel are Triton's values; the functions that Python calls are typed)

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.ops.blockwise_triton import launch, narrow

TILE = 1024  # values per program: 8 per thread of 4 warps. Below 64 registers a multiprocessor holds 32 warps or more.
SLOPE, CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.07135481627260025)  # of gelu.py
LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(14.0)  # beyond it s is 0 or 1 in float32


def run(x: Tensor, grad: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), TILE),)
        launch(_gelu_kernel, grid, x, x if grad is None else grad, out, x.numel(), BACKWARD=grad is not None, TILE=TILE)
    return out


@triton.jit
def _gelu_kernel(x_ptr, grad_ptr, out_ptr, count, BACKWARD: tl.constexpr, TILE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offsets < count
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    # Comparisons are false for NaN, which passes. -Inf * 0 would be NaN.
    above = tl.where(x < -FAR, -FAR, x)
    x = tl.where(above > FAR, FAR, above)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    INTEGERS: tl.constexpr = 1.5 * 2**52 if EXACT else 1.5 * 2**23  # here neighbouring numbers are 1 apart
    wide = x.to(tl.float64 if EXACT else tl.float32)
    t = tl.abs(wide * (wide * wide * (CUBIC * LOG2E) + SLOPE * LOG2E))
    n = (t + INTEGERS) - INTEGERS
    f = (t - n).to(tl.float32)
    p = tl.full(f.shape, 1.5345812e-4, tl.float32)
    p = p * f - 1.3399931e-3
    p = p * f + 9.6184890e-3
    p = p * f - 5.5503288e-2
    p = p * f + 2.4022647e-1
    p = p * f - 6.9314721e-1
    p = p * f + 1.0
    # 2^-n by its exponent; s is below the normal numbers from n = 126 on. A NaN has no n, but its p is NaN.
    whole = tl.where(n < 126.0, n, 126.0).to(tl.int32)
    scale = ((127 - whole) << 23).to(tl.float32, bitcast=True)
    e = tl.where(n < 126.0, p * scale, p * 0.0)
    near = tl.div_rn(tl.full(e.shape, 1.0, tl.float32), 1.0 + e)
    far = e * near
    s = tl.where(x > 0, near, far)
    if BACKWARD:
        bend = x * x * (3 * CUBIC) + SLOPE
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = grad * (s * (1.0 + x * bend * tl.where(x > 0, far, near)))
    else:
        y = above * s
    tl.store(out_ptr + offsets, narrow(y, out_ptr.dtype.element_ty), mask=mask)
