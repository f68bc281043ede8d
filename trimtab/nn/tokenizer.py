"""Tokenizers for captions that need no download: one token per byte, or one per word.

    "a cat"  ->  start  a  cat  end  padding  padding ...        one row of `context` ids

Every row has a start and an end token, also if the caption is truncated. Padding is id 0, and the end token is the last
id, `vocab - 1`, as in CLIP's vocabulary: the output of the text tower is taken there.

Bytes need no vocabulary and are lossless. Words give shorter rows; unseen words become one unknown token.
"""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.nn.config import ConfigError

PADDING = 0  # in both vocabularies
UNKNOWN = "<unknown>"  # cannot be a word, because `<` is a separate word
CONTEXT = 77  # CLIP's


class Tokenizer(ABC):
    """Base class: rows of `context` ids with start, end and padding. `start` and `end` are the last two ids."""

    kind: str

    def __init__(self, vocab: int, context: int) -> None:
        if context < 3:
            raise ConfigError(f"context={context} has no room between start and end token; try context={CONTEXT}")
        self.context, self.vocab = context, vocab
        self.start, self.end = vocab - 2, vocab - 1

    def encode(self, captions: str | Iterable[str], *, trim: bool = False) -> Tensor:
        """Return int64 ids [captions, context]. Captions that are too long are truncated, and keep their end token.

        `trim` makes the rows as long as the longest caption: less computation for the same features.
        """
        captions = [captions] if isinstance(captions, str) else list(captions)
        rows = torch.full((len(captions), self.context), PADDING)
        for i, caption in enumerate(captions):
            if not isinstance(caption, str):
                raise TypeError(f"caption {i} must be a string, got {type(caption).__name__}")
            try:
                ids = [self.start, *self.split(caption, self.context - 2), self.end]
            except UnicodeEncodeError as error:
                raise ValueError(f"caption {i} is not valid text: {error}") from None
            rows[i, : len(ids)] = torch.tensor(ids)
        longest = int((rows != PADDING).sum(dim=1).max()) if trim and captions else self.context
        return rows[:, :longest]

    def decode(self, tokens: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> list[str]:
        """Return one caption per row: the text before the first end token, without start and padding."""
        rows = torch.as_tensor(tokens)
        if rows.is_floating_point() or rows.dim() not in (1, 2):
            raise ValueError(f"tokens must be ids [rows, length], got {rows.dtype} of shape {tuple(rows.shape)}")
        return [self._decode_row(row) for row in (rows[None] if rows.dim() == 1 else rows).tolist()]

    def _decode_row(self, row: list[int]) -> str:
        wrong = [i for i in row if not 0 <= i < self.vocab]
        if wrong:
            raise ValueError(f"token {wrong[0]} is outside this vocabulary of {self.vocab}; was another one used?")
        if self.end in row:
            row = row[: row.index(self.end)]
        return self.join([i for i in row if i not in (PADDING, self.start)])

    def save(self, path: str | Path) -> None:
        """Write a JSON file for `load_tokenizer`."""
        Path(path).write_text(json.dumps(self.describe(), indent=1), encoding="utf-8")

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "context": self.context}

    @abstractmethod
    def split(self, caption: str, room: int) -> list[int]:
        """The first ids of a caption, at most `room`."""

    @abstractmethod
    def join(self, ids: list[int]) -> str:
        """The text of ids without padding, start and end."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: id = byte + 1. Lossless unless the caption is truncated."""

    kind = "bytes"

    def __init__(self, *, context: int = CONTEXT) -> None:
        super().__init__(1 + 256 + 2, context)

    def split(self, caption: str, room: int) -> list[int]:
        raw = caption.encode("utf-8")
        # Bytes 10xxxxxx continue a character: do not cut inside one.
        while room < len(raw) and raw[room] & 0xC0 == 0x80:
            room -= 1
        return [byte + 1 for byte in raw[:room]]

    def join(self, ids: list[int]) -> str:
        return bytes(i - 1 for i in ids).decode("utf-8", errors="replace")


class WordTokenizer(Tokenizer):
    """Lower-case words and single punctuation marks.

    Decoding gives the words with one space between them, and unknown ones as `<unknown>`.

    Args:
        words: the vocabulary, in the order of ids; see `WordTokenizer.from_captions`.
    """

    kind = "words"

    def __init__(self, words: Sequence[str], *, context: int = CONTEXT) -> None:
        wrong = [word for word in words if not isinstance(word, str) or find_words(word) != [word]]
        if wrong:
            raise ValueError(
                f"{wrong[0]!r} is not one lower-case word, so no caption can contain it; "
                "build a vocabulary with WordTokenizer.from_captions(captions)"
            )
        twice = [word for word, count in Counter(words).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} is in the vocabulary more than once; list(dict.fromkeys(words)) keeps one")
        super().__init__(1 + 1 + len(words) + 2, context)
        self.words = tuple(words)
        self.unknown = 1
        self.ids = {word: i for i, word in enumerate(words, start=2)}

    @classmethod
    def from_captions(
        cls, captions: Iterable[str], *, context: int = CONTEXT, max_words: int | None = None, min_count: int = 1
    ) -> "WordTokenizer":
        """The `max_words` most frequent words that occur at least `min_count` times; ties in alphabetical order."""
        if isinstance(captions, str):
            raise TypeError("captions must be a list of strings, got one string; put it in a list")
        if max_words is not None and max_words < 0:
            raise ConfigError(f"max_words={max_words} is negative; try max_words=None for all words")
        counts = Counter(word for caption in captions for word in find_words(caption))
        # Sorted, so that the ids do not depend on the order of the captions.
        ranked = sorted((word for word in counts if counts[word] >= min_count), key=lambda word: (-counts[word], word))
        return cls(ranked[:max_words], context=context)

    def split(self, caption: str, room: int) -> list[int]:
        return [self.ids.get(word, self.unknown) for word in find_words(caption)[:room]]

    def join(self, ids: list[int]) -> str:
        return " ".join(UNKNOWN if i == self.unknown else self.words[i - 2] for i in ids)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "words": list(self.words)}


def find_words(caption: str) -> list[str]:
    """Runs of letters, digits and underscores; every other visible character is a separate word."""
    return re.findall(r"\w+|[^\w\s]", caption.lower())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a file written by `save`."""
    try:
        described = json.loads(Path(path).read_text(encoding="utf-8"))
        kind, context = described["kind"], described["context"]
        words = described["words"] if kind == WordTokenizer.kind else []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a tokenizer written by save(): {error!r}") from None
    if type(context) is not int or not isinstance(words, list):
        raise ValueError(f"{path} is not a tokenizer written by save(): context={context!r}")
    if kind == ByteTokenizer.kind:
        return ByteTokenizer(context=context)
    if kind == WordTokenizer.kind:
        return WordTokenizer(words, context=context)
    raise ValueError(f"{path} holds a tokenizer of kind {kind!r}; this version supports 'bytes' and 'words'")
