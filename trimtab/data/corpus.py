"""Open a text as packed tokens on disk: documents one after the other, one end token between two, no padding.

    name or path --survey--> sha256, split --tokenize--> train.bin, validation.bin, tokenizer.json, meta.json

A text is tokenized once. Afterwards its files are memory-mapped from the cache, in a folder named by the sha256 of the
text and its tokenizer. A `.bin` file is in nanoGPT's format, raw uint16 (uint32 if the `meta.json` beside it has that
dtype), so nanoGPT can read a folder of this cache, and its folders open here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from trimtab.data.cache import Meta, Sha256, build_folder, cache_dir, read_json, read_meta, write_json
from trimtab.data.datasets import find_dataset
from trimtab.data.files import expand_home, hash_file, show
from trimtab.data.sources import Documents, Survey, find_files, find_stdlib
from trimtab.data.token_files import holds_tokens, map_tokens, open_token_files
from trimtab.data.tokenizers import TextTokenizer, check_spec, load_tokenizer, make_tokenizer

SPLITS = ("train", "validation")
FORMAT = 3  # version of a cache folder, part of its name
PIECES_AT_ONCE = 64  # at most a megabyte each: enough for `tokenizers` to use all cores


class Listing(TypedDict):
    """What a survey found, for files with the same names, sizes and times."""

    sha256: Sha256
    skipped: list[str]


class SplitHashes(TypedDict):
    train: Sha256
    validation: Sha256


class CorpusMeta(Meta):
    text_sha256: Sha256
    dtype: Literal["uint16", "uint32"]
    sha256: SplitHashes


@dataclass(frozen=True)
class Corpus:
    """Tokens of two splits and their tokenizer.

    Attributes:
        name: the argument of `open_corpus`.
        sha256: of the text (`sha256sum` of a file; for several files, of that command's output).
        skipped: files left out because they are not text.
    """

    name: str
    sha256: str
    tokenizer: TextTokenizer
    splits: dict[str, NDArray[Any]]
    files: dict[Path, str]  # sha256 of each token file
    skipped: tuple[str, ...] = ()

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab

    @property
    def end(self) -> int | None:
        """The token between documents; None if unknown, as in some token files."""
        return self.tokenizer.end

    def tokens(self, split: str) -> NDArray[Any]:
        """All tokens of a split, memory-mapped and read-only."""
        if split not in self.splits:
            raise ValueError(f"unknown split {split!r}; try one of {', '.join(SPLITS)}")
        return self.splits[split]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(ids)

    def verify(self) -> None:
        """Read every token file again and compare its sha256. (Opening does so if its time has changed.)"""
        for path, expected in self.files.items():
            found = hash_file(path)
            if found != expected:
                change = f"sha256 {found[:16]}, expected {expected[:16]}"
                raise ValueError(f"{show(path)} has changed: {change}; delete its folder")


def open_corpus(
    name_or_path: str | Path = "stdlib", *, tokenizer: str = "bytes", cache: str | Path | None = None
) -> Corpus:
    """Open a corpus, from the cache if it was opened before.

    Args:
        name_or_path: "stdlib", a text file, a folder of text, a `.bin` file or a folder with `train.bin`, or
            "hf:<dataset>", "hf:<dataset>:<config>", "hf:<folder of save_to_disk>".
        tokenizer: "bytes", "bpe:<vocabulary>" or "file:<tokenizer.json>". For token files, whose ids are fixed, only
            "file:" is possible.
        cache: folder for tokens; by default see `cache_dir`.
    """
    name, path, root = str(name_or_path), expand_home(name_or_path), cache_dir(cache)
    if holds_tokens(path):
        return Corpus(name, *open_token_files(path, tokenizer, root))
    check_spec(tokenizer)
    source = find_stdlib() if name == "stdlib" else find_dataset(name) if name.startswith("hf:") else find_files(path)
    listing = root / "listings" / f"{source.fingerprint}.json"
    known = read_json(listing, Listing)
    opened = None if known is None else _load(_folder(root, known["sha256"], tokenizer))
    if known is None or opened is None:
        survey = source.survey()
        known = {"sha256": survey.sha256, "skipped": list(survey.skipped)}
        folder = _folder(root, survey.sha256, tokenizer)
        opened = build_folder(folder, lambda work: _fill(work, survey, tokenizer), _load)
        write_json(listing, known)
    return Corpus(source.name, *opened, tuple(known["skipped"]))


def _load(folder: Path) -> tuple[str, TextTokenizer, dict[str, NDArray[Any]], dict[Path, str]] | None:
    """The sha256, tokenizer, splits and hashes of a folder of the cache; None if it is missing or damaged."""
    meta = read_meta(folder, CorpusMeta)
    if meta is None:
        return None
    try:
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        splits = {split: map_tokens(folder / f"{split}.bin", meta["dtype"]) for split in SPLITS}
    except ValueError:
        return None
    hashes = {folder / "train.bin": meta["sha256"]["train"], folder / "validation.bin": meta["sha256"]["validation"]}
    return meta["text_sha256"], tokenizer, splits, hashes


def _folder(root: Path, sha256: str, spec: str) -> Path:
    kind, _, rest = spec.partition(":")
    if kind == "file":  # by content, because the file may change
        rest = hash_file(Path(rest))[:16]
    return root / "corpora" / f"{sha256[:32]}-{'-'.join(filter(None, (kind, rest)))}-v{FORMAT}"


def _fill(folder: Path, survey: Survey, spec: str) -> dict[str, Any]:
    tokenizer = make_tokenizer(spec, chain.from_iterable(survey.documents["train"]()))
    dtype = np.dtype("<u2" if tokenizer.vocab <= 2**16 else "<u4")
    tokenizer.save(folder / "tokenizer.json")
    for split in SPLITS:
        with open(folder / f"{split}.bin", "wb") as file:
            for ids in pack(survey.documents[split], tokenizer):
                file.write(ids.astype(dtype).tobytes())
    sha256 = {split: hash_file(folder / f"{split}.bin") for split in SPLITS}
    return {"tokenizer": spec, "text_sha256": survey.sha256, "dtype": dtype.name, "sha256": sha256}


def pack(documents: Documents, tokenizer: TextTokenizer) -> Iterator[NDArray[Any]]:
    """The tokens of all documents in order, one end token between two."""
    end, begun = np.array([tokenizer.end]), False
    pieces = ((number == 0, piece) for document in documents() for number, piece in enumerate(document))
    while group := list(islice(pieces, PIECES_AT_ONCE)):
        encoded = tokenizer.encode_many([piece for _, piece in group])
        for (is_first, _), ids in zip(group, encoded, strict=True):
            if is_first and begun:
                yield end
            begun = True
            yield ids
