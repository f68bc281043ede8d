"""Exchange of measurements between the processes of one training step.

Under FSDP2 every process holds a shard of each tensor, so sums are added over processes. Under DDP gradients are equal
everywhere; only what depends on a process's own batch (loss, taps) or must be decided together (actions, errors) is
exchanged. With one process nothing is exchanged.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from trimtab.ops.sharding import home_of_numbers, is_sharded, local

# Modules that hold the whole model, by class and the name that they have for it.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
}


def unwrap_all(model: nn.Module) -> list[nn.Module]:
    """The model as the loop calls it, then what is inside its wrappers; the last is the model itself.

    Its parameter names have no "module." prefix.
    """
    found = [model]
    while name := next((_WRAPPERS[k.__name__] for k in type(found[-1]).__mro__ if k.__name__ in _WRAPPERS), None):
        found.append(getattr(found[-1], name))
    return found


def innermost(optimizer: Any) -> Any:
    """The optimizer inside wrappers: those of Accelerate, Lightning and DeepSpeed hold it as `optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer) or hasattr(inner, "step"):
        optimizer = inner
    return optimizer


class Errors:
    """A context that keeps the first error and continues: the other processes may wait in the next collective."""

    first: str | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> bool:
        if isinstance(error, Exception):
            self.first = self.first or f"{type(error).__name__}: {error}"
        return isinstance(error, Exception)


class Processes:
    """The process groups that share a model: DDP's, or one per dimension of FSDP2's device mesh."""

    def __init__(self, model: nn.Module, params: Sequence[Tensor]) -> None:
        self.groups: list[Any] = []
        sharded: list[Any] = [p for p in params if is_sharded(p)]
        replicated = [x for x in unwrap_all(model) if hasattr(x, "process_group")]
        if replicated:
            self.groups = [replicated[0].process_group]
        elif hasattr(model, "data_parallel_group"):  # DeepSpeed
            self.groups = [model.data_parallel_group]
        elif sharded:
            mesh = sharded[0].device_mesh
            self.groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self.device = home_of_numbers(next((local(p).device for p in params), torch.device("cpu")))

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all processes, [processes, k]. A collective: all must call it, with rows of equal length."""
        rows = row.to(self.device, torch.float64)[None]
        for group in self.groups:
            parts = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather(parts, rows.contiguous(), group=group)
            rows = torch.cat(parts)
        return rows


class SharedLosses(NamedTuple):
    losses: Tensor  # mean over processes, one per step since the last measurement; NaN where none was given
    given: list[bool]
    same_layers: bool  # all processes have recorded the same layers
    failed: bool  # in at least one process


def share_losses(processes: Processes, pending: Sequence[Any], *, width: int, failed: bool, names: Any) -> SharedLosses:
    """Average losses over processes in one collective of `width` losses and two flags; no collective if alone."""
    numbers = [math.nan if x is None else x for x in pending[-width:]]
    tensors = [x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in numbers]
    stop = 2 + len(tensors)
    row = torch.full((width + 2,), math.nan, dtype=torch.float64, device=processes.device)
    if tensors:
        row[2:stop] = torch.stack([x.to(row) for x in tensors])
    given = [x is not None for x in pending[-width:]]
    if not processes.groups:
        return SharedLosses(row[2:stop], given, True, failed)
    checksum = float(crc32(repr(names).encode()))
    row[0], row[1] = float(failed), checksum
    rows = processes.gather(row)
    same, any_failed = bool((rows[:, 1] == checksum).all()), bool(rows[:, 0].any())
    return SharedLosses(rows[:, 2:stop].mean(0), given, same, any_failed)


def as_scalar(loss: Any) -> Any:
    """Check a loss: a number, None, a one-element tensor, or an output with `.loss`. Tensors stay on their device."""
    loss = getattr(loss, "loss", loss)
    if loss is None or isinstance(loss, float | int):
        return loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss must be one number, got {got}")
    return local(loss).detach().reshape(())
