"""Adagrad, as in PyTorch (Duchi et al. 2011).

g <- g + wd p
v <- v + g²
p <- p - lr / (1 + (t - 1) lr_decay) · g / (√v + eps)
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops import step_rules
from trimtab.optim.optimizer import Batch, Optimizer, Options


class Adagrad(Optimizer):
    """For sparse features. Same arguments, defaults and results as `torch.optim.Adagrad`."""

    rule = "rms"
    moments = ("sum",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, defaults, options)

    def initial(self, group: dict[str, Any]) -> float:
        return group["initial_accumulator_value"]

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group = batch.group
        return step_rules.adagrad(
            batch.steps,
            lr=group["lr"],
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            weight_decay=self.decay_of(group),
            grad_scale=batch.grad_scale,
        )

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        for name in ("lr_decay", "initial_accumulator_value"):
            if group[name] < 0:
                raise ValueError(f"{name} must be at least 0, got {group[name]}")
