"""Files that are complete or absent (written under a temporary name, synced, renamed), and the lock of a folder."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

CHECKSUM = "checksum"  # a key of sealed objects
_TEMPORARY = ".tmp-"  # in the names of files that are not complete yet
_MOST_LEVELS = 64  # of nested JSON
_PIECE = 64 << 20  # bytes that are written and hashed at the same time


class RunError(RuntimeError):
    """A run or study folder that cannot be used."""


class HashedWriter:
    """A new file; its sha256 is computed while it is written, on a second thread."""

    def __init__(self, path: Path) -> None:
        self.path, self.sha, self.bytes = path, hashlib.sha256(), 0

    def __enter__(self) -> "HashedWriter":
        self.file = self.path.open("xb", buffering=0)
        self.hasher, self.syncer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.unsynced, self.syncing = 0, list[Future[None]]()
        return self

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            hashing = self.hasher.submit(self.sha.update, piece)
            try:
                written = 0
                while written < len(piece):
                    written += self.file.write(piece[written:])
            finally:
                hashing.result()
            self.unsynced += len(piece)
            if self.unsynced >= _PIECE:  # sync while the next piece is hashed
                self.syncing.append(self.syncer.submit(os.fsync, self.file.fileno()))
                self.unsynced = 0
        self.bytes += len(view)

    def __exit__(self, *error: object) -> None:
        self.hasher.shutdown()
        self.syncer.shutdown()
        try:
            if error == (None, None, None):
                for done in self.syncing:
                    done.result()  # a full disk may be reported only here
                os.fsync(self.file.fileno())
        finally:
            self.file.close()

    @property
    def entry(self) -> dict[str, Any]:
        """The file's entry in a manifest."""
        return {"sha256": self.sha.hexdigest(), "bytes": self.bytes}


def write_json(path: Path, data: Any) -> dict[str, Any]:
    """Write a new file; returns its entry in a manifest."""
    with HashedWriter(path) as out:
        out.write(json.dumps(data, indent=1).encode())
    return out.entry


def replace_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file by an object and its checksum."""
    replace_bytes(path, json.dumps(seal(data), indent=1).encode())


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """The object with the sha256 of its canonical JSON, by which a later change is detected. It is not a signature."""
    return {**data, CHECKSUM: _checksum(data)}


def _checksum(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new one."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with HashedWriter(temporary) as out:
            out.write(data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder: a rename is durable only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file to read it. Pipes and devices, which may never end, raise OSError."""
    file = open(path, "rb", opener=_no_wait)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return file


def _no_wait(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # or a pipe that nobody writes to would block


def sha256_of(path: Path) -> str:
    sha = hashlib.sha256()
    with open_file(path) as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


def require_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, without its checksum; files of older versions have none. Raises RunError."""
    try:
        with open_file(path) as file:
            data = json.loads(file.read())
        _check_depth(data)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RunError(f"{path} is damaged: it is not JSON, or nested too deeply") from None
    if not isinstance(data, dict):
        raise RunError(f"{path} is damaged: it holds no JSON object")
    checksum = data.pop(CHECKSUM, None)
    if checksum is not None and checksum != _checksum(data):
        raise RunError(f"{path} was changed after it was written: its checksum does not match; restore it from a copy")
    return data


def _check_depth(data: Any) -> None:
    """Raise ValueError for nesting that functions which call themselves cannot follow."""
    level = [data]
    for _ in range(_MOST_LEVELS):
        nested = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level = list(itertools.chain.from_iterable(nested))
    if level:
        raise ValueError(f"nested deeper than {_MOST_LEVELS} levels")


def read_json(path: Path) -> dict[str, Any] | None:
    """As `require_json`, but None if the file is missing or damaged."""
    try:
        return require_json(path)
    except RunError:
        return None


def check_ours(folder: Path, *marks: str) -> None:
    """Raise RunError if a folder holds files of somebody else: it is not empty, and has none of the files `marks`."""
    try:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from None
    foreign = [name for name in names if not name.startswith(".")]
    if foreign and not {*marks} & {*names}:
        raise RunError(f"{folder} holds {foreign[0]} and no {marks[0]}, so it is not ours; use an empty folder")


def claim_folder(parent: Path, name: str) -> Path:
    """Create the first of `name`, `name-2`, `name-3`, ... that does not exist. Two processes get two folders."""
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"cannot write to {folder}: {error.strerror}") from None
    raise AssertionError


def remove_temporary(folder: Path) -> None:
    """Remove the files that killed processes have left. A report may be written while a study is locked, so the files
    of processes that still run are kept."""
    for left in folder.glob(f".*{_TEMPORARY}*"):
        owner = left.name.rpartition(_TEMPORARY)[2]
        if not (owner.isdecimal() and _is_running(int(owner))):
            with contextlib.suppress(OSError):
                left.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # a process of another user
    return process != os.getpid()


@contextmanager
def lock_folder(folder: Path, *, numbered: bool = False) -> Iterator[Path]:
    """Use a folder exclusively. Raises RunError if another process uses it. With `numbered` the folder is a new one,
    as `claim_folder` names it.

    The operating system releases the lock when the process ends, however it ends. Forked children do not hold it.
    Temporary files of killed processes are removed. A folder that was created here and is empty at the end, too.
    """
    existed = not numbered and folder.exists()
    folder = claim_folder(folder.parent, folder.name) if numbered else folder
    owner, lock = folder / ".owner", FileLock(folder / ".lock", blocking=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        who = "another process"
        with contextlib.suppress(OSError, ValueError):
            who = f"process {int(owner.read_text())}"
        raise RunError(f"{folder} is in use by {who}; wait for it, or use another folder") from None
    except NotImplementedError:
        raise RunError(f"cannot lock {folder}: its file system has no locks; use a folder on another disk") from None
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        remove_temporary(folder)
        with contextlib.suppress(OSError):  # the name is only for the message; the disk may be full
            owner.unlink(missing_ok=True)  # it may be a link to another file
            owner.write_text(str(os.getpid()))
        yield folder
    finally:
        with contextlib.suppress(OSError):
            owner.unlink(missing_ok=True)
            Path(lock.lock_file).unlink(missing_ok=True)  # before the release: filelock discards a lock without a name
        lock.release()
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
