"""Losses between two looks: kept on their device, then averaged over processes, with word of whether all is well."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from trimtab.ops.sharding import local
from trimtab.watch.processes import Together


def as_number(loss: Any) -> Any:
    """A number or a tensor of one, still on its device."""
    loss = getattr(loss, "loss", loss)  # of a model that returns more
    if loss is None or isinstance(loss, float | int):
        return loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss must be one number, got {got}")
    return local(loss).detach().reshape(())


@dataclass
class Exchanged:
    losses: Tensor  # mean over processes, one per step since the last look; NaN where none was given
    given: list[bool]
    alike: bool  # all processes heard the same layers
    failed: bool  # somewhere


def exchange(together: Together, pending: Sequence[Any], *, width: int, failed: bool, names: Any) -> Exchanged:
    """One collective of `width` losses and two flags; none where there is one process."""
    device = together.device
    tensors = [torch.tensor(math.nan) if x is None else torch.as_tensor(x) for x in pending]
    row = torch.full((width + 2,), math.nan, dtype=torch.float64, device=device)
    if tensors:
        found = torch.stack([x.to(device, torch.float64) for x in tensors[-width:]])
        row[2 : 2 + len(found)] = found
    given, count = [x is not None for x in pending][-width:], min(len(pending), width)
    if not together.several:
        return Exchanged(row[2 : 2 + count], given, True, failed)
    mark = float(crc32(repr(names).encode()))
    row[0], row[1] = float(failed), mark
    rows = together.gather(row)
    alike, any_failed = bool((rows[:, 1] == mark).all()), bool(rows[:, 0].any())
    return Exchanged(rows[:, 2 : 2 + count].mean(0), given, alike, any_failed)
