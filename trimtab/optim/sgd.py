"""SGD with momentum, as in PyTorch.

g <- g + wd p
m <- momentum m + (1 - dampening) g         m = g at the first step
p <- p - lr m                               nesterov: p - lr (g + momentum m)
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.step.rules import momentum_average
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
        own = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, own | {"nesterov": nesterov}, options)

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group, momentum = batch.group, batch.group["momentum"]
        average = momentum_average(batch.steps, momentum, group["dampening"] if momentum else 0.0)
        update = {"mix_m": momentum, "mix_g": 1.0} if group["nesterov"] else {"mix_m": 1.0}
        return batch.rows(**average, **update, coupled=batch.weight_decay, lr=batch.lr)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("nesterov needs momentum above 0 and no dampening")
