"""Corpora for tests, in memory or written to a folder, and what a refusal looks like."""

import hashlib
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

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


@contextmanager
def assert_refused(message: str) -> Iterator[None]:
    """A ValueError in one printable line, raised by a check of ours (the command line shows any other as a bug), within
    seconds (a pipe blocks forever)."""
    before = signal.signal(signal.SIGALRM, _fail)
    signal.alarm(10)
    try:
        with pytest.raises(ValueError, match=message) as raised:
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert str(raised.value).isprintable(), repr(str(raised.value))
    assert len(str(raised.value)) < 2000
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert Path(last.filename).parent.name == "data", last
    assert (last.line or "").startswith("raise "), last


def _fail(*_: object) -> None:
    raise AssertionError("it takes forever")
