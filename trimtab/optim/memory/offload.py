"""Optimizer state outside the memory of the parameters: in a memory-mapped file (a folder), or in host memory ("cpu").

    folder/state.bin     the moments of all parameters, one after the other; the kernel works on the mapped pages
    folder/state.json    whose they are: optimizer, names, dtypes and shapes
    folder/state.lock    held as long as the optimizer exists

The file is memory, not a checkpoint: it is never read back. A process that is killed during a step leaves it half
written, so a new optimizer starts with empty state, and a resume loads a `state_dict()`, as without offload.

The space is allocated on the disk when the optimizer is made. A full disk is an error then, before any parameter has
changed; a sparse file would end the process with SIGBUS in the middle of a step.

Host memory is page-locked for CUDA, so that copies run at the full rate of the bus. A step copies the state of
parameters on a GPU to the device and back, window by window (trimtab/ops/step/windows.py).
"""

import json
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from trimtab.ops.sharding import flat, local

ALIGNED = 64  # bytes


class Piece(NamedTuple):
    """One state tensor of one parameter."""

    name: str  # of the parameter
    key: str  # in its state
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Offloaded:
    """Space for the pieces of each parameter."""

    def __init__(self, where: Path | None, optimizer: str, pieces: Sequence[tuple[Tensor, Piece]]) -> None:
        """`where` is a folder, or None for host memory."""
        listed = [piece for _, piece in pieces]
        starts, total = _lay_out(listed)
        self._lock = None if where is None else _claim(where, optimizer, listed)
        try:
            self._map = _allocate_locked(total) if where is None else _allocate(where / "state.bin", total)
        except BaseException:
            self.close()
            raise
        self._places = {(p, piece.key): (piece, start) for (p, piece), start in zip(pieces, starts, strict=True)}
        self._settled: dict[tuple[Tensor, str], Tensor] = {}

    def settle(self, p: Tensor, state: dict[str, Any]) -> None:
        """Move this state there, except what is there already."""
        for key in state:
            place = self._places.get((p, key))
            if place is None or state[key] is self._settled.get((p, key)):
                continue
            value, (piece, start) = state[key], place
            if value.dtype != piece.dtype or value.numel() != piece.numel:
                raise ValueError(
                    f"{key} of {piece.name} has {value.numel()} values of {value.dtype}, but there is room for "
                    f"{piece.numel} of {piece.dtype}; build a new optimizer after replacing parameters"
                )
            room = torch.empty(0, dtype=piece.dtype, device="cpu")  # `frombuffer` refuses to return this
            if piece.numel:
                room = torch.frombuffer(self._map, dtype=piece.dtype, count=piece.numel, offset=start)
            room.copy_(flat(value).view(-1))
            state[key] = self._settled[p, key] = room.as_strided(value.shape, value.stride())

    def close(self) -> None:
        """Release the lock. The tensors stay valid."""
        if self._lock is not None:
            self._lock.release()


def _claim(folder: Path, optimizer: str, pieces: Sequence[Piece]) -> FileLock:
    """Lock the folder. Refuse a file with the state of something else; it may be the only copy."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "state.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by another optimizer or process; give each its own folder (offload=...)"
        ) from None
    try:
        _check_owner(folder, optimizer, pieces)
    except BaseException:
        lock.release()
        raise
    return lock


def _check_owner(folder: Path, optimizer: str, pieces: Sequence[Piece]) -> None:
    path = folder / "state.json"
    tensors = [[piece.name, piece.key, str(piece.dtype), piece.numel] for piece in pieces]
    mine = {"optimizer": optimizer, "tensors": tensors}
    if not path.exists():
        if (folder / "state.bin").exists():
            raise ValueError(f"{folder / 'state.bin'} exists without its state.json; choose another folder")
        path.write_text(json.dumps(mine))
        return
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = {}
    if found != mine:
        raise ValueError(
            f"{folder} holds the state of another run ({_difference(found, mine)}); choose another folder, or "
            "delete this one if its run has ended"
        )


def _lay_out(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """Where each piece starts, and the bytes of all."""
    starts, total = [], 0
    for piece in pieces:
        starts.append(total)
        total += -(-piece.nbytes // ALIGNED) * ALIGNED
    return starts, max(total, ALIGNED)


def _allocate(path: Path, size: int) -> mmap.mmap:
    """A file of this size whose every block is on the disk, mapped into memory."""
    new = not path.exists()
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    except OSError as error:
        if new:
            path.unlink()
            (path.parent / "state.json").unlink()
        raise OSError(
            error.errno,
            f"cannot allocate {size:,} bytes of optimizer state in {path.parent} ({error.strerror}); no parameter has "
            "changed. Free space, or choose a folder on another disk (offload=...)",
        ) from None
    finally:
        os.close(file)


class _Memory(mmap.mmap):
    """Host memory that CUDA unlocks before it is returned to the system.

    If CUDA still had it locked, its pages would not be freed, and the next mapping at this address could not be locked.
    """

    locked: tuple[int, int] | None = None  # the address, and the process: a fork has the object, but not the lock

    def __del__(self) -> None:
        if self.locked is not None and self.locked[1] == os.getpid() and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.locked[0])


def _allocate_locked(size: int) -> mmap.mmap:
    """Memory that the GPU's copy engine can read directly."""
    memory = _Memory(-1, size)
    if torch.cuda.is_available():
        # Not pin_memory: its allocator rounds up to a power of two.
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        memory.locked = None if int(status) else (address, os.getpid())
        if int(status) != 0:
            raise MemoryError(
                f"cannot lock {size:,} bytes of host memory for optimizer state (CUDA error {int(status)}); pass a "
                "folder to keep the state in a memory-mapped file, which is not locked (offload=...)"
            )
    return memory


def _difference(found: Any, mine: dict[str, Any]) -> str:
    if not isinstance(found, dict) or found.keys() != mine.keys():
        return "its state.json cannot be read"
    if found["optimizer"] != mine["optimizer"]:
        return f"of {found['optimizer']}, not {mine['optimizer']}"
    for theirs, ours in zip(found["tensors"], mine["tensors"], strict=False):
        if theirs != ours:
            return f"{theirs} where this optimizer has {ours}"
    return f"{len(found['tensors'])} tensors, not {len(mine['tensors'])}"


def check_offload(offload: Any, params: Sequence[Tensor]) -> Path | None:
    """The folder, or None for host memory."""
    if offload == "cpu":
        if {local(p).device.type for p in params} == {"cpu"}:
            raise ValueError(
                "offload='cpu' keeps state in host memory, where the state of CPU parameters is already; pass a folder "
                "to keep it in a memory-mapped file"
            )
        return None
    if not isinstance(offload, str | os.PathLike):
        raise TypeError(f"offload must be a folder or 'cpu', got {type(offload).__name__}")
    if not hasattr(os, "posix_fallocate"):
        raise ValueError("offload needs posix_fallocate, which this system does not have; leave it out")
    return Path(offload)
