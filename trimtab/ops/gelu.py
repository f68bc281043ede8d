"""GELU in its tanh form, forward and backward: the activation of GPT-2 and of all MLPs in trimtab.nn.

    y = x/2 * (1 + tanh(z/2)) = x * s        s = sigmoid(z)        z = sqrt(8/pi) * (x + 0.044715 x^3)
    dy/dx = s * (1 + x z' (1 - s))

The logistic form needs one exponential and has no cancellation where x is negative: 1 + tanh(z/2) has no correct digit
at x = -6. PyTorch's GELU takes 18 % of a small GPT's step on a CPU (docs/log.md). Backward needs x only.

At -Inf the value and its slope are 0, their limits. The relative error of the kernels is below 1e-6 down to x = -10,
where s is below the normal numbers and counts as 0.

Hendrycks and Gimpel 2016. Kernels: gelu.cpp (CPU), gelu_triton.py (GPU).
"""
# mypy: disable-error-code="no-any-return, no-untyped-call, untyped-decorator"
# (torch.autograd.Function and torch.library are untyped)

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from trimtab.ops import backends
from trimtab.ops.checks import FLOATS

SLOPE = math.sqrt(8 / math.pi)
CUBIC = 0.044715 * SLOPE
FAR = 30.0  # beyond it s is 0 or 1 even in float64
GRAIN = 1 << 15  # with fewer values, one thread is faster


def gelu(x: Tensor) -> Tensor:
    """GELU of every value, in the dtype of `x` and contiguous. Differentiable repeatedly, also by torch.func."""
    if not x.is_floating_point():
        raise ValueError(f"gelu needs floating-point values, got {x.dtype}; use x.float()")
    if torch.compiler.is_compiling():
        return gelu_reference(x)  # the compiler fuses it with its neighbours
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return gelu_reference(x)  # torch.func and forward-mode derivatives take plain PyTorch
    return _Gelu.apply(x)


def gelu_reference(x: Tensor) -> Tensor:
    """The definition, in float32 at least. Every kernel is tested against it in float64."""
    wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    # -Inf * 0 would be NaN; so would Inf - Inf in z.
    return (wide.clamp(min=-FAR) * _logit(wide).sigmoid()).to(x.dtype)


def backward_reference(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` times the slope at `x`."""
    wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32)).clamp(-FAR, FAR)
    z = _logit(wide)
    slope = z.sigmoid() * (1 + wide * _logit_slope(wide) * (-z).sigmoid())
    return (grad * slope).to(x.dtype)


def _logit(x: Tensor) -> Tensor:
    x = x.clamp(-FAR, FAR)
    return x * (SLOPE + CUBIC * x.square())


def _logit_slope(x: Tensor) -> Tensor:
    return SLOPE + 3 * CUBIC * x.square()


def _second_slope(x: Tensor) -> Tensor:
    """The second derivative, in PyTorch operations, so that it can be differentiated again."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).clamp(-FAR, FAR)
    s, other, slope = _logit(x).sigmoid(), (-_logit(x)).sigmoid(), _logit_slope(x)
    return s * other * (2 * slope + x * slope.square() * (other - s) + 6 * CUBIC * x.square())


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _differentiable_backward(grad, *ctx.saved_tensors)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return _backward(grad, x)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor, Tensor]:
        grad, x = ctx.saved_tensors
        return _differentiable_backward(upper, x), (upper * grad * _second_slope(x)).to(x.dtype)


def _differentiable_backward(grad: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():  # create_graph=True enables it
        return _backward(grad, x)
    if torch._C._are_functorch_transforms_active():  # several gradients at once: is_grads_batched=True
        return backward_reference(grad, x)
    return _Backward.apply(grad, x)


# Not `custom_op` with its autograd: its wrappers take 60 us more per forward and backward than these classes, as long
# as the kernels take for 40,000 values.
_library = torch.library.Library("trimtab", "FRAGMENT")
_library.define("gelu(Tensor x) -> Tensor")
_library.define("gelu_backward(Tensor grad, Tensor x) -> Tensor")
_library.impl("gelu", gelu_reference, "CompositeExplicitAutograd")
_library.impl("gelu_backward", backward_reference, "CompositeExplicitAutograd")
_gelu, _backward = torch.ops.trimtab.gelu.default, torch.ops.trimtab.gelu_backward.default


@torch.library.register_fake("trimtab::gelu")
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("trimtab::gelu_backward")
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# --- Kernels. They take contiguous x and grad (None: forward) of one dtype.


def run_native(x: Tensor, grad: Tensor | None) -> Tensor:
    assert backends.native is not None
    out = backends.empty(x.shape, x.dtype)
    addresses = (x.data_ptr(), 0 if grad is None else grad.data_ptr(), out.data_ptr())
    threads = torch.get_num_threads() if x.numel() >= GRAIN else 1
    backends.native.gelu(*addresses, backends.DTYPE_CODES[x.dtype], x.numel(), threads)
    return out


def _register(device: str, kernel: Callable[[Tensor, Tensor | None], Tensor]) -> None:
    """The reference computes float64."""

    def forward(x: Tensor) -> Tensor:
        return kernel(x.contiguous(), None) if x.dtype in FLOATS else gelu_reference(x)

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        if x.dtype not in FLOATS:
            return backward_reference(grad, x)
        return kernel(x.contiguous(), grad.to(x.dtype).contiguous())

    _library.impl("gelu", forward, device)
    _library.impl("gelu_backward", backward, device)


if backends.native is not None:
    _register("CPU", run_native)

if backends.triton_missing is None:
    from trimtab.ops import gelu_triton

    _register(backends.triton_device.upper(), gelu_triton.run)
