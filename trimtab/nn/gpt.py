"""GPT: a decoder-only language model. Every intervention of the paper is one field of the config.

    x = embedding[tokens] (+ positions)      x = blocks(x)      logits = norm(x) @ head

By default: pre-norm, no biases, rotary positions, untied head, no dropout. With biases, learned positions and a tied
head it is GPT-2.

muParam keeps the best learning rate constant when the width changes. The optimizer needs one number for it:

    model = GPT(GPTConfig(vocab=256, depth=4, width=1024, heads=16, mup="simple"))
    groups = trimtab.optim.groups(model, lr=1e-2, mup_ratio=model.mup_ratio)
    optimizer = trimtab.optim.AdamW(groups, lr=1e-2)

Wortsman et al. 2023b (Small-scale proxies), section 2 for the model, 3.2 and appendix for the switches.
"""

# B batch, T time, D width, V vocabulary

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.nn.config import BlockConfig, ConfigError, TransformerConfig, check_at_least, check_rope
from trimtab.nn.embedding import StableEmbedding
from trimtab.nn.linear import init_linear
from trimtab.nn.loss import Loss, check_indices, cross_entropy, linear_cross_entropy
from trimtab.nn.tap import has_listener, tap
from trimtab.nn.transformer import Transformer

# The sizes of the paper (2.4M and larger, head width 64), and smaller ones for a laptop (head width 16). The names are
# `count_params()`: 12 * depth * width^2.
GPT_SIZES: dict[str, dict[str, int]] = {
    "6K": {"depth": 2, "width": 16, "heads": 1},
    "25K": {"depth": 2, "width": 32, "heads": 2},
    "147K": {"depth": 3, "width": 64, "heads": 4},
    "786K": {"depth": 4, "width": 128, "heads": 8},
    "2.4M": {"depth": 3, "width": 256, "heads": 4},
    "9.4M": {"depth": 3, "width": 512, "heads": 8},
    "19M": {"depth": 6, "width": 512, "heads": 8},
    "42M": {"depth": 6, "width": 768, "heads": 12},
    "85M": {"depth": 12, "width": 768, "heads": 12},
    "151M": {"depth": 12, "width": 1024, "heads": 16},
    "302M": {"depth": 24, "width": 1024, "heads": 16},
    "1.2B": {"depth": 24, "width": 2048, "heads": 32},
    "4.8B": {"depth": 24, "width": 4096, "heads": 64},
}


@dataclass(frozen=True, kw_only=True)
class GPTConfig(BlockConfig):
    vocab: int
    context: int = 512  # largest sequence length
    positions: Literal["rope", "learned"] = "rope"
    embedding: Literal["plain", "stable", "norm", "xavier"] = "plain"  # stable: with norm and xavier
    tied: bool = False  # head and embedding share one matrix
    z_loss: float = 0.0  # 1e-4 prevents drift of the output logits
    mup: Literal["off", "simple", "intermediate", "full"] = "off"
    mup_base_width: int = 256  # the width at which muParam and the standard parametrisation are equal

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "vocab", "context", "mup_base_width")
        if self.z_loss < 0:
            raise ConfigError(f"z_loss={self.z_loss} would reward drifting logits; try z_loss={-self.z_loss}")
        if self.positions == "rope":
            check_rope(self)
        if self.tied and self.mup != "off":
            raise ConfigError(
                f"tied=True makes one matrix of embedding and head, and mup={self.mup!r} trains the two at different "
                "learning rates; try tied=False"
            )

    @property
    def transformer(self) -> TransformerConfig:
        """The config of the blocks. Full muParam also changes the attention scale and the initialisation."""
        full = {"attention_scale": "linear", "zero_queries": True} if self.mup == "full" else {}
        return self.transformer_config(causal=True, rope=self.positions == "rope", **full)


class GPT(nn.Module):
    """Logits of the next tokens or, with targets, the loss. Taps: "logits", "logz" (with targets), and the blocks'."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        xavier, norm = config.embedding in ("stable", "xavier"), config.embedding in ("stable", "norm")
        self.embedding = (
            nn.Embedding(config.vocab, config.width)
            if config.embedding == "plain"
            else StableEmbedding(config.vocab, config.width, xavier=xavier, norm=norm)
        )
        if not xavier:
            nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        self.positions = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.transformer = Transformer(config.transformer)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=config.width**-0.5)
        if self.head is not None:
            narrow = config.mup in ("intermediate", "full")
            init_linear(self.head, std=math.sqrt(config.mup_base_width) / config.width if narrow else None)

    @property
    def mup_ratio(self) -> float:
        """Factor of the learning rate of linear layers in `trimtab.optim.groups`: base fan in / fan in."""
        return 1.0 if self.config.mup == "off" else self.config.mup_base_width / self.config.width

    def count_params(self) -> int:
        """The number of weights in the matrices of the blocks: 12 * depth * width^2 if `mlp_ratio` is 4.

        Without embedding and head, as in scaling laws, and without gains and biases (about 0.1 %).
        """
        return sum(p.numel() for p in self.transformer.parameters() if p.dim() == 2)

    def loss(self, tokens: Tensor, targets: Tensor) -> Loss:
        """The loss for targets [B, T]; `IGNORE` (-100) marks tokens without a target.

        Equal to `model(tokens, targets)`, which also works through wrappers such as DDP and torch.compile.
        """
        loss: Loss = self(tokens, targets)
        return loss

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor | Loss:
        check_tokens(tokens, self.config)
        x_BTD = self.embedding(tokens)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[: tokens.shape[-1]]
        x_BTD = self.norm(self.transformer(x_BTD))
        if targets is None:
            return tap(self._logits(x_BTD), "logits")
        weight = self._head_weight()
        if weight is None:
            return cross_entropy(tap(self._logits(x_BTD), "logits"), targets, z_loss=self.config.z_loss)
        if has_listener("logits"):
            with torch.no_grad():
                tap(self._logits(x_BTD), "logits")
        return linear_cross_entropy(x_BTD, weight, targets, z_loss=self.config.z_loss)

    def _logits(self, x_BTD: Tensor) -> Tensor:
        y_BTV: Tensor = F.linear(x_BTD, self.embedding.weight) if self.head is None else self.head(x_BTD)
        return y_BTV.to(torch.promote_types(y_BTV.dtype, torch.float32))

    def _head_weight(self) -> Tensor | None:
        """The matrix of the output layer; None if the head was replaced by another kind of layer."""
        if self.head is None:
            return self.embedding.weight
        return self.head.weight if type(self.head) is nn.Linear and self.head.bias is None else None


def check_tokens(tokens: Tensor, config: GPTConfig) -> None:
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [batch, time], got shape {tuple(tokens.shape)}; try tokens[None] for one row")
    if tokens.shape[1] > config.context:
        raise ValueError(
            f"a sequence of {tokens.shape[1]} tokens is longer than context={config.context}; "
            f"cut it, or build the model with context={tokens.shape[1]}"
        )
    check_indices("tokens", tokens, config.vocab)
