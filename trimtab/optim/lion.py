"""Lion: the sign of a momentum (Chen et al. 2023).

p <- p (1 - lr wd) - lr sign(β1 m + (1 - β1) g)
m <- β2 m + (1 - β2) g
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops import step_rules
from trimtab.optim.optimizer import Batch, Optimizer, Options


class Lion(Optimizer):
    """Half of AdamW's state: one byte per parameter with bits=8. Wants a learning rate 3 to 10 times smaller."""

    rule = "lion"
    moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group = batch.group
        return step_rules.lion(
            batch.steps,
            lr=group["lr"],
            betas=group["betas"],
            weight_decay=self.decay_of(group),
            grad_scale=batch.grad_scale,
        )
