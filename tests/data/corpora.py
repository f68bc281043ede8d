"""Corpora for tests: in memory, or written to a folder."""

import hashlib
from pathlib import Path

import numpy as np

from trimtab.data.corpus import Corpus
from trimtab.data.tokenizers import Ids


def counting(tokens: int, *, name: str = "counting") -> Corpus:
    """Token i is i, so a window shows its position."""
    digest = hashlib.sha256(f"{name}{tokens}".encode()).hexdigest()
    values = np.arange(tokens, dtype=np.uint32)
    return Corpus(name, digest, Ids(max(tokens, 1)), {"train": values, "validation": values[: tokens // 2]}, {})


def write_files(folder: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def documents(tokens: np.ndarray, end: int) -> list[bytes]:
    """What byte tokens hold, cut at the ends."""
    cuts = np.flatnonzero(tokens == end)
    return [part.astype(np.uint8).tobytes() for part in np.split(tokens, cuts)[:1]] + [
        part[1:].astype(np.uint8).tobytes() for part in np.split(tokens, cuts)[1:]
    ]
