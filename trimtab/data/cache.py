"""Folders that are written once: filled under a temporary name, synced, then renamed. `meta.json` has their file sizes.

    <name>.<pid>-<random>.tmp/  --fill-->  --fsync-->  --rename-->  <name>/

A folder under its final name is therefore complete, even if a process was killed. If two processes start together, one
waits for the other. On a file system without locks both fill a folder, and the second rename has no effect.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path


def cache_dir(cache: str | Path | None = None) -> Path:
    """The given folder, or $XDG_CACHE_HOME/trimtab, or the system's cache folder (Linux: ~/.cache/trimtab)."""
    if cache is not None:
        return Path(cache).expanduser()
    chosen = os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) / "trimtab" if chosen else user_cache_path("trimtab", appauthor=False)


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The `meta.json` of a folder, or None unless all files have the sizes in it."""
    meta = read_json(folder / "meta.json")
    files = [] if meta is None else [(folder / name, size) for name, size in meta["bytes"].items()]
    return meta if all(path.is_file() and path.stat().st_size == size for path, size in files) else None


def build_folder(target: Path, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the meta of `target`. If incomplete, `fill(empty folder)` writes its files and returns its meta."""
    meta = read_meta(target)
    if meta is not None:
        return meta
    with explained(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target) as alone:
            if alone:  # remove what killed processes left: no other process is writing
                for left in target.parent.glob(f"{target.name}.*.tmp"):
                    shutil.rmtree(left, ignore_errors=True)
            meta = read_meta(target)
            if meta is not None:  # built by the process that held the lock before
                return meta
            work = _temporary(target)
            try:
                work.mkdir()
                meta = fill(work)
                meta["bytes"] = {path.name: path.stat().st_size for path in work.iterdir()}
                write_json(work / "meta.json", meta)
                _sync(work)
                _rename(work, target)
                return meta
            finally:
                shutil.rmtree(work, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write a small file atomically."""
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        work = _temporary(path)
        try:
            work.write_text(json.dumps(value, indent=1), encoding="utf-8")
            os.replace(work, path)
        finally:
            work.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read what `write_json` wrote; None if it is missing or damaged, so that the caller builds it again."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


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
            f"cannot write the cache {folder}: {error.strerror or error}; "
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


def _rename(work: Path, target: Path) -> None:
    try:
        os.rename(work, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.ENOTDIR):
            raise
        if read_meta(target) is not None:
            return
        # The target exists and is incomplete, for example after a full disk: replace it.
        aside = work.with_name(f"{work.name}.old.tmp")
        os.rename(target, aside)
        os.rename(work, target)
        shutil.rmtree(aside, ignore_errors=True)
