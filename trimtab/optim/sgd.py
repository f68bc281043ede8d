"""SGD with momentum, as in PyTorch.

g <- g + wd p
m <- momentum m + (1 - dampening) g         m = g at the first step
p <- p - lr m                               nesterov: p - lr (g + momentum m)
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops import step_rules
from trimtab.optim.optimizer import Batch, Optimizer, Options


class SGD(Optimizer):
    """Same arguments, defaults and results as `torch.optim.SGD`. One byte of state at bits=8, none without momentum."""

    rule = "momentum"
    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, options)

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group = batch.group
        return step_rules.sgd(
            batch.steps,
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"] if group["momentum"] else 0.0,
            weight_decay=self.decay_of(group),
            nesterov=group["nesterov"],
            grad_scale=batch.grad_scale,
        )

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("nesterov needs momentum above 0 and no dampening")
