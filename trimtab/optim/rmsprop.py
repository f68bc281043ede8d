"""RMSprop, as in PyTorch.

g <- g + wd p
v <- α v + (1 - α) g²
p <- p - lr g / (√v + eps)
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops import step_rules
from trimtab.optim.optimizer import Batch, Optimizer, Options


class RMSprop(Optimizer):
    """Same arguments, defaults and results as `torch.optim.RMSprop`, without its momentum and centering."""

    rule = "rms"
    moments = ("square_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        super().__init__(params, defaults, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group = batch.group
        return step_rules.rmsprop(
            batch.steps,
            lr=group["lr"],
            alpha=group["alpha"],
            eps=group["eps"],
            weight_decay=self.decay_of(group),
            grad_scale=batch.grad_scale,
        )

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["momentum"] or group["centered"]:
            raise ValueError("RMSprop here has no momentum and no centering; use AdamW, or torch.optim.RMSprop")
        if group["alpha"] >= 1:
            raise ValueError(f"alpha must be below 1, got {group['alpha']}")
