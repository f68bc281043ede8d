"""Folders that are written once: filled under a temporary name, synced, then renamed.

    <name>.<pid>-<random>.tmp/  --fill-->  --fsync-->  --rename-->  <name>/

A folder under its final name is therefore whole, whoever was killed. Of two processes that start at once one waits
for the other; on a file system without locks both fill a folder of their own and the second rename loses, which costs
time and nothing else.
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

try:
    import fcntl
except ImportError:  # Windows: no advisory locks, see above
    fcntl = None  # type: ignore[assignment]


def cache_dir(cache: str | Path | None = None) -> Path:
    """The given folder, or $XDG_CACHE_HOME/trimtab, or ~/.cache/trimtab."""
    if cache is not None:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab"


def build_folder(target: Path, fill: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> None:
    """Make `target` a folder that `is_whole`, calling `fill(empty folder)` unless it already is one."""
    if is_whole(target):
        return
    with explained(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target) as alone:
            if alone:
                _sweep(target)
            if is_whole(target):  # the process we waited for has made it
                return
            work = target.with_name(f"{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
            try:
                work.mkdir()
                fill(work)
                _sync(work)
                _rename(work, target, is_whole)
            finally:
                shutil.rmtree(work, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write a small file so that no reader ever sees half of it."""
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            work.write_text(json.dumps(value, indent=1), encoding="utf-8")
            os.replace(work, path)
        finally:
            work.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None where there is nothing readable, which means: make it again."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn the system's refusal to write in the cache into one line that says what to do."""
    try:
        yield
    except OSError as error:
        # A source that cannot be read is another matter, and its error names the file.
        if error.filename is not None and not Path(error.filename).is_relative_to(folder):
            blocked = any(parent == Path(error.filename) for parent in folder.parents)
            if not blocked:
                raise
        raise ValueError(
            f"cannot write the cache {folder}: {error.strerror or error}; "
            "give another folder with cache=..., or set XDG_CACHE_HOME"
        ) from error


@contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Hold the lock of a folder; False where the system has none. The lock dies with its process."""
    if fcntl is None:
        yield False
        return
    with open(target.with_name(f"{target.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            alone = True
        except OSError:  # some network file systems
            alone = False
        yield alone


def _sweep(target: Path) -> None:
    """Remove what killed processes left. Only the holder of the lock may: nobody else is writing."""
    for left in target.parent.glob(f"{target.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        # Windows opens no folders, and needs a writable handle to sync a file.
        with suppress(PermissionError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _rename(work: Path, target: Path, is_whole: Callable[[Path], bool]) -> None:
    try:
        os.rename(work, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.ENOTDIR):
            raise
        if is_whole(target):
            return
        # Something is in the way that is not whole, say a file cut by a full disk: it makes room.
        aside = work.with_name(f"{work.name}.old.tmp")
        os.rename(target, aside)
        os.rename(work, target)
        shutil.rmtree(aside, ignore_errors=True)
