"""LARS: momentum, scaled layer by layer to the size of the weights (You et al. 2017).

g <- g + wd p
m <- momentum m + g
p <- p - lr min(1, c ‖p‖ / ‖m‖) m           c = max_unorm; without it lr (‖p‖ / ‖m‖)
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops import step_rules
from trimtab.optim.optimizer import Batch, Optimizer, Options


class LARS(Optimizer):
    """For convolutional networks at very large batches. The norms are those of whole tensors, over shards too."""

    rule = "momentum"
    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        max_unorm: float | None = 0.02,
        **options: Unpack[Options],
    ) -> None:
        """`max_unorm` bounds a step's length relative to the weights; None scales every step to ‖p‖."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "max_unorm": max_unorm}
        super().__init__(params, defaults, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group = batch.group
        return step_rules.lars(
            batch.steps,
            lr=1.0 if sums is None else group["lr"],
            momentum=group["momentum"],
            weight_decay=self.decay_of(group),
            grad_scale=batch.grad_scale,
            trust=1.0 if sums is None else self.trust_of(sums, group),
        )

    def measure(self, batch: Batch) -> Tensor:
        return self.norms_of(batch, self.rows(batch, None))

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["momentum"] == 0:
            raise ValueError("LARS needs momentum above 0, got 0")
