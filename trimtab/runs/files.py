"""Files that are whole or not there: written under another name, synced, then renamed; tensors without pickles.

Tensors go into safetensors files, hashed while they are written: the hash costs no second reading, and no time where
a second core is free.
"""

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE = 64 << 20  # bytes written and hashed side by side


class HashedWriter:
    """A new file whose sha256 is known when it is closed."""

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
            if self.unsynced >= _PIECE:  # the disk works while we hash what comes next
                self.syncing.append(self.syncer.submit(os.fsync, self.file.fileno()))
                self.unsynced = 0
        self.bytes += len(view)

    def __exit__(self, *error: object) -> None:
        self.hasher.shutdown()
        self.syncer.shutdown()
        try:
            if error == (None, None, None):
                for done in self.syncing:
                    done.result()  # a disk may say only now that it is full
                os.fsync(self.file.fileno())
        finally:
            self.file.close()

    @property
    def entry(self) -> dict[str, Any]:
        """What a manifest says of the file."""
        return {"sha256": self.sha.hexdigest(), "bytes": self.bytes}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file; returns its entry in a manifest. One tensor at a time, so nothing is copied whole."""
    header, offset = dict[str, Any](), 0
    for name, x in tensors.items():
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashedWriter(path) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            if x.numel():
                out.write(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return out.entry


def read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def write_json(path: Path, data: Any) -> dict[str, Any]:
    with HashedWriter(path) as out:
        out.write(json.dumps(data, indent=1).encode())
    return out.entry


def replace_json(path: Path, data: Any) -> None:
    replace_bytes(path, json.dumps(data, indent=1).encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file anew: whoever reads sees the old one or the new one."""
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
    """A rename is safe only when the folder that holds the name is on the disk."""
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
