"""Parameters that live on several processes, and parameters whose memory is not in the usual order.

Under FSDP2 a parameter is a DTensor and this process holds one shard of it. The update is element by element, so it
works on shards; what a rule needs to know of the whole tensor (RMS_t, LAMB's norms) is a sum, and sums of shards are
added up across processes, all of one step's in one collective.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def is_sharded(x: object) -> bool:
    """A DTensor. Importing its module takes long, and there is none before somebody imported it."""
    if type(x) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Any) -> Tensor:
    """What this process holds of it."""
    return x.to_local() if is_sharded(x) else x


def flat(x: Tensor) -> Tensor:
    """A contiguous view in memory order, of a tensor without gaps (channels_last, transposed)."""
    return x if x.is_contiguous() else x.as_strided((x.numel(),), (1,))


def is_dense(x: Tensor) -> bool:
    """Without gaps or overlaps: only then does an empty_like keep its strides."""
    return x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()


def sharded_dims(p: Any) -> tuple[int, ...]:
    """The dimensions of its mesh over which the tensor is cut."""
    return tuple(i for i, placement in enumerate(p.placements) if placement.is_shard())


def add_up_shards(params: Sequence[Tensor], values: Tensor, *, largest: bool = False) -> Tensor:
    """Turn each row of `values` [tensors, k] from that of the shard into that of the whole tensor, in float64.

    Values are sums, or maxima if `largest`. One collective for all tensors that are cut the same way; none for tensors
    that are not cut.
    """
    ways: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for i, p in enumerate(params):
        if is_sharded(p):
            ways.setdefault((p.device_mesh, sharded_dims(p)), []).append(i)  # type: ignore[attr-defined]
    values = values.double()
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    for (mesh, dims), rows in ways.items():
        part = values[rows]
        for dim in dims:
            torch.distributed.all_reduce(part, op=op, group=mesh.get_group(dim))
        values[rows] = part
    return values


def wrap_like(shard: Tensor, p: Any) -> Tensor:
    """A DTensor of this process's shard, cut like the parameter; without one, the shard is the whole."""
    if not is_sharded(p):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def shard_like(x: Any, p: Any) -> Tensor:
    """This process's part of a whole or differently cut tensor, for a parameter that may be cut itself."""
    if not is_sharded(p):
        return x.full_tensor() if is_sharded(x) else x
    if is_sharded(x):
        alike = x.placements == p.placements and x.device_mesh == p.device_mesh
        return local(x if alike else x.redistribute(p.device_mesh, p.placements))
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole of it and takes its part: nothing is sent.
    return local(distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None))
