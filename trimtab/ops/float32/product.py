"""float32 matrix products on CPUs where PyTorch's own are slow, and a linear layer made of them.

    Y = X W^T + bias        dX = G W        dW = G^T X

PyTorch's float32 products are MKL's, and MKL uses AVX-512 only on Intel's CPUs: on others it runs at half of the
speed. There the first two are oneDNN's, which PyTorch contains too, and the third is product.cpp's (oneDNN would copy G
transposed). Which library computes a product depends on the CPU and the shape and on nothing else, so a run can be
repeated exactly. Everywhere else, and for other dtypes, the products are PyTorch's own.
"""
# mypy: disable-error-code="no-any-return, no-untyped-call"
# (torch.autograd.Function and torch.ops are untyped)

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from trimtab.ops import backends

SMALL = 1 << 20  # multiply-adds; the overhead of oneDNN's calls is not worth it for smaller products


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ w.T + bias` for x [..., in] and w [out, in], differentiable repeatedly: F.linear, by the fastest library."""
    if not _is_fast(x, w) or _needs_plain(x):
        return F.linear(x, w, bias)
    return _Linear.apply(x, w, bias)


def product_nt(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a @ b.T + bias` of matrices, without a gradient."""
    if not _is_fast(a, b):
        return F.linear(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def product_nn(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of matrices, without a gradient."""
    if not _is_fast(a, b.t()):
        return a @ b
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def product_tn(a: Tensor, b: Tensor) -> Tensor:
    """`a.T @ b` of matrices, without a gradient."""
    if not _is_fast(a.t(), b.t()):
        return a.t() @ b
    a, b = a.contiguous(), b.contiguous()
    out = backends.empty((a.shape[1], b.shape[1]), torch.float32)
    assert backends.native is not None
    addresses = a.data_ptr(), b.data_ptr(), out.data_ptr()
    backends.native.product(*addresses, *a.shape, b.shape[1], torch.get_num_threads())
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, w)
        # Not a view, like the result of F.linear: FSDP's hooks would be lost in an in-place operation.
        return torch.ops.aten._unsafe_view(product_nt(rows, w, bias), (*x.shape[:-1], w.shape[0]))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad
        flat = g.reshape(-1, g.shape[-1])
        if torch.is_grad_enabled():  # create_graph=True: PyTorch's own products have further derivatives
            dx, dw = (flat @ w if needs_x else None), (flat.t() @ rows if needs_w else None)
        else:
            dx, dw = (product_nn(flat, w) if needs_x else None), (product_tn(flat, rows) if needs_w else None)
        dx = None if dx is None else dx.view(*g.shape[:-1], w.shape[1])
        return dx, dw, flat.sum(0) if needs_bias else None


def _is_fast(a: Tensor, b: Tensor) -> bool:
    """Whether a @ b.T is for the fast libraries. Not for subclasses of Tensor: they have products of their own."""
    return (
        not torch.compiler.is_compiling()
        and backends.float_product()[0] == "onednn"
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and a.numel() * b.shape[0] >= SMALL
        and type(a) in (Tensor, Parameter)
        and type(b) in (Tensor, Parameter)
    )


def _needs_plain(x: Tensor) -> bool:
    """Autocast, torch.func and forward-mode derivatives take PyTorch's own operation."""
    return (
        torch.is_autocast_enabled(x.device.type)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
