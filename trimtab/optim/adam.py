"""Adam, with weight decay through the gradient as in PyTorch (Kingma & Ba 2015).

g <- g + wd p
m <- β1 m + (1 - β1) g          m̂ = m / (1 - β1^t)
v <- β2 v + (1 - β2) g²         v̂ = v / (1 - β2^t)
p <- p - lr m̂ / (√v̂ + eps)

With decoupled_weight_decay, g is not changed and p <- p (1 - lr wd) - lr m̂ / (√v̂ + eps), as in AdamW.
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.step.rules import adam_averages
from trimtab.optim.optimizer import Batch, Optimizer, Options


class Adam(Optimizer):
    """Same arguments, defaults and results as `torch.optim.Adam`. With weight decay, prefer AdamW."""

    rule = "adamw"
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        beta2_power: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        """`beta2_power` λ replaces β2 by the schedule 1 - t^-λ."""
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "beta2_power": beta2_power}
        super().__init__(params, own | {"decoupled_weight_decay": decoupled_weight_decay}, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group, lr, wd, t = batch.group, batch.lr, batch.weight_decay, batch.t
        averages = adam_averages(group["betas"], t, group["beta2_power"])
        decay = {"decay": 1 - lr * wd} if group["decoupled_weight_decay"] else {"coupled": wd}
        return batch.rows(**averages, **decay, eps=group["eps"], lr=lr / (1 - averages["beta1"] ** t))
