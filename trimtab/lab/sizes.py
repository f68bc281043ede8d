"""Sizes: depth x width, the ladders of sizes that studies use, and a recipe at another size.

    2x32       two layers of width 32, with heads of 16 or the nearest that divides; 2x32x4 has four heads
    joint      depth and width grow together, as in the paper; `width` and `depth` grow one of them

Embedding and head do not count: a GPT has 12 * depth * width^2 parameters. Wortsman et al. 2023b, sections 2 and 3.2.2.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.train.config import CLIPRun, ConfigError, GPTRun, ModuleRun, RunConfig, with_model
from trimtab.train.module import check_options

HEAD_WIDTH = 16


@dataclass(frozen=True)
class Size:
    """Depth x width, or options of the user's own function."""

    name: str
    depth: int = 0
    width: int = 0
    heads: int = 0
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


LADDERS: dict[str, tuple[str, ...]] = {
    "joint": ("2x16", "2x32", "3x64", "4x128", "6x256"),
    "width": ("3x16", "3x32", "3x64", "3x96"),
    "depth": ("1x32", "3x32", "6x32", "12x32"),
}


def parse_sizes(text: str) -> tuple[Size, ...]:
    """One size, a ladder, or its first sizes: "3x64", "width", "joint:3"."""
    name, colon, count = text.partition(":")
    if name in LADDERS and (not colon or (count.isdecimal() and 0 < int(count) <= len(LADDERS[name]))):
        return ladder(name, int(count) if count else None)
    if name in LADDERS:
        raise ConfigError(f"sizes {text!r}: ladder {name} has {len(LADDERS[name])} sizes; try {name}:3")
    if colon or "x" not in text:
        raise ConfigError(f"sizes {text!r} is neither depth x width nor a ladder; try 3x64, or {', '.join(LADDERS)}")
    return (parse_size(text),)


def ladder(name: str, count: int | None = None) -> tuple[Size, ...]:
    """The sizes of a ladder, smallest first."""
    if name not in LADDERS:
        raise ConfigError(f"there is no ladder {name!r}; try {', '.join(LADDERS)}")
    return tuple(parse_size(size) for size in LADDERS[name][:count])


def parse_size(text: str) -> Size:
    match = re.fullmatch(r"(\d{1,5})x(\d{1,6})(?:x(\d{1,4}))?", text.strip().lower())
    if not match or 0 in (depth := int(match[1]), width := int(match[2])):
        raise ConfigError(f"size {text!r} is not depth x width; try 3x64")
    heads = int(match[3]) if match[3] else count_heads(width)
    if not heads or width % heads:
        raise ConfigError(f"size {text!r}: {width} does not split into {heads} heads; try {depth}x{width}")
    return Size(text.strip().lower(), depth, width, heads)


def count_heads(width: int) -> int:
    """The largest number of heads of at least HEAD_WIDTH that divides the width into even parts (rotary positions)."""
    most = max(width // HEAD_WIDTH, 1)
    return next((h for h in range(most, 0, -1) if width % h == 0 and width // h % 2 == 0), 1)


def scaled(base: RunConfig, size: Size) -> RunConfig:
    """The same run at another size. In a CLIP, text tower and embedding keep their ratio to the image tower."""
    if isinstance(base, ModuleRun):
        options = size.options or {"depth": size.depth, "width": size.width}
        own = replace(base.model, options={**base.model.options, **options})
        check_options(own)
        return replace(base, model=own)
    if size.options:
        raise ConfigError(f"size {size.name!r} has options {dict(size.options)}, but only module:function has options")
    if isinstance(base, GPTRun):
        return with_model(base, depth=size.depth, width=size.width, heads=size.heads)
    assert isinstance(base, CLIPRun)
    model = base.model
    text_width = max(round(size.width * model.text_width / model.width), 1)
    return with_model(
        base,
        depth=size.depth,
        width=size.width,
        heads=size.heads,
        text_depth=max(round(size.depth * model.text_depth / model.depth), 1) if model.depth else size.depth,
        text_width=text_width,
        text_heads=count_heads(text_width),
        embed=max(round(size.width * model.embed / model.width), 1),
    )
