"""AdamW: Adam with weight decay that is decoupled from the gradient (Loshchilov & Hutter 2019).

m <- β1 m + (1 - β1) g          m̂ = m / (1 - β1^t)
v <- β2 v + (1 - β2) g²         v̂ = v / (1 - β2^t)
p <- p (1 - lr wd) - lr m̂ / (√v̂ + eps)
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.step.rules import adam_averages
from trimtab.optim.optimizer import Batch, Optimizer, Options


class AdamW(Optimizer):
    """The default choice. Same arguments, defaults and results as `torch.optim.AdamW`; 2 bytes of state with bits=8."""

    rule = "adamw"
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
        beta2_power: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        """`beta2_power` λ replaces β2 by the schedule 1 - t^-λ. `decoupled_weight_decay` can only be True."""
        _check_decoupled(decoupled_weight_decay)
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "beta2_power": beta2_power}
        super().__init__(params, own, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group, lr, wd, t = batch.group, batch.lr, batch.weight_decay, batch.t
        averages = adam_averages(group["betas"], t, group["beta2_power"])
        return batch.rows(**averages, eps=group["eps"], decay=1 - lr * wd, lr=lr / (1 - averages["beta1"] ** t))

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        _check_decoupled(group.get("decoupled_weight_decay", True))


def _check_decoupled(value: bool) -> None:
    if not value:
        raise ValueError(f"AdamW decays apart from the gradient, got decoupled_weight_decay={value}; use Adam for that")
