"""AdEMAMix: Adam with a second, very slow average of the gradient (Pagliardini et al. 2024).

    m <- β1 m + (1 - β1) g          m̂ = m / (1 - β1^t)
    slow <- β3 slow + (1 - β3) g
    v <- β2 v + (1 - β2) g²         v̂ = v / (1 - β2^t)
    p <- p (1 - lr wd) - lr (m̂ + α slow) / (√v̂ + eps)

α grows linearly over t_alpha steps; the half-life of β3 grows linearly from that of β1 over t_beta3 steps.
"""

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.step.rules import adam_averages
from trimtab.optim.optimizer import Batch, Optimizer, Options


class AdEMAMix(Optimizer):
    """For long runs, where old gradients are still useful. Three bytes of state with bits=8, twelve with bits=32."""

    rule = "ademamix"
    moments = ("exp_avg", "exp_avg_slow", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        beta2_power: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        """`t_alpha`, `t_beta3`: steps over which α and β3 rise to their values; None: they are constant."""
        own = {"lr": lr, "betas": betas, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, own | {"t_alpha": t_alpha, "t_beta3": t_beta3, "beta2_power": beta2_power}, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group, lr, wd, t = batch.group, batch.lr, batch.weight_decay, batch.t
        beta1, _, beta3 = group["betas"]
        beta3 = _beta3_at(t, beta1, beta3, group["t_beta3"])
        alpha = group["alpha"] if group["t_alpha"] is None else group["alpha"] * (t / group["t_alpha"]).clamp(max=1)
        update = {"mix_m": 1 / (1 - beta1**t), "mix_g": alpha}  # m̂ + α slow
        averages = adam_averages(group["betas"], t, group["beta2_power"]) | {"beta3": beta3, "gain3": 1 - beta3}
        return batch.rows(**averages, **update, eps=group["eps"], decay=1 - lr * wd, lr=lr)


def _beta3_at(t: Tensor, beta1: float, beta3: float, steps: int | None) -> Tensor | float:
    """Linear in the half-life: 1 / ln β goes from that of β1 to that of β3."""
    if steps is None or beta1 == 0 or beta3 == 0:
        return beta3
    share = (t / steps).clamp(max=1)
    return torch.exp(1 / ((1 - share) / math.log(beta1) + share / math.log(beta3)))
