"""Files that are complete or absent (written under a temporary name, synced, renamed), and the lock of a folder."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

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


def replace_json(path: Path, data: Any) -> None:
    replace_bytes(path, json.dumps(data, indent=1).encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new one."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
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


def sha256_of(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file is missing or holds anything else."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Use a folder exclusively. Raises RunError if another process uses it.

    The operating system releases the lock when the process ends, however it ends. Forked children do not hold it.
    A folder that was created here and is still empty at the end is removed.
    """
    owner, lock = folder / ".owner", FileLock(folder / ".lock", blocking=False)
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        who = owner.read_text() if owner.exists() else "another process"
        raise RunError(f"{folder} is in use by {who}; wait for it, or use another folder") from None
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        with contextlib.suppress(OSError):  # the name is only for the message; the disk may be full
            owner.write_text(f"process {os.getpid()}")
        yield
    finally:
        with contextlib.suppress(OSError):
            owner.unlink(missing_ok=True)
            Path(lock.lock_file).unlink(missing_ok=True)  # before the release: filelock discards a lock without a name
        lock.release()
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
