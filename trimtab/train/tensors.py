"""Tensors in safetensors files, written one tensor at a time and hashed while they are written.

`safetensors.torch.save_file` needs all tensors in CPU memory at once, and it neither hashes nor syncs the file.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as read_tensors
from torch import Tensor

from trimtab.runs.files import HashedWriter

__all__ = ["read_tensors", "write_tensors"]

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a new file; returns its entry in a manifest."""
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
