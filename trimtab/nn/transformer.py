"""The pre-norm Transformer of GPT and of both towers of CLIP.

    x = x + gain1 * attention(norm1(x))       x = x + gain2 * mlp(norm2(x))

No dropout. The gains (layer-scale) exist only if the config has `layer_scale`; with 0 every block is the identity at
first.

Wortsman et al. 2023b, section 2 (Small-scale proxies); layer-scale from zero: Wortsman et al. 2023a, section 2.
"""

# B batch, T time, D width

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.nn.attention import Attention, Rotation, rotation_for
from trimtab.nn.config import TransformerConfig
from trimtab.nn.linear import build_linear, forget_codes, init_linear
from trimtab.nn.tap import tap
from trimtab.ops.gelu import gelu


class MLP(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        inner = config.mlp_ratio * config.width
        self.up = build_linear(config.width, inner, bias=config.bias, kind=config.linear)
        self.down = build_linear(inner, config.width, bias=config.bias, kind=config.linear)
        init_linear(self.up)
        init_linear(self.down)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(gelu(self.up(x_BTD)))
        return out


class Block(nn.Module):
    """Attention, then MLP, each on a residual branch. Tap: "out", the output of the block."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
        self.mlp = MLP(config)
        self.scale1, self.scale2 = _gain(config), _gain(config)

    def forward(self, x_BTD: Tensor, rotation: Rotation | None = None) -> Tensor:
        branch = self.attention(self.norm1(x_BTD), rotation)
        x_BTD = x_BTD + (branch if self.scale1 is None else self.scale1 * branch)
        branch = self.mlp(self.norm2(x_BTD))
        x_BTD = x_BTD + (branch if self.scale2 is None else self.scale2 * branch)
        return tap(x_BTD, "out")


class Transformer(nn.Module):
    """A stack of blocks, [B, T, D] to [B, T, D], without a final norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))

    def forward(self, x_BTD: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """`positions` [T] or [B, T] of rotary embeddings; 0, 1, 2 ... by default."""
        rotation: Rotation | None = None
        if self.config.rope:
            if positions is None:
                positions = torch.arange(x_BTD.shape[-2], device=x_BTD.device)
            rotation = rotation_for(positions, self.config.head_width)
        for block in self.blocks:
            if self.config.checkpointing and torch.is_grad_enabled():
                x_BTD = checkpoint(_without_codes, block, x_BTD, rotation, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, rotation)
        return x_BTD


def _without_codes(block: nn.Module, x_BTD: Tensor, rotation: Rotation | None) -> Tensor:
    """Run a block that is recomputed later, and do not keep the int8 codes of its weights until then."""
    try:
        y_BTD: Tensor = block(x_BTD, rotation)
    finally:  # a recomputation ends with an exception
        if not torch.compiler.is_compiling():
            forget_codes(block)
    return y_BTD


def _gain(config: TransformerConfig) -> nn.Parameter | None:
    return None if config.layer_scale is None else nn.Parameter(torch.full((config.width,), float(config.layer_scale)))
