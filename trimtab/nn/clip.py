"""CLIP: an image tower and a text tower, trained to give matching pairs similar features.

    images -> conv1 -> [class, patches] + positions -> drop patches -> ln_pre -> blocks -> class -> ln_post -> proj
    tokens -> token_embedding + positions -> causal blocks -> the end token -> ln_final -> proj

The option `linear` applies only to the linear layers inside the blocks: patch embedding, token embedding and the two
projections stay float (Wortsman et al. 2023). The projections are no nn.Linear, so `convert_linears` skips them.
`visual.conv1.weight` is the tensor whose RMS_t rises before the loss spikes in that paper.

Initialisation outside the blocks is as in open_clip. The blocks of both towers use the deviations of open_clip's text
tower, which decrease with the depth; open_clip's image tower uses PyTorch's defaults.
"""

# B batch, C channels, S image size, N patches (and the class token), T text length, D width, E width of the features

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize

from trimtab.nn.config import BlockConfig, ConfigError, TransformerConfig, check_at_least, check_splits
from trimtab.nn.contrastive import ContrastiveLoss, Gather, contrastive_loss
from trimtab.nn.linear import init_linear
from trimtab.nn.loss import check_indices
from trimtab.nn.transformer import Block, Transformer

MIN_LOGIT_SCALE, MAX_LOGIT_SCALE = 0.0, math.log(100)
FIRST_LOGIT_SCALE = math.log(1 / 0.07)


@dataclass(frozen=True, kw_only=True)
class CLIPConfig(BlockConfig):
    """`depth`, `width` and `heads` are of the image tower. All other block options apply to both towers."""

    text_depth: int
    text_width: int
    text_heads: int
    embed: int  # width of the features of both towers
    patch: int  # pixels per side
    image_size: int = 224  # pixels per side
    channels: int = 3
    vocab: int = 49408  # the last id is the end token
    context: int = 77  # largest caption length, including start and end token
    patch_dropout: float = 0.0  # share of the patches dropped in training; 0.5 in the paper
    bias: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "text_depth")
        check_at_least(self, 1, "text_width", "text_heads", "embed", "patch", "image_size", "channels")
        check_at_least(self, 2, "vocab", "context")
        check_splits(self, "text_width", "text_heads")
        check_splits(self, "image_size", "patch", "patches of ")
        if not 0 <= self.patch_dropout < 1:
            raise ConfigError(f"patch_dropout={self.patch_dropout} is not in [0, 1); try patch_dropout=0.5")

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch) ** 2

    @property
    def image_tower(self) -> TransformerConfig:
        return self.transformer_config(causal=False, rope=False)

    @property
    def text_tower(self) -> TransformerConfig:
        depth, width, heads = self.text_depth, self.text_width, self.text_heads
        return replace(self.image_tower, depth=depth, width=width, heads=heads, causal=True)


_B32 = CLIPConfig(depth=12, width=768, heads=12, patch=32, text_depth=12, text_width=512, text_heads=8, embed=512)
_L14 = replace(_B32, depth=24, width=1024, heads=16, patch=14, text_width=768, text_heads=12, embed=768)
_H14 = replace(_L14, depth=32, width=1280, text_depth=24, text_width=1024, text_heads=16, embed=1024)
_TINY = replace(_B32, depth=4, width=64, heads=4, patch=4, text_depth=2, text_width=64, text_heads=4, embed=64)

# The sizes of the paper, and a tiny byte-level one for a CPU. Change options with `dataclasses.replace(size, ...)`.
CLIP_SIZES = {
    "tiny": replace(_TINY, image_size=32, vocab=259, context=64),
    "ViT-B/32": _B32,
    "ViT-B/16": replace(_B32, patch=16),
    "ViT-L/14": _L14,
    "ViT-H/14": _H14,
}


class CLIPOutput(NamedTuple):
    """Features of unit length, [B, E] each, and the scale of their products: `contrastive_loss(*output)`."""

    image_features: Tensor
    text_features: Tensor
    scale: Tensor


class CLIP(nn.Module):
    """Both towers and the logit scale. Call `clamp_logit_scale()` after each optimizer step."""

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.config = config
        self.visual = ImageTower(config)
        self.text = TextTower(config)
        # Shape [1] and not []: FSDP2 shards along the first dimension.
        self.logit_scale = nn.Parameter(torch.full((1,), FIRST_LOGIT_SCALE))

    def forward(self, images: Tensor, tokens: Tensor) -> CLIPOutput:
        return CLIPOutput(self.encode_image(images), self.encode_text(tokens), self.logit_scale.exp())

    def encode_image(self, images: Tensor) -> Tensor:
        """Unit-length features [B, E] of float images [B, C, S, S]."""
        return _unit(self.visual(images))

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Unit-length features [B, E] of ids [B, T], T up to `context`. Ids after the end token have no effect."""
        return _unit(self.text(tokens))

    def loss(
        self, images: Tensor, tokens: Tensor, *, gather: Gather = "local", group: "dist.ProcessGroup | None" = None
    ) -> ContrastiveLoss:
        """The contrastive loss and both accuracies. Under DDP use `contrastive_loss(*ddp(images, tokens))`."""
        return contrastive_loss(*self(images, tokens), gather=gather, group=group)

    @torch.no_grad()
    def clamp_logit_scale(self) -> None:
        """Clamp the scale to [1, 100]; otherwise it grows without bound once the model fits its batches."""
        self.logit_scale.clamp_(MIN_LOGIT_SCALE, MAX_LOGIT_SCALE)


class ImageTower(nn.Module):
    """A ViT whose output is its class token, [B, C, S, S] to [B, E]."""

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.image_shape = (config.channels, config.image_size, config.image_size)
        self.patch_dropout = config.patch_dropout
        width, std = config.width, config.width**-0.5
        self.conv1 = nn.Conv2d(config.channels, width, kernel_size=config.patch, stride=config.patch, bias=False)
        self.class_embedding = _normal(width, std=std)
        self.positional_embedding = _normal(1 + config.patches, width, std=std)
        self.ln_pre = nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
        self.transformer = _build_blocks(config.image_tower)
        self.ln_post = nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
        self.proj = _normal(width, config.embed, std=std)

    def forward(self, images_BCSS: Tensor) -> Tensor:
        check_images(images_BCSS, self.image_shape, self.conv1.weight.dtype)
        x_BND = self.conv1(images_BCSS).flatten(2).transpose(1, 2)
        # `shape[0]`, here and below: torch.export takes `len` for a constant.
        first = self.class_embedding.to(x_BND.dtype).expand(x_BND.shape[0], 1, -1)
        x_BND = torch.cat([first, x_BND], dim=1) + self.positional_embedding
        if self.training and self.patch_dropout:
            x_BND = drop_patches(x_BND, self.patch_dropout)
        x_BND = self.transformer(self.ln_pre(x_BND))
        features: Tensor = self.ln_post(x_BND[:, 0]) @ self.proj
        return features


class TextTower(nn.Module):
    """A causal Transformer whose output is its end token, [B, T] to [B, E]."""

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.vocab, self.context = config.vocab, config.context
        width = config.text_width
        self.token_embedding = nn.Embedding(config.vocab, width)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        self.positional_embedding = _normal(config.context, width, std=0.01)
        self.transformer = _build_blocks(config.text_tower)
        self.ln_final = nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
        self.proj = _normal(width, config.embed, std=width**-0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        check_tokens(tokens_BT, self.vocab, self.context)
        x_BTD = self.token_embedding(tokens_BT) + self.positional_embedding[: tokens_BT.shape[1]]
        x_BTD = self.transformer(x_BTD)
        is_end = tokens_BT == self.vocab - 1
        x_BD = x_BTD[torch.arange(x_BTD.shape[0], device=x_BTD.device), is_end.int().argmax(dim=1)]
        # On a GPU the ids are not checked (it would synchronise): a caption without an end token gives NaN.
        x_BD = torch.where(is_end.any(dim=1, keepdim=True), x_BD, torch.nan)
        features: Tensor = self.ln_final(x_BD) @ self.proj
        return features


def drop_patches(x_BND: Tensor, share: float) -> Tensor:
    """Drop this share of the patches at random, separately for each image. Token 0 is always kept."""
    patches = x_BND.shape[1] - 1
    # + 1e-6: 10 * (1 - 0.9) is slightly below 1 in floats.
    keep = max(1, int(patches * (1 - share) + 1e-6))
    kept_BN = 1 + torch.rand(len(x_BND), patches, device=x_BND.device).topk(keep, dim=1).indices
    kept_BND = x_BND.gather(1, kept_BN[..., None].expand(-1, -1, x_BND.shape[2]))
    return torch.cat([x_BND[:, :1], kept_BND], dim=1)


def check_images(images: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if images.dim() != 4 or tuple(images.shape[1:]) != shape:
        raise ValueError(f"images must have shape (batch, {', '.join(map(str, shape))}), got {tuple(images.shape)}")
    if not images.is_floating_point():
        raise ValueError(f"images must be float, got {images.dtype}; convert and normalise: (x / 255 - mean) / std")
    if images.dtype != dtype and not torch.is_autocast_enabled(images.device.type):
        raise ValueError(f"images are {images.dtype} but the model is {dtype}; convert them: images.to({dtype})")


def check_tokens(tokens: Tensor, vocab: int, context: int) -> None:
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be ids (batch, length), got shape {tuple(tokens.shape)}")
    if not 0 < tokens.shape[1] <= context:
        raise ValueError(f"captions of {tokens.shape[1]} tokens exceed context={context}; cut them, or raise context")
    check_indices("tokens", tokens, vocab)
    # Not on a GPU, where it would synchronise, and not while compiling, where there are no values.
    if tokens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    ends = (tokens == vocab - 1).any(dim=1)
    if not ends.all():
        raise ValueError(
            f"caption {ends.int().argmin()} has no end token {vocab - 1} (the last id of vocab={vocab}), which the "
            "text tower needs; encode captions with a tokenizer of the same vocab"
        )


def _build_blocks(config: TransformerConfig) -> Transformer:
    """Blocks initialised with open_clip's deviations; those of queries, keys and values are the default."""
    transformer = Transformer(config)
    residual = (2 * config.width * max(config.depth, 1)) ** -0.5
    for block in transformer.blocks:
        assert isinstance(block, Block)
        init_linear(block.attention.out, std=residual)
        init_linear(block.mlp.up, std=(2 * config.width) ** -0.5)
        init_linear(block.mlp.down, std=residual)
    return transformer


def _normal(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=std))


def _unit(x: Tensor) -> Tensor:
    # In half precision the square of a small feature underflows, and the length would be zero.
    return normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
