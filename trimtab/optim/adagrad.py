"""Adagrad, as in PyTorch (Duchi et al. 2011).

g <- g + wd p
v <- v + g²
p <- p - lr / (1 + (t - 1) lr_decay) · g / (√v + eps)
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

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
        own = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, own | {"initial_accumulator_value": initial_accumulator_value}, options)

    def initial(self, group: dict[str, Any]) -> float:
        return float(group["initial_accumulator_value"])

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group = batch.group
        lr = batch.lr / (1 + (batch.t - 1) * group["lr_decay"])
        return batch.rows(beta2=1.0, gain2=1.0, eps=group["eps"], coupled=batch.weight_decay, lr=lr)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        for name in ("lr_decay", "initial_accumulator_value"):
            if group[name] < 0:
                raise ValueError(f"{name} must be at least 0, got {group[name]}")
