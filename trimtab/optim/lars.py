"""LARS: momentum, scaled layer by layer to the norm of the weights (You et al. 2017).

g <- g + wd p
m <- momentum m + g
p <- p - lr min(1, c ‖p‖ / ‖m‖) m           c = max_unorm; without it lr (‖p‖ / ‖m‖)
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.step.rules import momentum_average, trust_from_norms
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
        own = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "max_unorm": max_unorm}
        super().__init__(params, own, options)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        lr = 1.0 if sums is None else batch.lr * trust_from_norms(sums, bound=batch.group["max_unorm"])
        average = momentum_average(batch.steps, batch.group["momentum"])
        return batch.rows(**average, coupled=batch.weight_decay, lr=lr, mix_m=1.0)

    def measure(self, batch: Batch) -> Tensor:
        return batch.norms(self.rows(batch, None))

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["momentum"] == 0:
            raise ValueError("LARS needs momentum above 0, got 0")
