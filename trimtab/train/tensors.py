"""Models and optimizers as named tensors, and the safetensors files that hold them."""

import json
import struct
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.runs.files import HashedWriter

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used. The message names the problem and a checkpoint that can be used instead."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a new file; returns its entry in a manifest.

    `safetensors.torch.save_file` needs all tensors in CPU memory at once, and it neither hashes nor syncs the file.
    """
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


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with the names of the model itself, without the prefixes of wrappers."""
    state = {}
    for name, x in model.state_dict().items():
        while name.startswith(("module.", "_orig_mod.")):
            name = name.split(".", 1)[1]
        state[name.replace("._orig_mod.", ".")] = x
    return state


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    mine = plain_state(model)
    missing, extra = mine.keys() - tensors.keys(), tensors.keys() - mine.keys()
    if missing or extra:
        what = f"lacks {sorted(missing)[0]}" if missing else f"has {sorted(extra)[0]}, which the model does not have"
        raise CheckpointError(f"the checkpoint {what}; was it saved by another model?")
    for name, x in mine.items():
        saved = tensors[name]
        if saved.shape != x.shape:
            raise CheckpointError(f"{name} has shape {tuple(saved.shape)} in the checkpoint, {tuple(x.shape)} here")
        with torch.no_grad():
            x.copy_(_shard_like(saved, x))


def _shard_like(saved: Tensor, x: Tensor) -> Tensor:
    """A whole tensor, sharded as `x` is."""
    if not hasattr(x, "device_mesh") or hasattr(saved, "device_mesh"):
        return saved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved.to(x.device), x.device_mesh, x.placements, src_data_rank=None)  # type: ignore[attr-defined]


# --- Optimizers: tensors and JSON apart, so that no pickle is needed


def optimizer_tensors(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{place}.{key}": x for place, entry in state_dict["state"].items() for key, x in entry.items()}


def optimizer_state(tensors: Mapping[str, Tensor], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict from its tensors and groups. JSON has no tuples, so lists other than these become tuples again."""
    lists = ("params", "param_names", "moments")
    state: dict[int, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        place, key = name.split(".", 1)
        state.setdefault(int(place), {})[key] = x
    restored = [
        {key: tuple(v) if isinstance(v, list) and key not in lists else v for key, v in group.items()}
        for group in groups
    ]
    return {"state": state, "param_groups": restored}


# --- Shards


def write_shards(folder: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Each process writes its shards. If one of them cannot write, all raise OSError."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"{part}.{name}": x for part, named in parts.items() for name, x in named.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:  # not an Exception; all processes raise it with the causes of each
        causes = [cause for cause, _ in error.failures.values()]
        disk = next((cause for cause in causes if isinstance(cause, OSError)), None)
        raise (disk or RuntimeError(f"the checkpoint was not written: {causes[0]}")) from None


def read_shards(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of model and optimizer, sharded as this process needs them."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    mine = plain_state(model)
    params = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    targets: dict[str, Tensor] = {}
    for full_name, entry in saved.items():
        part, name = full_name.split(".", 1)
        if part == "optimizer" and optimizer is None:
            continue
        like = mine.get(name) if part == "model" else params[int(name.split(".")[0])]
        dtype = entry.properties.dtype
        if like is not None and like.shape == entry.size:
            dtype = like.dtype if part == "model" else dtype
            targets[full_name] = torch.zeros_like(like, dtype=dtype).detach()
        else:
            targets[full_name] = torch.zeros(entry.size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(targets, storage_reader=reader, no_dist=not dist.is_initialized())
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for full_name, x in targets.items():
        part, name = full_name.split(".", 1)
        parts[part][name] = x
    return parts["model"], parts["optimizer"]
