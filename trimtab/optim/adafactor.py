"""Adafactor with momentum: the second moment of a matrix as one row and one column (Shazeer & Stern 2018).

    R <- β2 R + (1 - β2) mean over columns of (G² + e)      C <- β2 C + (1 - β2) mean over rows of (G² + e)
    V = R Cᵀ / mean(R)                                      vectors keep a full V
    U = G / √V,   U <- U / max(1, rms(U) / d)
    m <- β1 m + (1 - β1) U
    p <- p (1 - lr wd) - lr m

The form that the 8-bit optimizers were compared with: constant β2, β1 above 0, no relative step sizes. Its state is
4 bytes per parameter, twice that of 8-bit Adam.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.sharding import is_sharded
from trimtab.optim.optimizer import Batch, Optimizer, Options


class Adafactor(Optimizer):
    """The 32-bit baseline of the 8-bit paper. Plain PyTorch, for comparisons."""

    rule = "momentum"  # what is kept beside the factors
    moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-30,
        weight_decay: float = 0.0,
        *,
        clip_threshold: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "clip_threshold": clip_threshold,
        }
        super().__init__(params, defaults, options)

    def _create(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super()._create(p, group, state)
        for name, shape in self.extras_of(p).items():
            state[name] = torch.zeros(shape, dtype=torch.float32, device=p.device)

    def extras_of(self, p: Tensor) -> dict[str, torch.Size]:
        if p.dim() < 2:
            return {"exp_avg_sq": p.shape}
        return {"exp_avg_sq_row": p.shape[:-1], "exp_avg_sq_col": p.shape[:-2] + p.shape[-1:]}

    def extra_bytes(self, p: Tensor, group: dict[str, Any]) -> int:
        return 4 * sum(shape.numel() for shape in self.extras_of(p).values())

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        """No kernel, so no rows: only which tensors to skip."""
        return torch.as_tensor(batch.grad_scale, device=batch.steps.device).expand(len(batch.owners))[:, None]

    def _final_rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        return self.rows(batch, sums)

    def _apply(self, batch: Batch, rows: Tensor) -> None:
        group = batch.group
        lr, decay = group["lr"], group["weight_decay"]
        shrink = 1 - decay * lr / group["lr_max"] if group["independent_decay"] else 1 - lr * decay
        for p, state, scale in zip(batch.owners, batch.kept, rows[:, 0].unbind(), strict=True):
            if p.numel() == 0:
                continue
            assert p.grad is not None
            g = p.grad.float() * scale.float()
            moved = scale.isfinite()
            adafactor_update(p, g, state, moved, lr, shrink, group["betas"], group["eps"], group["clip_threshold"])

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["bits"] != 32:
            raise ValueError(f"Adafactor is the 32-bit baseline, got bits={group['bits']}; AdamW takes bits=8")
        for name, plain in (("skip_zeros", False), ("rounding", "nearest")):
            if group[name] != plain:
                raise ValueError(f"Adafactor does not do {name}={group[name]!r}")
        for p in group["params"]:
            if is_sharded(p):
                raise ValueError("Adafactor's rows and columns are those of whole matrices; it takes no sharded ones")


def adafactor_update(
    p: Tensor,
    g: Tensor,
    state: dict[str, Any],
    moved: Tensor,
    lr: float | Tensor,
    shrink: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    clip_threshold: float,
) -> None:
    """Update one tensor and its state in place, or nothing where `moved` is False."""
    beta1, beta2 = betas
    square = g.square() + eps

    def average(name: str, value: Tensor) -> Tensor:
        state[name].copy_(torch.where(moved, state[name].lerp(value, 1 - beta2), state[name]))
        return state[name]

    if p.dim() < 2:
        v = average("exp_avg_sq", square)
    else:
        row, col = average("exp_avg_sq_row", square.mean(-1)), average("exp_avg_sq_col", square.mean(-2))
        # The mean first: the product of two tiny averages would be zero, and the update not a number.
        v = (row / row.mean(-1, keepdim=True))[..., :, None] * col[..., None, :]
    u = g / v.sqrt()
    u = u / (u.square().mean().sqrt() / clip_threshold).clamp(min=1)
    m = state["exp_avg"]
    m.copy_(torch.where(moved, m.lerp(u, 1 - beta1), m))
    p.copy_(torch.where(moved, shrink * p.float() - lr * m, p.float()))
