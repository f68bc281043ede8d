"""Parameters that are sharded over processes, with an unusual memory order, or on a device without float64.

Under FSDP2 a parameter is a DTensor and each process holds one shard of it. Updates are elementwise, so they work on
shards. Statistics of whole tensors (RMS_t, LAMB's norms) are sums: the sums of all shards of one step are added across
processes in one collective.

Apple's GPUs ("mps") have no float64: numbers per tensor (steps, coefficients, sums) are then computed on the CPU.
"""
# mypy: disable-error-code="no-any-return"
# (DTensor is not imported here, so its methods are untyped)

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def is_sharded(x: object) -> bool:
    """Whether `x` is a DTensor. Its module is slow to import, and without it there is no DTensor."""
    if type(x) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Any) -> Tensor:
    """This process's shard, or the tensor itself."""
    return x.to_local() if is_sharded(x) else x


def home_of_numbers(device: torch.device) -> torch.device:
    """Where the numbers of a tensor on this device are computed, in float64."""
    return torch.device("cpu") if device.type == "mps" else device


def widen(x: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return x.float() if x.device.type == "mps" else x.double()


def flat(x: Tensor) -> Tensor:
    """A contiguous view in memory order, of a tensor without gaps (channels_last, transposed)."""
    return x if x.is_contiguous() else x.as_strided((x.numel(),), (1,))


def is_dense(x: Tensor) -> bool:
    """Without gaps or overlaps: only then does `empty_like` keep the strides."""
    return x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()


def sharded_dims(p: Any) -> tuple[int, ...]:
    """The mesh dimensions over which the tensor is sharded."""
    return tuple(i for i, placement in enumerate(p.placements) if placement.is_shard())


def add_up_shards(params: Sequence[Tensor], values: Tensor, *, largest: bool = False) -> Tensor:
    """Turn each row of `values` [tensors, k] from that of the shard into that of the whole tensor, in float64.

    Values are sums, or maxima if `largest`. One collective for all tensors that are sharded alike; none for the others.
    """
    ways: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for i, p in enumerate(params):
        if is_sharded(p):
            ways.setdefault((p.device_mesh, sharded_dims(p)), []).append(i)  # type: ignore[attr-defined]
    values = values.to(home_of_numbers(values.device)).double()
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    for (mesh, dims), rows in ways.items():
        part = values[rows]
        for dim in dims:
            torch.distributed.all_reduce(part, op=op, group=mesh.get_group(dim))
        values[rows] = part
    return values


def wrap_like(shard: Tensor, p: Any) -> Tensor:
    """A DTensor of this process's shard, sharded like the parameter; the tensor itself if `p` is not sharded."""
    if not is_sharded(p):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def shard_like(x: Any, p: Any) -> Tensor:
    """This process's part of a whole or differently sharded tensor, for a parameter that may be sharded."""
    if not is_sharded(p):
        return x.full_tensor() if is_sharded(x) else x
    if is_sharded(x):
        alike = x.placements == p.placements and x.device_mesh == p.device_mesh
        return local(x if alike else x.redistribute(p.device_mesh, p.placements))
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor, so nothing is sent.
    return local(distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None))
