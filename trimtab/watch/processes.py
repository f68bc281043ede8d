"""What several processes know of one step, put together: sums of shards, and one row of numbers from each process.

Under FSDP2 every process holds a shard of each tensor, so its sums are added up. Under DDP the gradients are the same
everywhere and nothing needs adding; only what comes from a process's own batch (loss, taps) and what all must agree on
(actions, an error) is exchanged. Without either there is nobody to ask.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def is_sharded(x: object) -> bool:
    """A DTensor. Importing its module takes long, and there is none before somebody imported it."""
    if type(x) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Any) -> Tensor:
    """What this process holds of it."""
    return x.to_local() if is_sharded(x) else x


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP: its names have no "module." before them."""
    return getattr(model, "module", model) if hasattr(model, "process_group") else model


class Together:
    def __init__(self, model: nn.Module, params: Sequence[Tensor]) -> None:
        self.groups: list[Any] = []
        sharded: list[Any] = [p for p in params if is_sharded(p)]
        if hasattr(model, "process_group"):
            self.groups = [model.process_group]
        elif sharded:
            mesh = sharded[0].device_mesh
            self.groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self.device = next((local(p).device for p in params), torch.device("cpu"))

    @property
    def several(self) -> bool:
        return bool(self.groups)

    def gather(self, row: Tensor) -> Tensor:
        """Everybody's row, [processes, k]. All of them must call this, with rows of one length."""
        rows = row.to(self.device, torch.float64)[None]
        for group in self.groups:
            count = torch.distributed.get_world_size(group)
            parts = [torch.empty_like(rows) for _ in range(count)]
            torch.distributed.all_gather(parts, rows.contiguous(), group=group)
            rows = torch.cat(parts)
        return rows

    def combine(self, owners: Sequence[Tensor], values: Tensor, *, largest: bool = False) -> Tensor:
        """Each row of `values` [tensors, k] from that of the shard to that of the whole tensor, float64.

        One collective for all tensors that are cut the same way; none for tensors that are not cut.
        """
        ways: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
        for i, p in enumerate(owners):
            if is_sharded(p):
                cut: Any = p
                dims = tuple(d for d, placement in enumerate(cut.placements) if placement.is_shard())
                ways.setdefault((cut.device_mesh, dims), []).append(i)
        values = values.double()
        for (mesh, dims), rows in ways.items():
            part = values[rows]
            for dim in dims:
                op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
                torch.distributed.all_reduce(part, op=op, group=mesh.get_group(dim))
            values[rows] = part
        return values
