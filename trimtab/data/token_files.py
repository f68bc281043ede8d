"""nanoGPT's token files: `train.bin` and `val.bin`, raw little-endian uint16 without a header.

They contain neither vocabulary nor tokenizer (nanoGPT keeps those in a pickle, which is not read here). The vocabulary
is the largest id plus one, unless a `tokenizer.json` is given or is in the same folder. A `meta.json` with
{"dtype": "uint32"} in the same folder means 32-bit ids.
"""

import os
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from trimtab.data.cache import Sha256, read_json, write_json
from trimtab.data.files import hash_file, not_a_file, open_file, require_json, show
from trimtab.data.sources import VALIDATION, VALIDATION_NAMES, fingerprint_files, sha256_of
from trimtab.data.tokenizers import Ids, TextTokenizer, load_tokenizer

CHUNK = 1 << 22  # tokens read at once


class Description(TypedDict, total=False):
    """The part of `meta.json` that is used."""

    dtype: str


class Summary(TypedDict):
    """What a full read of token files found."""

    sha256: Sha256
    files: list[Sha256]
    vocab: Annotated[int, msgspec.Meta(ge=1, le=2**32)]


def holds_tokens(path: Path) -> bool:
    return path.suffix == ".bin" or os.path.isfile(path / "train.bin")


def open_token_files(
    path: Path, spec: str, root: Path
) -> tuple[str, TextTokenizer, dict[str, NDArray[Any]], dict[Path, str]]:
    """Return sha256, tokenizer, splits, and the sha256 of each file. The last tenth of a single file is validation."""
    files = _find(path)
    dtype = _dtype(files[0].parent)
    parts = [map_tokens(file, dtype.name) for file in files]
    summary = _summary(files, dtype, root)
    tokenizer = _tokenizer(files[0].parent, spec, summary["vocab"], dtype)
    if len(parts) == 1:
        cut = len(parts[0]) - int(len(parts[0]) * VALIDATION)
        parts = [parts[0][:cut], parts[0][cut:]]
    hashes = dict(zip(files, summary["files"], strict=True))
    return summary["sha256"], tokenizer, {"train": parts[0], "validation": parts[1]}, hashes


def map_tokens(path: Path, dtype: str) -> NDArray[Any]:
    """Memory-map a token file."""
    kind = np.dtype(dtype).newbyteorder("<")
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size % kind.itemsize:
            raise ValueError(
                f"{show(path)} has {size} bytes, not a multiple of {kind.itemsize} ({dtype}): truncated or not tokens"
            )
        # An empty file cannot be mapped.
        return np.memmap(file, kind, mode="r") if size else np.empty(0, kind)


def _find(path: Path) -> list[Path]:
    if not os.path.isdir(path):
        if not os.path.isfile(path):
            raise ValueError(f"no token file at {show(path)}: {not_a_file(path)}")
        if not path.stat().st_size:
            raise ValueError(f"{show(path)} is empty; a token file is raw uint16, as nanoGPT's prepare.py writes")
        return [path]
    validation = [path / f"{name}.bin" for name in VALIDATION_NAMES if os.path.isfile(path / f"{name}.bin")]
    if not validation:
        raise ValueError(f"{show(path)} has train.bin but no val.bin; put one there, or give train.bin to split it")
    return [path / "train.bin", validation[0]]


def _dtype(folder: Path) -> np.dtype[Any]:
    file = folder / "meta.json"
    described = require_json(file, Description, "description of tokens") if os.path.lexists(file) else Description()
    name = described.get("dtype", "uint16")
    if name not in ("uint16", "uint32"):
        raise ValueError(f"{show(file)} has dtype {show(repr(name))}; tokens are uint16 or uint32")
    return np.dtype(name)


def _summary(files: list[Path], dtype: np.dtype[Any], root: Path) -> Summary:
    """The sha256 and the vocabulary. They need a full read, so they are cached while the files do not change."""
    resolved = [file.resolve() for file in files]
    listing = root / "listings" / f"{fingerprint_files(resolved)}-{dtype.name}.json"
    known = read_json(listing, Summary)
    if known is None or len(known["files"]) != len(files):
        digests = [(file.name, hash_file(file)) for file in files]
        sha256 = digests[0][1] if len(files) == 1 else sha256_of(digests)
        vocab = max(_largest(map_tokens(file, dtype.name)) for file in files) + 1
        known = {"sha256": sha256, "files": [digest for _, digest in digests], "vocab": vocab}
        write_json(listing, known)
    return known


def _largest(tokens: NDArray[Any]) -> int:
    starts = range(0, len(tokens), CHUNK)
    return max((int(tokens[start : start + CHUNK].max()) for start in starts), default=0)


def _tokenizer(folder: Path, spec: str, vocab: int, dtype: np.dtype[Any]) -> TextTokenizer:
    beside = folder / "tokenizer.json"
    if spec.startswith("file:"):
        tokenizer = load_tokenizer(spec.removeprefix("file:"))
    elif spec != "bytes":
        raise ValueError(
            f"{show(folder)} holds tokens, which tokenizer={spec!r} cannot change; try tokenizer='file:<their json>'"
        )
    else:
        tokenizer = load_tokenizer(beside) if os.path.lexists(beside) else Ids(vocab)
    if vocab > tokenizer.vocab:
        outside = f"token {vocab - 1}, outside the tokenizer's vocabulary of {tokenizer.vocab}"
        raise ValueError(f"{show(folder)} has {outside}")
    if tokenizer.vocab > np.iinfo(dtype).max + 1:
        raise ValueError(
            f"a vocabulary of {tokenizer.vocab} does not fit {dtype.name} tokens; if {show(folder)} holds 32-bit ids, "
            'put {"dtype": "uint32"} in its meta.json'
        )
    return tokenizer
