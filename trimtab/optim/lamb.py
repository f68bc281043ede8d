"""LAMB: Adam's update, scaled layer by layer to the norm of the weights (You et al. 2020).

u = m̂ / (√v̂ + eps) + wd p
p <- p - lr (‖p‖ / ‖u‖) u           1 instead of the ratio where either norm is zero
p <- p - lr min(1, c ‖p‖ / ‖u‖) u   with max_unorm c: the ratio can only shorten the step
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.step.rules import adam_averages, trust_from_norms
from trimtab.optim.optimizer import Batch, Optimizer, Options


class LAMB(Optimizer):
    """For very large batches. The norms are those of whole tensors, with 8-bit state and over shards too."""

    rule = "adamw"
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        max_unorm: float | None = None,
        beta2_power: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        """`max_unorm` is bitsandbytes' one-sided clip (its default is 1.0); None is LAMB as published."""
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, own | {"max_unorm": max_unorm, "beta2_power": beta2_power}, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group, wd, t = batch.group, batch.weight_decay, batch.t
        lr = 1.0 if sums is None else batch.lr * trust_from_norms(sums, bound=group["max_unorm"])
        averages = adam_averages(group["betas"], t, group["beta2_power"])
        return batch.rows(**averages, eps=group["eps"], decay=1 - lr * wd, lr=lr / (1 - averages["beta1"] ** t))

    def measure(self, batch: Batch) -> Tensor:
        return batch.norms(self.rows(batch, None))
