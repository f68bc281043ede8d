"""AdamW: Adam with weight decay that is decoupled from the gradient (Loshchilov & Hutter 2019).

m <- β1 m + (1 - β1) g          m̂ = m / (1 - β1^t)
v <- β2 v + (1 - β2) g²         v̂ = v / (1 - β2^t)
p <- p (1 - lr wd) - lr m̂ / (√v̂ + eps)

With `rms_scaled` the last term is multiplied by max(RMS(p), 1e-3), so that lr is relative to the weights, as in
Adafactor; the decay is not.
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.step import gradient_norms_unchecked
from trimtab.ops.step.rules import adam_averages
from trimtab.optim.optimizer import Batch, Optimizer, Options

LEAST_RMS = 1e-3  # of the weights, in `rms_scaled`: Adafactor's


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
        rms_scaled: bool = False,
        **options: Unpack[Options],
    ) -> None:
        """Args beyond PyTorch's:

        beta2_power: λ replaces β2 by the schedule 1 - t^-λ.
        rms_scaled: steps are relative to the size of each tensor.
        decoupled_weight_decay: can only be True.
        """
        _check_decoupled(decoupled_weight_decay)
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "beta2_power": beta2_power}
        super().__init__(params, own | {"rms_scaled": rms_scaled}, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group, lr, wd, t = batch.group, batch.lr, batch.weight_decay, batch.t
        averages = adam_averages(group["betas"], t, group["beta2_power"])
        scaled = lr
        if sums is not None and group["rms_scaled"]:
            scaled = lr * (sums[:, 0].double() / batch.numels().clamp(min=1)).sqrt().clamp(min=LEAST_RMS)
        return batch.rows(**averages, eps=group["eps"], decay=1 - lr * wd, lr=scaled / (1 - averages["beta1"] ** t))

    def measure(self, batch: Batch) -> Tensor | None:
        """The sums of p², if any group needs them."""
        if not any(group["rms_scaled"] for group in self.param_groups):
            return None
        sums: Tensor = gradient_norms_unchecked(batch.params).view(-1, 1)
        return sums

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        _check_decoupled(group.get("decoupled_weight_decay", True))


def _check_decoupled(value: bool) -> None:
    if not value:
        raise ValueError(f"AdamW decays apart from the gradient, got decoupled_weight_decay={value}; use Adam for that")
