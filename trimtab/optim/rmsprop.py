"""RMSprop, as in PyTorch.

    g <- g + wd p
    v <- α v + (1 - α) g²
    u = g / (√v + eps)                  centered: mean <- α mean + (1 - α) g, and √(v - mean²) in place of √v
    p <- p - lr u                       momentum: m <- momentum m + u, and p <- p - lr m

Where rounding makes v - mean² negative, it counts as zero; PyTorch's root is NaN there.
"""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from trimtab.optim.optimizer import Batch, Optimizer, Options


class RMSprop(Optimizer):
    """Same arguments, defaults and results as `torch.optim.RMSprop`. One byte of state at bits=8, two with momentum."""

    rule = "rms"
    moments = ("square_avg",)  # and momentum_buffer and grad_avg where they are used

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        *,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, own | {"momentum": momentum, "centered": centered}, options)

    def rule_of(self, group: dict[str, Any]) -> str:
        return "rms" + ("_centered" if group["centered"] else "") + ("_momentum" if group["momentum"] else "")

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        buffer = ("momentum_buffer",) if group["momentum"] else ()
        mean = ("grad_avg",) if group["centered"] else ()
        return (*buffer, *mean, *self.moments)

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        group, alpha = batch.group, batch.group["alpha"]
        averages = {"beta2": alpha, "gain2": 1 - alpha, "beta3": alpha, "gain3": 1 - alpha}  # v, mean
        buffer = {"beta1": group["momentum"], "gain1": 1.0}
        return batch.rows(**averages, **buffer, eps=group["eps"], coupled=batch.weight_decay, lr=batch.lr)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["alpha"] >= 1:
            raise ValueError(f"alpha must be below 1, got {group['alpha']}")
        if group["centered"] and group["bits"] != 32:
            # Steady gradients make mean² nearly v; an error of 1 % in either can then change the step by any factor.
            raise ValueError(
                f"RMSprop with centered=True needs 32-bit state, got bits={group['bits']}: the difference of two "
                "averages that are nearly equal does not survive rounding to 8 bits. Use bits=32 or centered=False"
            )
