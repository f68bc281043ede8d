"""Folders that are written once: filled under a temporary name, synced, then renamed. `meta.json` lists their files.

    <name>.<pid>-<random>.tmp/  --fill-->  --fsync-->  --rename-->  <name>/

A folder under its final name is therefore complete, even if a process was killed. If two processes start together, one
waits for the other. On a file system without locks both fill a folder, and the second rename has no effect.

A folder that was changed later is filled again: JSON files contain their own checksum, and a file whose time or size is
another one is hashed.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec
from filelock import FileLock
from platformdirs import user_cache_path

from trimtab.data.files import expand_home, hash_file, require_json, show

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class FileMark(TypedDict):
    """A file of a folder, as it was written."""

    bytes: int
    mtime_ns: int
    sha256: Sha256


class Meta(TypedDict):
    """The `meta.json` of every folder."""

    files: dict[str, FileMark]  # the others


T = TypeVar("T")
M = TypeVar("M", bound=Meta)


def cache_dir(cache: str | Path | None = None) -> Path:
    """The given folder, or $XDG_CACHE_HOME/trimtab, or the system's cache folder (Linux: ~/.cache/trimtab)."""
    if cache is not None:
        return expand_home(cache)
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return expand_home(chosen) / "trimtab"
    try:
        found = user_cache_path("trimtab", appauthor=False)
    except RuntimeError:
        found = Path("~")  # what older versions of platformdirs return
    if not found.is_absolute():
        raise ValueError(
            f"no home folder for the cache (HOME={os.environ.get('HOME')!r}); set XDG_CACHE_HOME, or give cache=..."
        )
    return found


def read_meta(folder: Path, kind: type[M]) -> M | None:
    """The `meta.json` of a folder, or None unless all files in it are there as they were written."""
    meta = read_json(folder / "meta.json", kind)
    try:
        with os.scandir(folder) as entries:
            found = {file.name: file for file in entries if file.is_file(follow_symlinks=False)}
            # Names in the JSON are compared and never opened: they cannot lead out of the folder.
            same = meta is not None and all(n in found and _is_same(found[n], x) for n, x in meta["files"].items())
    except (OSError, ValueError):
        return None
    return meta if same else None


def _is_same(file: "os.DirEntry[str]", mark: FileMark) -> bool:
    stat = file.stat()
    if (stat.st_size, stat.st_mtime_ns) == (mark["bytes"], mark["mtime_ns"]):
        return True
    return stat.st_size == mark["bytes"] and hash_file(Path(file.path)) == mark["sha256"]  # a copy has another time


def build_folder(target: Path, fill: Callable[[Path], dict[str, Any]], load: Callable[[Path], T | None]) -> T:
    """Return `load(target)`. If that is None, `fill(empty folder)` writes the files and returns their meta."""
    found = load(target)
    if found is not None:
        return found
    with explained(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target) as alone:
            if alone:  # remove what killed processes left: no other process is writing
                for left in target.parent.glob(f"{target.name}.*.tmp"):
                    _remove(left)
            found = load(target)
            if found is not None:  # built by the process that held the lock before
                return found
            work = _temporary(target)
            try:
                work.mkdir()
                meta = fill(work)
                meta["files"] = {path.name: _mark(path) for path in work.iterdir()}
                write_json(work / "meta.json", meta)
                _sync(work)
                _rename(work, target, load)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            found = load(target)
            if found is None:
                raise ValueError(f"the cache {show(target)} changed while it was written; try again, or give cache=...")
            return found


def _mark(path: Path) -> FileMark:
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": hash_file(path)}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a small file atomically, with the checksum of its content."""
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        work = _temporary(path)
        try:
            work.write_text(json.dumps({**value, "checksum": _checksum(value)}, indent=1), encoding="utf-8")
            if path.is_dir():  # a file cannot replace it
                _remove(path)
            os.replace(work, path)
        finally:
            work.unlink(missing_ok=True)


def read_json(path: Path, kind: type[T]) -> T | None:
    """Read what `write_json` wrote; None if it is missing, damaged or of another shape: the caller builds it again."""
    try:
        data = require_json(path, dict[str, Any], "file of the cache")
        return msgspec.convert(data, kind) if data.pop("checksum", None) == _checksum(data) else None
    except (ValueError, RecursionError):
        return None


def _checksum(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an OSError of the cache folder into one line with a remedy. Errors of other files are raised unchanged."""
    try:
        yield
    except OSError as error:
        path = None if error.filename is None else Path(error.filename)
        if path is not None and not path.is_relative_to(folder) and path not in folder.parents:
            raise
        raise ValueError(
            f"cannot write the cache {show(folder)}: {error.strerror or error}; "
            "give another folder with cache=..., or set XDG_CACHE_HOME"
        ) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


@contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Hold the lock of a folder. Yields False if the file system has no locks."""
    lock = FileLock(target.with_name(f"{target.name}.lock"))
    with suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        # Windows cannot open folders, and needs a writable handle to sync a file.
        with suppress(PermissionError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _rename(work: Path, target: Path, load: Callable[[Path], object]) -> None:
    try:
        os.rename(work, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.ENOTDIR):
            raise
        if load(target) is not None:
            return
        # The target exists and is incomplete, for example after a full disk: replace it.
        aside = work.with_name(f"{work.name}.old.tmp")
        os.rename(target, aside)
        os.rename(work, target)
        _remove(aside)


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, not what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
