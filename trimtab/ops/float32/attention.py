"""Softmax attention on a CPU, forward and backward.

    z = scale * q k^T (-inf where masked)      p = softmax(z)      y = p v
    dv = p^T g      dz = p * (g v^T - sum(p * g v^T))      dq = scale * dz k      dk = scale * dz^T q

The logits are never stored: backward computes them again from q, k and the logarithm of each query's sum. Tensors are
[batch, time, heads, head width], as the linear layers around attention have them, with any strides: nothing is copied
in between. PyTorch's kernel is made of small products of MKL's and takes a quarter of a small GPT's step on a CPU, this
one less than a tenth (docs/log.md). It serves float32; everything else is PyTorch's.

Dao et al. 2022. Kernel: attention.cpp (CPU).
"""
# mypy: disable-error-code="no-any-return, no-untyped-call"
# (torch.autograd.Function is untyped)

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from trimtab.ops import backends

# B batch, T time, H heads, K head width


def attention(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention of queries to keys, [B, T, H, K]."""
    if not _is_served(q_BTHK, k_BTHK, v_BTHK):
        q, k, v = (x.transpose(-2, -3) for x in (q_BTHK, k_BTHK, v_BTHK))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(-2, -3)
    return _Attention.apply(q_BTHK, k_BTHK, v_BTHK, causal, scale)


def attention_packed(qkv_BT3HK: Tensor, *, causal: bool, scale: float) -> Tensor:
    """The same for queries, keys and values in one tensor, whose gradient is then one tensor too."""
    if not _is_served(qkv_BT3HK[:, :, 0] if qkv_BT3HK.dim() == 5 else qkv_BT3HK):
        return attention(*qkv_BT3HK.unbind(-3), causal=causal, scale=scale)
    return _Packed.apply(qkv_BT3HK, causal, scale)


def attention_reference(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, *, causal: bool, scale: float) -> Tensor:
    """The definition, differentiable repeatedly. The kernel is tested against it in float64."""
    q, k, v = (x.transpose(-2, -3) for x in (q_BTHK, k_BTHK, v_BTHK))
    z = q @ k.transpose(-1, -2) * scale
    if causal:
        time = torch.arange(z.shape[-1], device=z.device)
        z = z.masked_fill(time > time[:, None], -torch.inf)
    return (z.softmax(-1) @ v).transpose(-2, -3)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        y, logsum = _forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, logsum)
        ctx.causal, ctx.scale = causal, scale
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *qkv, logsum = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            y = attention_reference(*qkv, causal=ctx.causal, scale=ctx.scale)
            return *torch.autograd.grad(y, qkv, g, create_graph=True), None, None
        grads = [torch.empty(q.shape, dtype=q.dtype) for q in qkv]
        _backward(qkv, g, grads, logsum, ctx.causal, ctx.scale)
        return *grads, None, None


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, causal: bool, scale: float) -> Tensor:
        qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
        q, k, v = qkv.unbind(-3)
        y, logsum = _forward(q, k, v, causal, scale)
        ctx.save_for_backward(qkv, logsum)
        ctx.causal, ctx.scale = causal, scale
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        qkv, logsum = ctx.saved_tensors
        if torch.is_grad_enabled():
            y = attention_reference(*qkv.unbind(-3), causal=ctx.causal, scale=ctx.scale)
            return *torch.autograd.grad(y, qkv, g, create_graph=True), None, None
        grad = torch.empty(qkv.shape, dtype=qkv.dtype)
        _backward(list(qkv.unbind(-3)), g, list(grad.unbind(-3)), logsum, ctx.causal, ctx.scale)
        return grad, None, None


def _is_served(*tensors: Tensor) -> bool:
    first = tensors[0]
    return (
        not torch.compiler.is_compiling()
        and backends.native is not None
        and backends.native.level() != "baseline"
        and all(type(x) is Tensor and x.shape == first.shape and x.dtype == torch.float32 for x in tensors)
        and first.device.type == "cpu"
        and first.dim() == 4
        and first.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


# --- Kernel


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    assert backends.native is not None
    batch, time, heads, _ = q.shape
    y, logsum = torch.empty(q.shape, dtype=q.dtype), torch.empty(batch, heads, time)
    tensors = [_place(x) for x in (q, k, v, y)]
    backends.native.attend(tensors, logsum.data_ptr(), *q.shape, scale, causal, torch.get_num_threads())
    return y, logsum


def _backward(qkv: list[Tensor], g: Tensor, grads: list[Tensor], logsum: Tensor, causal: bool, scale: float) -> None:
    assert backends.native is not None
    g = g if g.stride(-1) == 1 else g.contiguous()
    tensors = [*(_place(x) for x in qkv), [], _place(g), *(_place(x) for x in grads)]
    backends.native.attend(tensors, logsum.data_ptr(), *g.shape, scale, causal, torch.get_num_threads())


def _place(x: Tensor) -> list[int]:
    return [x.data_ptr(), *x.stride()[:3]]
