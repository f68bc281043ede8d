"""Text of a Hugging Face dataset: the column `text`, one document per row.

    hf:roneneldan/TinyStories          hf:Salesforce/wikitext:wikitext-2-raw-v1          hf:/folder/of/save_to_disk

If the dataset has a split called validation (or test), it is used; otherwise rows are split by their hash.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.data.files import show
from trimtab.data.sources import PIECE, Documents, Source, Survey, cut_pieces, is_validation
from trimtab.hints import load_extra

COLUMN = "text"


def find_dataset(name: str) -> Source:
    """Load a dataset named `hf:...`. The package `datasets` keeps its own cache of downloads."""
    library = load_extra("datasets", extra="hf", purpose=f"corpus {name!r}")
    parts = _parts(_load(library, name.removeprefix("hf:")), name)
    # The fingerprint of a table changes with its content.
    marks = [f"{split}:{table._fingerprint}" for split, table in sorted(parts.items())]
    return Source(name, hashlib.sha256("\n".join([name, *marks]).encode()).hexdigest(), lambda: _survey(name, parts))


def _load(library: Any, name: str) -> Any:
    try:
        if Path(name).is_dir() and any(Path(name).glob("*.json")):
            return library.load_from_disk(name)
        path, _, config = name.partition(":")
        return library.load_dataset(path, config or None)
    except Exception as error:  # network, names and formats raise many classes of several packages
        raise ValueError(f"cannot load the dataset {name!r}: {type(error).__name__}: {show(error)}") from error


def _parts(loaded: Any, name: str) -> dict[str, Any]:
    """Tables by split: `train`, and `validation` if the dataset has one."""
    tables = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in tables:
        raise ValueError(f"{show(name)} has the splits {show(', '.join(map(str, tables)))} but no train")
    for table in tables.values():
        if COLUMN not in table.column_names:
            columns = ", ".join(map(str, table.column_names))
            raise ValueError(f"{show(name)} has the columns {show(columns)} but no {COLUMN!r}")
    other = next((split for split in ("validation", "test") if split in tables), None)
    parts = {"train": tables["train"].select_columns([COLUMN])}
    return parts | {"validation": tables[other].select_columns([COLUMN])} if other else parts


def _survey(name: str, parts: dict[str, Any]) -> Survey:
    digest, rows = hashlib.sha256(), {"train": 0, "validation": 0}
    for split in rows:
        for text in _texts(parts, split):
            rows[split] += 1
            digest.update(f"{split} {len(text)}\n".encode() + text)
    if not all(rows.values()):
        counts = ", ".join(f"{count} rows for {split}" for split, count in rows.items())
        raise ValueError(f"{show(name)} has too little text to split: {counts}; give a larger dataset")

    def documents(split: str) -> Documents:
        return lambda: (_pieces(text) for text in _texts(parts, split))

    return Survey(digest.hexdigest(), {split: documents(split) for split in rows})


def _texts(parts: dict[str, Any], split: str) -> Iterator[bytes]:
    """Non-empty rows as UTF-8."""
    own = split in parts and "validation" in parts
    for batch in (parts[split] if own else parts["train"]).iter(batch_size=1000):
        for row in batch[COLUMN]:
            if not isinstance(row, str | None):
                raise ValueError(f"the column {COLUMN!r} holds {type(row).__name__} where text is expected")
            text = (row or "").encode()
            if text and (own or is_validation(hashlib.sha256(text).hexdigest()) == (split == "validation")):
                yield text


def _pieces(text: bytes) -> Iterator[bytes]:
    return cut_pieces(text[start : start + PIECE] for start in range(0, len(text), PIECE))
