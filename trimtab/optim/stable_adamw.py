"""StableAdamW: AdamW that shortens its step when the second moment is out of date (Wortsman et al. 2023).

    m <- β1 m + (1 - β1) g          m̂ = m / (1 - β1^t)
    v <- β2 v + (1 - β2) g²         v̂ = v / (1 - β2^t)
    RMS_t = √ mean(g² / max(v̂, eps²))                    over the whole tensor; near 1 while v̂ tracks g²
    η = lr / max(1, RMS_t / d)
    p <- p (1 - η wd) - η m̂ / (√v̂ + eps)

The paper writes m̂ and v̂ as averages with the weights β (1 - β^(t-1)) / (1 - β^t), which give the same numbers. The
state is that of AdamW. Weight decay follows η, as in the paper's algorithm 2, in the later code of its authors and in
optimi.

A loss spike follows a spike of RMS_t by one to eight steps: v still remembers small gradients when large ones arrive,
and the update is too long. Dividing by RMS_t takes the excess out before the spike.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops import step_rules
from trimtab.ops.step import ratios_unchecked
from trimtab.optim.optimizer import Batch, Optimizer, Options


class StableAdamW(Optimizer):
    """For training that spikes, or is to run at a higher β2 or learning rate. No gradient clipping needed."""

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

        clip_threshold: d; RMS_t below it leaves the step as it is.
        decay_clipped: weight decay follows η; False lets it follow lr, as in the authors' first code. With
            `independent_decay` it follows neither, and True is refused.
        beta2_power: λ replaces β2 by the schedule 1 - t^-λ, whose average needs no correction.
        """
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "clip_threshold": clip_threshold,
            "decay_clipped": decay_clipped,
            "beta2_power": beta2_power,
        }
        super().__init__(params, defaults, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group, rms = batch.group, torch.zeros(())
        if sums is not None:
            rms = step_rules.rms_from_ratios(sums[:, 0], batch.numels())
            self._measured.append((batch.where, rms))
            # A non-finite gradient is skipped if that was asked for, and else spreads; it must not hide here.
            rms = torch.where(rms.isfinite(), rms, 1.0)
        return step_rules.stable_adamw(
            batch.steps,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=self.decay_of(group),
            grad_scale=batch.grad_scale,
            rms=rms,
            clip=group["clip_threshold"],
            decay_clipped=group["decay_clipped"] is not False,
            beta2_power=group["beta2_power"],
        )

    def measure(self, batch: Batch) -> Tensor:
        rows = step_rules.debiased(self.rows(batch, None))
        _, grads, states, absmax, rows, _, book, _, code, block = self.kernel_arguments(batch, rows)
        count = len(grads)  # the second moments follow the first
        return ratios_unchecked(grads, states[count:], absmax[count:], rows, book, code, block).view(-1, 1)

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
