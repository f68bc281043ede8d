"""Image-caption pairs for CLIP, stored in one memory-mapped array.

    emoji      pictures with their Unicode names (extra `clip`), about 1,900
    shapes     480 coloured shapes drawn here, for tests
    a path     webdataset shards: a folder, one .tar, or name-{000..017}.tar

Pairs whose pixels or caption equal those of an earlier pair are dropped. The split is by the hash of the concept.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.data.cache import Meta, Sha256, build_folder, cache_dir, read_meta
from trimtab.data.files import hash_file, open_file, show
from trimtab.data.order import Ordered, permute
from trimtab.data.pictures import Pair, check_array, draw_emoji, draw_shapes, drop_duplicates, emoji_versions
from trimtab.data.shards import find_shards, read_pairs
from trimtab.data.sources import fingerprint_files, is_validation

FORMAT = 3  # of a cache folder
SMALLEST, LARGEST = 8, 512  # pixels per side
# Of the pictures that CLIP was trained on (Radford et al. 2021); CLIP models expect them.
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


class PairsMeta(Meta):
    texts: Annotated[list[tuple[str, str]], msgspec.Meta(min_length=2)]
    sha256: Sha256


@dataclass(frozen=True)
class Pairs:
    """Pictures of two splits with their captions. `size` is in pixels per side, `sha256` of all pixels and captions."""

    name: str
    size: int
    sha256: str
    pixels: NDArray[np.uint8]  # [pairs, S, S, 3], memory-mapped
    texts: list[tuple[str, str]]  # caption and concept of each
    splits: dict[str, NDArray[np.int64]]  # indices of pairs

    def indices(self, split: str) -> NDArray[np.int64]:
        if split not in self.splits:
            raise ValueError(f"unknown split {split!r}; try one of {', '.join(self.splits)}")
        return self.splits[split]

    def captions(self, split: str) -> list[str]:
        return [self.texts[i][0] for i in self.indices(split)]

    def concepts(self, split: str) -> list[str]:
        return [self.texts[i][1] for i in self.indices(split)]

    def load(self, split: str) -> tuple[Tensor, list[str]]:
        """A whole split, for evaluation: float32 [pairs, 3, S, S], normalised, and the captions."""
        return normalize(self.pixels[self.indices(split)]), self.captions(split)

    def pairs(self, split: str) -> Iterator[Pair]:
        """The unnormalised pairs, for `pack_pairs`."""
        return (Pair(np.array(self.pixels[i]), *self.texts[i]) for i in self.indices(split))


class PairBatches(Ordered):
    """Endless batches of pairs, in an order that depends only on the seed.

    A pair is never twice in a batch, because its own picture would then count as a wrong answer. The end of an epoch is
    therefore skipped if it is smaller than a batch.

    Args:
        tokenizer: from captions to ids; without one `captions` are strings.
    """

    def __init__(
        self,
        pairs: Pairs,
        split: str = "train",
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        tokenizer: Callable[[list[str]], Tensor] | None = None,
    ) -> None:
        super().__init__(seed, rank, world, {"pairs": pairs.sha256, "split": split})
        self.pairs, self.split, self.tokenizer = pairs, split, tokenizer
        self.chosen = pairs.indices(split)
        if not len(self.chosen):
            raise ValueError(f"the {split} split of {show(pairs.name)} is empty")

    @property
    def epoch(self) -> float:
        return self.position / len(self.chosen)

    def next(self, batch: int) -> dict[str, Any]:
        """This process's pairs of the next global batch: `images` float32 [batch / world, 3, S, S] and `captions`."""
        share, size = self.share(batch), len(self.chosen)
        if batch > size:
            name = show(self.pairs.name)
            raise ValueError(f"batch={batch} is above the {size} pairs of {name}; try batch={size} or less")
        if self.position % size + batch > size:
            self.position += -self.position % size
        epoch, place = divmod(self.position, size)
        places = np.arange(place + self.rank * share, place + (self.rank + 1) * share)
        chosen = self.chosen[permute(places, size, self.seed, epoch)]
        self.position += batch
        captions = [self.pairs.texts[i][0] for i in chosen.tolist()]
        images = normalize(self.pairs.pixels[chosen])
        return {"images": images, "captions": self.tokenizer(captions) if self.tokenizer else captions}


def open_pairs(name_or_path: str | Path = "emoji", *, size: int = 32, cache: str | Path | None = None) -> Pairs:
    """Open pairs with pictures of `size` x `size` pixels, from the cache if they were opened before."""
    if type(size) is not int or not SMALLEST <= size <= LARGEST:
        raise ValueError(f"size must be {SMALLEST} ... {LARGEST} pixels per side, got {size!r}; 32 is the default")
    name = str(name_or_path)
    identity, draw = _find(name, size)
    folder = cache_dir(cache) / "pairs" / f"{identity}-{size}px-v{FORMAT}"
    meta, pixels = build_folder(folder, lambda work: _fill(work, draw(), size, name), lambda found: _load(found, size))
    texts = meta["texts"]
    return Pairs(name, size, meta["sha256"], pixels, texts, _split([concept for _, concept in texts]))


def normalize(pixels: NDArray[np.uint8]) -> Tensor:
    """uint8 [N, S, S, 3] to float32 [N, 3, S, S] with CLIP's mean and deviation."""
    mean, deviation = torch.tensor(MEAN), torch.tensor(DEVIATION)
    scaled = (torch.from_numpy(np.array(pixels)) / 255 - mean) / deviation
    return scaled.permute(0, 3, 1, 2).contiguous()


def _find(name: str, size: int) -> tuple[str, Callable[[], Iterator[Pair]]]:
    """The name of these pairs in the cache, and a function that reads or draws them."""
    if name == "shapes":
        return "shapes", lambda: draw_shapes(size)
    if name == "emoji":
        return f"emoji-{emoji_versions()}", lambda: draw_emoji(size)
    if not (name.endswith((".tar", "}")) or os.path.isdir(name)):
        raise ValueError(f"no pairs at {show(repr(name))}; try 'emoji', 'shapes', a .tar file or a folder of them")
    shards = find_shards(name)
    mark = fingerprint_files(shard.resolve() for shard in shards)
    return f"shards-{mark[:32]}", lambda: read_pairs(shards, size)


def _load(folder: Path, size: int) -> tuple[PairsMeta, NDArray[np.uint8]] | None:
    """The meta and the pixels of a folder of the cache; None if it is missing or damaged."""
    meta, file = read_meta(folder, PairsMeta), folder / "pixels.npy"
    if meta is None:
        return None
    try:
        with open_file(file) as opened:
            check_array(opened, (len(meta["texts"]), size, size, 3))
        return meta, np.lib.format.open_memmap(file, mode="r")
    except ValueError:
        return None


def _fill(folder: Path, pairs: Iterator[Pair], size: int, name: str) -> dict[str, Any]:
    """Write pixels to disk in one pass. The header of the array needs the count, so it is written at the end."""
    texts = []
    with open(folder / "raw", "wb") as raw:
        for pair in drop_duplicates(pairs):
            raw.write(pair.pixels.tobytes())
            texts.append((pair.caption, pair.concept))
    if len(texts) < 2:
        raise ValueError(f"{show(name)} has {len(texts)} different pairs; a contrastive loss needs at least two")
    flat = np.memmap(folder / "raw", np.uint8, mode="r", shape=(len(texts), size, size, 3))
    np.save(folder / "pixels.npy", flat)
    del flat
    (folder / "raw").unlink()
    digest = hashlib.sha256(hash_file(folder / "pixels.npy").encode() + json.dumps(texts).encode()).hexdigest()
    return {"texts": texts, "sha256": digest}


def _split(concepts: list[str]) -> dict[str, NDArray[np.int64]]:
    hashes = {concept: hashlib.sha256(concept.encode()).hexdigest() for concept in set(concepts)}
    held_out = {concept for concept, digest in hashes.items() if is_validation(digest)}
    if not held_out:
        held_out = {min(hashes, key=lambda concept: hashes[concept])}
    validation = np.array([concept in held_out for concept in concepts])
    return {"train": np.flatnonzero(~validation), "validation": np.flatnonzero(validation)}
