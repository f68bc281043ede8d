"""Optimizer state in a memory-mapped file: `offload=folder`. For states that do not fit in memory.

    folder/state.bin     the moments of all parameters, one after the other; the kernel works on the mapped pages
    folder/state.json    whose they are: optimizer, names, dtypes and shapes
    folder/state.lock    held as long as the optimizer exists

The file is memory, not a checkpoint: it is never read back. A process that is killed during a step leaves it half
written, so a new optimizer starts with empty state, and a resume loads a `state_dict()`, as without offload.

The space is allocated on the disk when the optimizer is made. A full disk is an error then, before any parameter has
changed; a sparse file would end the process with SIGBUS in the middle of a step.
"""

import json
import mmap
import os
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


class MappedState:
    """Space on the disk for the pieces of each parameter."""

    def __init__(self, folder: Path, optimizer: str, pieces: Sequence[tuple[Tensor, Piece]]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / "state.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"{folder} is in use by another optimizer or process; give each its own folder (offload=...)"
            ) from None
        try:
            self._claim(optimizer, [piece for _, piece in pieces])
            starts, total = _lay_out([piece for _, piece in pieces])
            self._map = _allocate(folder / "state.bin", total)
        except BaseException:
            self._lock.release()
            raise
        self._places = {(p, piece.key): (piece, start) for (p, piece), start in zip(pieces, starts, strict=True)}
        self._settled: dict[tuple[Tensor, str], Tensor] = {}

    def settle(self, p: Tensor, state: dict[str, Any]) -> None:
        """Move this state into the file, except what is there already."""
        for key in state:
            place = self._places.get((p, key))
            if place is None or state[key] is self._settled.get((p, key)):
                continue
            value, (piece, start) = state[key], place
            if value.dtype != piece.dtype or value.numel() != piece.numel:
                raise ValueError(
                    f"{key} of {piece.name} has {value.numel()} values of {value.dtype}, the file has room for "
                    f"{piece.numel} of {piece.dtype}; build a new optimizer after replacing parameters"
                )
            mapped = torch.frombuffer(self._map, dtype=piece.dtype, count=piece.numel, offset=start)
            mapped.copy_(flat(value).view(-1))
            state[key] = self._settled[p, key] = mapped.as_strided(value.shape, value.stride())

    def close(self) -> None:
        """Release the lock. The mapped tensors stay valid."""
        self._lock.release()

    def _claim(self, optimizer: str, pieces: Sequence[Piece]) -> None:
        """Refuse a file with the state of something else; it may be the only copy."""
        path = self.folder / "state.json"
        tensors = [[piece.name, piece.key, str(piece.dtype), piece.numel] for piece in pieces]
        mine = {"optimizer": optimizer, "tensors": tensors}
        if not path.exists():
            if (self.folder / "state.bin").exists():
                raise ValueError(f"{self.folder / 'state.bin'} exists without its state.json; choose another folder")
            path.write_text(json.dumps(mine))
            return
        try:
            found = json.loads(path.read_text())
        except ValueError:
            found = {}
        if found != mine:
            raise ValueError(
                f"{self.folder} holds the state of another run ({_difference(found, mine)}); choose another folder, or "
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


def _difference(found: Any, mine: dict[str, Any]) -> str:
    if not isinstance(found, dict) or found.keys() != mine.keys():
        return "its state.json cannot be read"
    if found["optimizer"] != mine["optimizer"]:
        return f"of {found['optimizer']}, not {mine['optimizer']}"
    for theirs, ours in zip(found["tensors"], mine["tensors"], strict=False):
        if theirs != ours:
            return f"{theirs} where this optimizer has {ours}"
    return f"{len(found['tensors'])} tensors, not {len(mine['tensors'])}"


def check_offload(offload: Any, params: Sequence[Tensor]) -> Path:
    """The folder. Refuses what has no kernel."""
    devices = {local(p).device.type for p in params}
    if offload == "cpu":
        if devices == {"cpu"}:
            raise ValueError(
                "offload='cpu' keeps state in host memory, where the state of CPU parameters is already; pass a folder "
                "to keep it in a memory-mapped file"
            )
        raise ValueError(
            "offload='cpu' is not supported: the GPU kernels read state in device memory. Use bits=8, which needs a "
            "quarter of the memory"
        )
    if not isinstance(offload, str | os.PathLike):
        raise TypeError(f"offload must be a folder, got {type(offload).__name__}")
    if devices - {"cpu"}:
        raise ValueError(
            f"offload={str(offload)!r} is for parameters on the CPU, and some are on {', '.join(sorted(devices))}: the "
            "GPU kernels read state in device memory. Use bits=8 there"
        )
    if not hasattr(os, "posix_fallocate"):
        raise ValueError("offload needs posix_fallocate, which this system does not have; leave it out")
    return Path(offload)
