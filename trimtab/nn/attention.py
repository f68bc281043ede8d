"""Self-attention with optional normalisation of queries and keys (qk-norm).

    q, k, v = split(x Wqkv)      q, k = rotate(norm(q)), rotate(norm(k))      z = q k^T * scale      softmax(z) v Wo

The attention logits z are quadratic in the size of the parameters; if they grow without bound, training diverges. With
unit gains, normalised queries and keys keep |z| <= sqrt(head width).

The output always comes from a fused kernel (ops/float32/attention.py or PyTorch's), which does not store the logits.
For listeners of the tap "logits" they are computed separately, so listening cannot change a run. Squared-ReLU attention
has no fused kernel: it stores them.

Wortsman et al. 2023b, sections 2 and 3 (Small-scale proxies); "whole" is the KQ-norm of Wortsman et al. 2023a.
"""

# B batch, T time, D width, H heads, K head width

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.nn.config import TransformerConfig
from trimtab.nn.linear import build_linear, init_linear
from trimtab.nn.tap import has_listener, tap
from trimtab.ops.float32.attention import attention, attention_packed

ROPE_BASE = 10_000.0

Rotation = tuple[Tensor, Tensor]  # cosine and sine for each position and feature, [T, 1, K] or [B, T, 1, K]


class Attention(nn.Module):
    """Multi-head attention. Taps: "q" and "k" as [B, H, T, K], after norm and rotation; "logits" as [B, H, T, T]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        self.causal = config.causal
        self.squared_relu = config.attention == "squared-relu"
        self.scale = 1 / self.head_width if config.attention_scale == "linear" else 1 / math.sqrt(self.head_width)
        self.qkv = build_linear(config.width, 3 * config.width, bias=config.bias, kind=config.linear)
        self.out = build_linear(config.width, config.width, bias=config.bias, kind=config.linear)
        self.q_norm, self.k_norm = _query_key_norm(config), _query_key_norm(config)
        init_linear(self.qkv)
        init_linear(self.out)
        if config.zero_queries:
            with torch.no_grad():
                self.qkv.weight[: config.width].zero_()

    def forward(self, x_BTD: Tensor, rotation: Rotation | None = None) -> Tensor:
        qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, self.head_width))
        q_BTHK, k_BTHK, v_BTHK = qkv.unbind(-3)
        q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)
        if rotation is not None:
            q_BTHK, k_BTHK = rotate(q_BTHK, rotation), rotate(k_BTHK, rotation)
        q = tap(q_BTHK.transpose(-2, -3), "q")
        k = tap(k_BTHK.transpose(-2, -3), "k")
        if self.squared_relu:
            # relu(z)^2 / sqrt(T) in place of softmax: the control experiment that rules out softmax as the cause.
            z_BHTT, v = tap(self.logits(q, k), "logits"), v_BTHK.transpose(-2, -3)
            y_BHTK = (z_BHTT.relu().square() / math.sqrt(max(z_BHTT.shape[-1], 1))).to(v.dtype) @ v
            y_BTHK = y_BHTK.transpose(-2, -3)
        else:
            if has_listener("logits"):
                with torch.no_grad():
                    tap(self.logits(q, k), "logits")
            if rotation is None and isinstance(self.q_norm, nn.Identity):  # q, k and v are still one tensor
                y_BTHK = attention_packed(qkv, causal=self.causal, scale=self.scale)
            else:
                y_BTHK = attention(q_BTHK, k_BTHK, v_BTHK, causal=self.causal, scale=self.scale)
        out: Tensor = self.out(y_BTHK.flatten(-2))
        return out

    def logits(self, q_BHTK: Tensor, k_BHTK: Tensor) -> Tensor:
        """Scaled products of queries and keys in float32, [B, H, T, T]; -inf where a key is in the future."""
        dtype = torch.promote_types(q_BHTK.dtype, torch.float32)
        with torch.autocast(q_BHTK.device.type, enabled=False):
            z_BHTT = q_BHTK.to(dtype) @ k_BHTK.to(dtype).transpose(-1, -2) * self.scale
        if self.causal:
            time = torch.arange(z_BHTT.shape[-1], device=z_BHTT.device)
            z_BHTT = z_BHTT.masked_fill(time > time[:, None], -torch.inf)
        return z_BHTT


def rotation_for(positions: Tensor, head_width: int) -> Rotation:
    """Cosines and sines for positions [T] or [B, T], in float32: bfloat16 angles would be wrong by full turns."""
    pairs = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None, None] * ROPE_BASE ** (-pairs / head_width)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (i, i + K/2) by the angle of its position. The norm of x does not change."""
    cos, sin = rotation
    # Both halves at once (left cos - right sin, right cos + left sin): fewer passes over memory.
    return (x_BTHK * cos + x_BTHK.roll(x_BTHK.shape[-1] // 2, dims=-1) * sin).to(x_BTHK.dtype)


class HeadNorm(nn.Module):
    """LayerNorm over the head width, with separate gains for each head."""

    def __init__(self, heads: int, head_width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        # A vector: optimizers exclude gains from weight decay by their number of dimensions.
        self.weight = nn.Parameter(torch.ones(heads * head_width))

    def forward(self, x_BTHK: Tensor) -> Tensor:
        unit = F.layer_norm(x_BTHK, x_BTHK.shape[-1:], eps=self.eps)
        return unit * self.weight.view(x_BTHK.shape[-2:])


class WholeNorm(nn.LayerNorm):
    """LayerNorm over all heads together."""

    def forward(self, x_BTHK: Tensor) -> Tensor:
        return super().forward(x_BTHK.flatten(-2)).reshape(x_BTHK.shape)


class Kappa(nn.Module):
    """Scale every vector to the norm sqrt(kappa * head width), which gives logits of about kappa in any model."""

    def __init__(self, kappa: float) -> None:
        super().__init__()
        self.kappa = kappa

    def forward(self, x_BTHK: Tensor) -> Tensor:
        # eps only matters for zero vectors, which stay zero.
        return F.rms_norm(x_BTHK, x_BTHK.shape[-1:], eps=1e-12) * math.sqrt(self.kappa)


def _query_key_norm(config: TransformerConfig) -> nn.Module:
    if config.kappa is not None:
        return Kappa(config.kappa)
    if config.qk_norm == "shared":
        return nn.LayerNorm(config.head_width, eps=config.norm_eps, bias=False)
    if config.qk_norm == "per-head":
        return HeadNorm(config.heads, config.head_width, config.norm_eps)
    if config.qk_norm == "whole":
        return WholeNorm(config.width, eps=config.norm_eps, bias=config.bias)
    return nn.Identity()
