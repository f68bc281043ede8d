"""Who else takes part in a step, and one row of numbers from each of them.

Under FSDP2 every process holds a shard of each tensor, so its sums are added up. Under DDP the gradients are the same
everywhere and nothing needs adding; only what comes from a process's own batch (loss, taps) and what all must agree on
(actions, an error) is exchanged. Without either there is nobody to ask.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.ops.sharding import is_sharded, local


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
