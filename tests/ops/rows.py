"""The rows of coefficients of the optimizers, for tests of the fused step."""

from typing import Any

import torch
from torch import Tensor, nn

from trimtab import optim
from trimtab.ops.step.storage import Batch, Storage


def row(kind: str, steps: Tensor, *, sums: Tensor | None = None, grad_scale: Any = 1.0, **options: Any) -> Tensor:
    """One row per step number; `sums` are those of a first pass over tensors of `numel` values."""
    numel = options.pop("numel", 1)
    optimizer = getattr(optim, kind)([nn.Parameter(torch.zeros(1))], **{"weight_decay": 0.0, **options})
    batch = Batch(
        optimizer.param_groups[0], Storage(32, 256, "quadratic"), optimizer.rule, optimizer.moments, grad_scale
    )
    batch.steps, batch.owners = steps, [torch.empty(numel, device="meta")] * max(1, steps.numel())
    return optimizer.rows(batch, sums)
