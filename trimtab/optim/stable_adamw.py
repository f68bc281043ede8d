"""StableAdamW: AdamW that shortens its step when the second moment is out of date (Wortsman et al. 2023).

    m <- β1 m + (1 - β1) g          m̂ = m / (1 - β1^t)
    v <- β2 v + (1 - β2) g²         v̂ = v / (1 - β2^t)
    RMS_t = √ mean(g² / max(v̂, eps²))                    over the whole tensor; near 1 while v̂ follows g²
    η = lr / max(1, RMS_t / d)
    p <- p (1 - η wd) - η m̂ / (√v̂ + eps)

The paper writes m̂ and v̂ as averages with the weights β (1 - β^(t-1)) / (1 - β^t), which give the same numbers. The
state is that of AdamW. Weight decay follows η, as in the paper's algorithm 2, in the later code of its authors and in
optimi.

A loss spike follows a spike of RMS_t by one to eight steps: after small gradients v is small, and when large gradients
arrive, the update is too long. Dividing by RMS_t removes the excess.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.step.rules import adam_averages, rms_from_ratios
from trimtab.optim.optimizer import Batch, Optimizer, Options


class StableAdamW(Optimizer):
    """For training with loss spikes, or with a higher β2 or learning rate. No gradient clipping is needed."""

    rule = "adamw"
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        clip_threshold: float = 1.0,
        decay_clipped: bool | None = None,
        beta2_power: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Args beyond AdamW's:

        clip_threshold: d; RMS_t below it does not change the step.
        decay_clipped: weight decay follows η; False: it follows lr, as in the authors' first code. With
            `independent_decay` it follows neither, and True is refused.
        beta2_power: λ replaces β2 by the schedule 1 - t^-λ, whose average has no bias.
        """
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip_threshold": clip_threshold}
        super().__init__(params, own | {"decay_clipped": decay_clipped, "beta2_power": beta2_power}, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group, lr, wd, t = batch.group, batch.lr, batch.weight_decay, batch.t
        eta = lr
        if sums is not None:
            rms = rms_from_ratios(sums[:, 0], batch.numels())
            self._measured.append((batch.where, rms))
            # A non-finite gradient is skipped with skip_nonfinite, and else spreads; it must not stop here.
            eta = lr / (torch.where(rms.isfinite(), rms, 1.0) / group["clip_threshold"]).clamp(min=1)
        averages = adam_averages(group["betas"], t, group["beta2_power"])
        decay = 1 - (lr if group["decay_clipped"] is False else eta) * wd
        return batch.rows(**averages, eps=group["eps"], decay=decay, lr=eta / (1 - averages["beta1"] ** t))

    def measure(self, batch: Batch) -> Tensor:
        averages = adam_averages(batch.group["betas"], batch.t, batch.group["beta2_power"])
        return batch.ratios(batch.rows(**averages, eps=batch.group["eps"])).view(-1, 1)

    @property
    def rms(self) -> Tensor:
        """RMS_t of every parameter at the last step, in the order of `names`; NaN where there was no step."""
        rms = torch.full((len(self.names),), torch.nan, dtype=torch.float64)
        for where, values in self._measured:
            rms = rms.to(values.device)
            rms[where] = values
        return rms

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["independent_decay"] and group["decay_clipped"]:
            raise ValueError("independent_decay does not follow the clipped learning rate; choose one of the two")
