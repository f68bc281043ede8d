"""Configs of Transformers, checked when they are built. An error has the field, its value, and one that would work:

ConfigError: width=100 does not split into heads=3; try width=99
"""

import sys
import types
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trimtab.nn.kinds import LinearKind

QKNorm = Literal["off", "shared", "per-head", "whole"]
LARGEST = 2**53  # of whole numbers: more than any machine can hold, and up to here floats are exact
DEEPEST = 10**5  # blocks; a hundred times the deepest Transformers that were trained (Wang et al. 2022, DeepNet)
TYPES: dict[type, tuple[str, str]] = {  # name and example, for messages
    int: ("a whole number", "1"),
    float: ("a finite number", "1.0"),
    bool: ("True or False", "True"),
}


class ConfigError(ValueError):
    """A config with a wrong value. The message has the field, its value, and a value that would work."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Options of the blocks of every Transformer here, in GPT and in both towers of CLIP."""

    depth: int
    width: int
    heads: int
    mlp_ratio: int = 4
    bias: bool = False  # in linear layers and norms
    norm_eps: float = 1e-6
    qk_norm: QKNorm = "off"  # normalise queries and keys
    attention_scale: Literal["sqrt", "linear"] = "sqrt"  # 1 / sqrt(head width), or 1 / head width
    attention: Literal["softmax", "squared-relu"] = "softmax"
    zero_queries: bool = False  # zero the query weights: attention is uniform at first
    layer_scale: float | None = None  # initial value of a learned gain on each residual branch
    kappa: float | None = None  # fixed scale of queries and keys
    linear: LinearKind = "float"
    checkpointing: bool = False  # recompute the activations of a block in the backward pass

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "depth")
        if self.depth > DEEPEST:
            raise ConfigError(f"depth={self.depth} is more blocks than can be built; try depth={DEEPEST}")
        check_at_least(self, 1, "width", "heads", "mlp_ratio")
        check_positive(self, "norm_eps", "kappa")
        check_splits(self, "width", "heads")
        if self.kappa is not None and self.qk_norm != "off":
            raise ConfigError(f"kappa={self.kappa} and qk_norm={self.qk_norm!r} exclude each other; try qk_norm='off'")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def transformer_config(self, **changes: Any) -> "TransformerConfig":
        """The config of the blocks alone, with some fields changed or added."""
        return TransformerConfig(**{field.name: getattr(self, field.name) for field in fields(BlockConfig)} | changes)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BlockConfig):
    """Config of a stack of blocks."""

    rope: bool  # rotary positions inside attention
    causal: bool = True  # a token attends only to earlier ones

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope:
            check_rope(self)


def check_rope(config: BlockConfig) -> None:
    if config.head_width % 2:
        raise ConfigError(
            f"width={config.width} with heads={config.heads} gives heads of {config.head_width}, and rotary positions "
            f"need an even head width; try width={(config.head_width + 1) * config.heads}"
        )


def check_types(config: Any) -> None:
    """Check that every field has its annotated type, and that numbers are finite and not too large for a machine."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                choices = " or ".join(repr(choice) for choice in get_args(hint))
                raise ConfigError(f"{field.name}={value!r} is not known; try {choices}")
            continue
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if not any(_is_a(value, kind) for kind in kinds):
            expected = " or ".join(TYPES.get(kind, ("None", ""))[0] for kind in kinds)
            raise ConfigError(f"{field.name}={value!r} is not {expected}; try {field.name}={TYPES[kinds[0]][1]}")
        check_not_huge(field, value)


def check_not_huge(field: Field[Any], value: object, group: str = "") -> None:
    """Refuse a whole number that no machine can hold or count to: beyond 63 bits it would overflow in PyTorch."""
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        better = 1 if field.default is MISSING else field.default
        raise ConfigError(f"{group}{field.name}={value} is too large for any machine; try {group}{field.name}={better}")


def check_at_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        if getattr(config, name) < least:
            raise ConfigError(f"{name}={getattr(config, name)} is too small; try {name}={least}")


def check_splits(config: Any, whole: str, part: str, words: str = "") -> None:
    total, count = getattr(config, whole), getattr(config, part)
    if total % count:
        nearest = max(round(total / count), 1) * count
        raise ConfigError(f"{whole}={total} does not split into {words}{part}={count}; try {whole}={nearest}")


def check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value} must be above zero; try {name}={abs(value) or 1.0}")


def _is_a(value: object, kind: type) -> bool:
    if kind is float:
        # Compared and not `isfinite`, which raises OverflowError for a large int.
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
