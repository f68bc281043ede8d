"""Text sources: files, folders and the Python standard library, split into training and validation.

A survey reads every file once, for its sha256 and to check that it is UTF-8 text, before anything is written. Files are
split by their hash, so adding or removing files does not move others between splits, and copies stay together. The last
tenth of a single file is validation; a folder with `train.*` and `valid.*` keeps its own split.

Text is read in pieces of at most a megabyte, cut at line ends, so a corpus may be larger than the memory.
"""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.data.files import not_a_file, open_file, show

PIECE = 1 << 20  # bytes
VALIDATION = 0.1  # share of the files, or of a single file's bytes
VALIDATION_NAMES = ("val", "valid", "validation", "dev")
# Tests are large and hardly text: tables, byte strings, files that are broken on purpose.
NOT_SOURCES = {"__pycache__", "site-packages", "dist-packages", "lib-dynload", "test", "tests", "idle_test"}

Documents = Callable[[], Iterator[Iterator[bytes]]]  # each call iterates over documents, as pieces of UTF-8 text


@dataclass(frozen=True)
class Survey:
    """The result of reading a source once."""

    sha256: str  # of a file; for several files, of the output of `sha256sum`, sorted by name
    documents: dict[str, Documents]  # by split
    skipped: tuple[str, ...] = ()  # files that are not text


@dataclass(frozen=True)
class Source:
    """Text that may already be in the cache."""

    name: str
    fingerprint: str  # of names, sizes and times; changes when the text changes
    survey: Callable[[], Survey]


@dataclass(frozen=True)
class TextFile:
    path: Path
    name: str
    sha256: str
    start: int = 0
    stop: int = 0  # bytes


def find_stdlib() -> Source:
    """The source code of the running Python without its tests: available everywhere without a download."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root, NOT_SOURCES) if path.suffix == ".py"]
    if not paths:
        raise ValueError(f"this Python has no sources in {root}; give a file or a folder of text instead of 'stdlib'")
    return _make_source("stdlib", root, paths)


def find_files(path: Path) -> Source:
    """One text file, or all text files below a folder except hidden ones."""
    if not os.path.isdir(path):
        if os.path.lexists(path):
            return _make_source(str(path), path.parent, [path])
        advice = "give 'stdlib', a text file, a folder, a .bin file or 'hf:<dataset>'"
        raise ValueError(f"no corpus at {show(path)}: {advice}")
    paths = list(_walk(path, set()))
    if not paths:
        raise ValueError(f"{show(path)} is an empty folder; put text files in it, or use 'stdlib'")
    return _make_source(str(path), path, paths)


def sha256_of(paths: Iterable[tuple[str, str]]) -> str:
    """One sha256 for many files, from (name, sha256) of each: the output of `sha256sum * | sha256sum`."""
    return _hash("".join(f"{digest}  {name}\n" for name, digest in paths))


def is_validation(digest: str) -> bool:
    return int(digest[:8], 16) < VALIDATION * 2**32


def fingerprint_files(paths: Iterable[Path]) -> str:
    stats = ((path, path.stat() if os.path.exists(path) else path.lstat()) for path in paths)
    return _hash("".join(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n" for path, stat in stats))


def cut_pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that end at a line end, or at least at the end of a character."""
    rest = b""
    for chunk in chunks:
        rest += chunk
        cut = rest.rfind(b"\n") + 1 or _character_start(rest, len(rest))
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()  # names of files may not be UTF-8


def _make_source(name: str, root: Path, paths: list[Path]) -> Source:
    # A link that leads nowhere or in a circle cannot be resolved. It stays in the list, for its reason to be named.
    resolved = ((path, path.resolve() if os.path.exists(path) else path.absolute()) for path in paths)
    # Sorted by name: the order must not depend on the system.
    named = sorted((path.relative_to(root).as_posix(), found) for path, found in resolved)
    return Source(name, fingerprint_files(path for _, path in named), lambda: _survey(name, named))


def _walk(root: Path, leave_out: set[str]) -> Iterator[Path]:
    """All files below a folder, also pipes and the like, without following links to folders."""
    folders = [root]
    while folders:
        try:
            found = list(folders[-1].iterdir())
        except OSError as error:
            raise ValueError(f"cannot read {show(folders[-1])}: {error.strerror}") from error
        folders.pop()
        for path in found:
            if path.name.startswith(".") or path.name in leave_out:
                continue
            if not os.path.isdir(path):
                yield path
            elif not path.is_symlink():
                folders.append(path)


def _survey(name: str, named: list[tuple[str, Path]]) -> Survey:
    files, skipped = [], []
    for relative, path in named:
        digest, wrong = _inspect(path)
        if wrong:
            skipped.append(f"{show(relative)} ({wrong})")
        elif path.stat().st_size:  # an empty document would give two end tokens in a row
            files.append(TextFile(path, relative, digest, 0, path.stat().st_size))
    if not files:
        reason = f"not UTF-8 text: {skipped[0]}" if skipped else "empty"
        raise ValueError(f"{show(name)} holds no text ({reason}); a corpus is UTF-8 text or a .bin file of tokens")
    sha256 = files[0].sha256 if len(named) == 1 else sha256_of((file.name, file.sha256) for file in files)

    def documents(part: list[TextFile]) -> Documents:
        return lambda: (cut_pieces(_chunks(file)) for file in part)

    return Survey(sha256, {split: documents(part) for split, part in _split(files).items()}, tuple(skipped))


def _inspect(path: Path) -> tuple[str, str]:
    """Return the sha256, and why the file is not text ("" if it is)."""
    digest, decoder, wrong = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), not_a_file(path)
    if wrong:
        return "", wrong
    with open_file(path) as file:
        last = False
        while not last:
            chunk = file.read(PIECE) or b""  # None: a file of the kernel that has nothing to read yet
            last = not chunk
            digest.update(chunk)
            try:
                wrong = wrong or ("has a zero byte" if b"\0" in chunk else "")
                if not wrong:
                    decoder.decode(chunk, final=last)
            except UnicodeDecodeError as error:
                wrong = error.reason
    return digest.hexdigest(), wrong


def _split(files: list[TextFile]) -> dict[str, list[TextFile]]:
    if len(files) == 1:
        return _split_one(files[0])
    named = _split_by_name(files)
    if named is not None:
        return named
    validation = [file for file in files if is_validation(file.sha256)]
    if not validation:  # of a few files all hashes may be large: use the smallest, which a larger share would include
        validation = [min(files, key=lambda file: file.sha256)]
    train = [file for file in files if file not in validation]
    if not train:
        train, validation = validation[:-1], validation[-1:]
    return {"train": train, "validation": validation}


def _split_by_name(files: list[TextFile]) -> dict[str, list[TextFile]] | None:
    """The folder's own split, if all files are called `train`, a validation name, or `test` (which is not read)."""
    parts: dict[str, list[TextFile]] = {"train": [], "validation": [], "test": []}
    for file in files:
        stem = file.path.name.split(".")[0]
        part = "validation" if stem in VALIDATION_NAMES else stem
        if part not in parts:
            return None
        parts[part].append(file)
    del parts["test"]
    return parts if all(parts.values()) else None


def _split_one(file: TextFile) -> dict[str, list[TextFile]]:
    """The last tenth, starting at a line if possible, else at a character."""
    size = file.stop
    cut = size - max(int(size * VALIDATION), 1)
    with open_file(file.path) as handle:
        handle.seek(cut)
        ahead = handle.read(PIECE)
        line = cut + ahead.find(b"\n") + 1
        if cut < line < size:
            cut = line
        else:
            handle.seek(max(cut - 3, 0))
            cut = max(cut - 3, 0) + _character_start(handle.read(4), cut - max(cut - 3, 0))
    parts = {"train": replace(file, stop=cut), "validation": replace(file, start=cut)}
    return {split: [part] if part.start < part.stop else [] for split, part in parts.items()}


def _character_start(text: bytes, cut: int) -> int:
    """The last index at or before `cut` that is not inside a UTF-8 character."""
    start = cut
    while start > 0 and (start == len(text) or text[start] & 0xC0 == 0x80):
        start -= 1
    if cut < len(text):
        return start
    try:  # at the very end the last character may be complete
        text[start:].decode()
    except UnicodeDecodeError:
        return start
    return cut


def _chunks(file: TextFile) -> Iterator[bytes]:
    with open_file(file.path) as handle:
        handle.seek(file.start)
        left = file.stop - file.start
        while left:
            chunk = handle.read(min(PIECE, left))
            if not chunk:
                raise ValueError(f"{show(file.path)} became shorter while it was read; try again when it is complete")
            left -= len(chunk)
            yield chunk
