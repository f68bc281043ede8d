"""Lion: the sign of a momentum (Chen et al. 2023).

p <- p (1 - lr wd) - lr sign(β1 m + (1 - β1) g)
m <- β2 m + (1 - β2) g
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.optim.optimizer import Batch, Optimizer, Options


class Lion(Optimizer):
    """Half of AdamW's state: one byte per parameter with bits=8. Needs a 3 to 10 times smaller learning rate."""

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
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        lr, wd, (beta1, beta2) = batch.lr, batch.weight_decay, batch.group["betas"]
        update = {"mix_m": beta1, "mix_g": 1 - beta1}  # sign(β1 m + (1 - β1) g)
        return batch.rows(**update, beta1=beta2, gain1=1 - beta2, decay=1 - lr * wd, lr=lr)
