"""Self-attention whose queries and keys can be tamed.

    q, k, v = split(x Wqkv)      q, k = turn(norm(q)), turn(norm(k))      z = q k^T * scale      softmax(z) v Wo

Attention logits z are the only feature that is quadratic in the size of the parameters; where they grow without
bound, training dies. With unit gains, normalised queries and keys keep |z| <= sqrt(head width).

The output always comes from PyTorch's fused kernel, which never holds the logits. Whoever listens to "logits" gets
them computed beside it, so listening cannot change a run. Squared-ReLU attention has no fused kernel and holds them.

Wortsman et al. 2023b, sections 2 and 3 (Small-scale proxies); "whole" is the KQ-norm of Wortsman et al. 2023a.
"""

# B batch, T time, D width, H heads, K head width

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.nn.config import TransformerConfig
from trimtab.nn.init import init_linear
from trimtab.nn.linear import build_linear
from trimtab.nn.tap import tap, wanted

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
        v = v_BTHK.transpose(-2, -3)
        if self.squared_relu:
            y_BHTK = self._squared_relu(tap(self.logits(q, k), "logits"), v)
        else:
            if wanted("logits"):
                with torch.no_grad():
                    tap(self.logits(q, k), "logits")
            y_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.out(y_BHTK.transpose(-2, -3).flatten(-2))

    def logits(self, q_BHTK: Tensor, k_BHTK: Tensor) -> Tensor:
        """Scaled products of queries and keys in float32, [B, H, T, T]; -inf where a key is in the future."""
        # float64 stays float64
        dtype = torch.promote_types(q_BHTK.dtype, torch.float32)
        with torch.autocast(q_BHTK.device.type, enabled=False):
            z_BHTT = q_BHTK.to(dtype) @ k_BHTK.to(dtype).transpose(-1, -2) * self.scale
        if self.causal:
            time = torch.arange(z_BHTT.shape[-1], device=z_BHTT.device)
            z_BHTT = z_BHTT.masked_fill(time > time[:, None], -torch.inf)
        return z_BHTT

    def _squared_relu(self, z_BHTT: Tensor, v_BHTK: Tensor) -> Tensor:
        """relu(z)^2 / sqrt(T) in place of softmax: the control that shows softmax is not to blame."""
        weights = z_BHTT.relu().square() / math.sqrt(max(z_BHTT.shape[-1], 1))
        return weights.to(v_BHTK.dtype) @ v_BHTK


def rotation_for(positions: Tensor, head_width: int) -> Rotation:
    """Cosines and sines for positions [T] or [B, T], in float32: a bfloat16 angle is wrong by whole turns."""
    pairs = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None, None] * ROPE_BASE ** (-pairs / head_width)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (i, i + K/2) by its position's angle. The size of x stays."""
    cos, sin = rotation
    # left * cos - right * sin and right * cos + left * sin at once: fewer passes over memory than half by half.
    return (x_BTHK * cos + x_BTHK.roll(x_BTHK.shape[-1] // 2, dims=-1) * sin).to(x_BTHK.dtype)


class HeadNorm(nn.Module):
    """LayerNorm over the head width, with gains of its own for each head."""

    def __init__(self, heads: int, head_width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        # A vector, because optimizers tell gains from matrices by their dimensions and must not decay these.
        self.weight = nn.Parameter(torch.ones(heads * head_width))

    def forward(self, x_BTHK: Tensor) -> Tensor:
        unit = F.layer_norm(x_BTHK, x_BTHK.shape[-1:], eps=self.eps)
        return unit * self.weight.view(x_BTHK.shape[-2:])


class WholeNorm(nn.LayerNorm):
    """LayerNorm over all heads together."""

    def forward(self, x_BTHK: Tensor) -> Tensor:
        return super().forward(x_BTHK.flatten(-2)).unflatten(-1, x_BTHK.shape[-2:])


class Kappa(nn.Module):
    """Give every vector the size sqrt(kappa * head width): logits of about kappa, transplanted into any model."""

    def __init__(self, kappa: float) -> None:
        super().__init__()
        self.kappa = kappa

    def forward(self, x_BTHK: Tensor) -> Tensor:
        # eps: the size of a zero vector cannot be changed
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
