"""Text to token ids and back: one token per byte, or byte-pair encoding (BPE) trained on the corpus.

    bytes        257 ids: the bytes and the end of a document
    bpe:4096     4096 ids: byte-level BPE as in GPT-2, trained by the package `tokenizers`, and the end of a document
    file:x.json  a Hugging Face tokenizer.json, for token files made elsewhere

No text encodes to the end token, so it always separates documents. All three decode to exactly the encoded text.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.data.files import require_json, show
from trimtab.hints import load_extra

END = "<|end|>"  # the end of a document in the output of `decode`
FOREIGN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # end tokens of other tokenizers
SMALLEST_BPE = 257  # all bytes and the end
LARGEST_BPE = 1 << 20  # four times the largest in use; the trainer reserves memory for all and aborts if it cannot
LARGEST_ID = 1 << 24  # a model has a row for every id up to the largest
LEARN_BYTES = 64 << 20  # BPE is trained on the first 64 MB: later text hardly changes the merges


class TextTokenizer(ABC):
    """Base class of text tokenizers."""

    vocab: int  # number of ids, including the end token
    end: int | None  # the id between documents; None if unknown, as in some token files

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end token."""
        ids: list[int] = self.encode_many([text.encode()])[0].tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. End tokens become `<|end|>`, invalid UTF-8 becomes U+FFFD."""
        parts: list[list[int]] = [[]]
        for i in map(int, ids):
            if not 0 <= i < self.vocab:
                raise ValueError(f"token {i} is outside this vocabulary of {self.vocab}; was another tokenizer used?")
            if i == self.end:
                parts.append([])
            else:
                parts[-1].append(i)
        return END.join(map(self.join, parts))

    @abstractmethod
    def encode_many(self, pieces: Sequence[bytes]) -> list[NDArray[Any]]:
        """Ids of several pieces of UTF-8 text."""

    @abstractmethod
    def join(self, ids: list[int]) -> str:
        """The text of ids without end tokens."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """JSON from which `load_tokenizer` restores it."""

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.describe()), encoding="utf-8")


class Bytes(TextTokenizer):
    vocab, end = 257, 256

    def encode_many(self, pieces: Sequence[bytes]) -> list[NDArray[Any]]:
        return [np.frombuffer(piece, np.uint8) for piece in pieces]

    def join(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def describe(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class BPE(TextTokenizer):
    """A tokenizer of the package `tokenizers`, from its JSON. If it has no end token, one id is added."""

    def __init__(self, described: Any, name: str = "this") -> None:
        library = load_extra("tokenizers", extra="hf", purpose="byte-pair encoding")
        with _explained(f"{name} is not a tokenizer.json of the package tokenizers"):
            self.inner = library.Tokenizer.from_str(json.dumps(described))
        # "</s>" in a document is encoded as text, not as the end token.
        self.inner.encode_special_tokens = True
        self.inner.no_truncation()
        self.inner.no_padding()
        ends = [self.inner.token_to_id(end) for end in FOREIGN_ENDS]
        # Not the number of tokens: ids may have gaps.
        size = max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if size > LARGEST_ID:
            raise ValueError(f"{name} has the id {size - 1}; a tokenizer.json has ids below {LARGEST_ID}")
        self.end = next((i for i in ends if i is not None), size)
        self.vocab = max(size, self.end + 1)

    def encode_many(self, pieces: Sequence[bytes]) -> list[NDArray[Any]]:
        with _explained("the tokenizer cannot encode this text; try 'bytes'"):
            encodings = self.inner.encode_batch([piece.decode() for piece in pieces], add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def join(self, ids: list[int]) -> str:
        text: str = self.inner.decode(ids, skip_special_tokens=False)
        return text

    def describe(self) -> dict[str, Any]:
        return {"kind": "bpe", "tokenizer": json.loads(self.inner.to_str())}


class Ids(TextTokenizer):
    """The ids of a token file without its tokenizer."""

    MISSING = "these tokens came without a tokenizer; open them with tokenizer='file:tokenizer.json'"

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        # nanoGPT uses GPT-2's vocabulary, in which the last id ends a document; for others it is unknown.
        self.end = 50256 if vocab == 50257 else None

    def encode_many(self, pieces: Sequence[bytes]) -> list[NDArray[Any]]:
        raise ValueError(self.MISSING)

    def join(self, ids: list[int]) -> str:
        raise ValueError(self.MISSING)

    def describe(self) -> dict[str, Any]:
        return {"kind": "ids", "vocab": self.vocab}


def make_tokenizer(spec: str, pieces: Iterable[bytes]) -> TextTokenizer:
    """The tokenizer of a spec; BPE is trained on the pieces."""
    check_spec(spec)
    kind, _, rest = spec.partition(":")
    if kind == "bytes":
        return Bytes()
    return load_tokenizer(rest) if kind == "file" else train_bpe(pieces, int(rest))


def check_spec(spec: str) -> None:
    """Refuse a wrong spec before anything is read or written."""
    kind, _, rest = spec.partition(":")
    if spec == "bytes" or (kind == "file" and rest):
        return
    if kind != "bpe" or not rest.isdecimal():
        raise ValueError(f"unknown tokenizer {spec!r}; try 'bytes', 'bpe:4096' or 'file:tokenizer.json'")
    if len(rest) > len(str(LARGEST_BPE)) or int(rest) > LARGEST_BPE:
        raise ValueError(f"{show(repr(spec))} is larger than any vocabulary; try 'bpe:{LARGEST_BPE}' or less")
    if int(rest) < SMALLEST_BPE:
        raise ValueError(f"{spec!r} has no room for 256 bytes and an end token; try 'bpe:{SMALLEST_BPE}' or more")
    load_extra("tokenizers", extra="hf", purpose=f"tokenizer {spec!r}")


def train_bpe(pieces: Iterable[bytes], vocab: int) -> BPE:
    """Train until there are `vocab` ids including the end token, or nothing is left to merge; see `.vocab`."""
    library = load_extra("tokenizers", extra="hf", purpose="training a byte-pair encoding")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=vocab - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((piece.decode() for piece in _first(pieces, LEARN_BYTES)), trainer)
    return BPE(json.loads(tokenizer.to_str()))


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """Read what `save` wrote, or a Hugging Face tokenizer.json."""
    described = require_json(Path(path), dict[str, Any], "tokenizer")
    kind, vocab = described.get("kind"), described.get("vocab")
    if "model" in described:
        return BPE(described, show(path))
    if kind == "bytes":
        return Bytes()
    if kind == "bpe":
        return BPE(described.get("tokenizer"), show(path))
    if kind == "ids" and type(vocab) is int and 0 < vocab <= 2**32:
        return Ids(vocab)
    raise ValueError(
        f"{show(path)} is not a tokenizer: it has neither a 'model' nor one of the kinds bytes, bpe and ids"
    )


@contextmanager
def _explained(message: str) -> Iterator[None]:
    """Turn errors of the package `tokenizers` into a ValueError: it raises plain Exception, and its Rust code panics
    with a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{message}: {show(error)}") from None


def _first(pieces: Iterable[bytes], count: int) -> Iterator[bytes]:
    """Pieces until there are `count` bytes."""
    for piece in pieces:
        yield piece
        count -= len(piece)
        if count <= 0:
            return
