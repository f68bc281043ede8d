"""A decoder-only language model in which every intervention is one field of the config.

    x = embedding[tokens] (+ positions)      x = blocks(x)      logits = norm(x) @ head

Plain by default: pre-norm, no biases, rotary positions, a head of its own, no dropout. Biases, learned positions and
a tied head make it GPT-2.

muParam keeps the best learning rate in place when the width changes. Its part in the optimizer is one number:

    model = GPT(GPTConfig(vocab=256, depth=4, width=1024, heads=16, mup="simple"))
    groups = trimtab.optim.groups(model, lr=1e-2, mup_ratio=model.mup_ratio)
    optimizer = trimtab.optim.AdamW(groups, lr=1e-2)

Wortsman et al. 2023b (Small-scale proxies), section 2 for the model, 3.2 and appendix for the switches.
"""

# B batch, T time, D width, V vocabulary

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.nn.config import BlockConfig, ConfigError, TransformerConfig, check_at_least, check_rope
from trimtab.nn.embedding import StableEmbedding
from trimtab.nn.init import init_linear
from trimtab.nn.loss import Loss, check_indices, cross_entropy, linear_cross_entropy
from trimtab.nn.tap import tap, wanted
from trimtab.nn.transformer import Transformer

# The ladder of the paper, with heads of 64, and below it one for a laptop, with heads of 16. The name is what
# `count_params` returns: 12 * depth * width^2.
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
    context: int = 512  # longest sequence
    positions: Literal["rope", "learned"] = "rope"
    embedding: Literal["plain", "stable"] = "plain"
    tied: bool = False  # the head is the embedding
    z_loss: float = 0.0  # 1e-4 keeps the output logits from drifting
    mup: Literal["off", "simple", "intermediate", "full"] = "off"
    mup_base_width: int = 256  # where muParam and standard training are the same

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
                "rates; try tied=False"
            )

    @property
    def transformer(self) -> TransformerConfig:
        """The blocks' config. Full muParam is also an attention scale and an initialisation."""
        shared = {field.name: getattr(self, field.name) for field in fields(BlockConfig)}
        if self.mup == "full":
            shared |= {"attention_scale": "linear", "zero_queries": True}
        return TransformerConfig(**shared, causal=True, rope=self.positions == "rope")


class GPT(nn.Module):
    """Logits for each next token, or, given the targets, the loss.

    Taps: "logits", "logz" (only where there are targets), and those of the blocks.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _embedding(config)
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
        """What `trimtab.optim.groups` multiplies the learning rate of linear layers by: base fan in / fan in."""
        return 1.0 if self.config.mup == "off" else self.config.mup_base_width / self.config.width

    def count_params(self) -> int:
        """How many weights the blocks' matrices have: 12 * depth * width^2 where the MLP is four times as wide.

        Embedding and head are left out, as scaling laws do, and gains and biases, which are a thousandth.
        """
        return sum(p.numel() for p in self.transformer.parameters() if p.dim() == 2)

    def loss(self, tokens: Tensor, targets: Tensor) -> Loss:
        """Score the prediction of targets [B, T]; `IGNORE` (-100) marks tokens without one.

        The same as `model(tokens, targets)`, which is what wrappers like DDP and torch.compile know.
        """
        loss: Loss = self(tokens, targets)
        return loss

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor | Loss:
        x_BTD = self._features(tokens)
        if targets is None:
            return tap(self._logits(x_BTD), "logits")
        weight = self._head_weight()
        if weight is None:
            return cross_entropy(tap(self._logits(x_BTD), "logits"), targets, z_loss=self.config.z_loss)
        if wanted("logits"):
            with torch.no_grad():
                tap(self._logits(x_BTD), "logits")
        return linear_cross_entropy(x_BTD, weight, targets, z_loss=self.config.z_loss)

    def _features(self, tokens: Tensor) -> Tensor:
        check_tokens(tokens, self.config)
        x_BTD = self.embedding(tokens)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[: tokens.shape[-1]]
        x_BTD = self.norm(self.transformer(x_BTD))
        return x_BTD

    def _logits(self, x_BTD: Tensor) -> Tensor:
        y_BTV = F.linear(x_BTD, self.embedding.weight) if self.head is None else self.head(x_BTD)
        return y_BTV.to(torch.promote_types(y_BTV.dtype, torch.float32))

    def _head_weight(self) -> Tensor | None:
        """The matrix that makes the logits, unless somebody put another kind of layer in place of the head."""
        if self.head is None:
            return self.embedding.weight
        return self.head.weight if type(self.head) is nn.Linear and self.head.bias is None else None


def check_tokens(tokens: Tensor, config: GPTConfig) -> None:
    if tokens.dim() != 2:
        raise ValueError(
            f"tokens must be [batch, time], got shape {tuple(tokens.shape)}; tokens[None] is a batch of one"
        )
    if tokens.shape[1] > config.context:
        raise ValueError(
            f"a sequence of {tokens.shape[1]} tokens is longer than context={config.context}; "
            f"cut it, or build the model with context={tokens.shape[1]}"
        )
    check_indices("tokens", tokens, config.vocab)


def _embedding(config: GPTConfig) -> nn.Embedding:
    if config.embedding == "stable":
        return StableEmbedding(config.vocab, config.width)
    embedding = nn.Embedding(config.vocab, config.width)
    nn.init.normal_(embedding.weight, std=config.width**-0.5)
    return embedding
