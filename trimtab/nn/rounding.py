"""How much the quantized layers of a model lose: relative error and saturation, layer by layer.

    with measure_rounding(model) as seen:
        model(batch).sum().backward()
    print(seen["blocks.0.mlp.up"].error("input"))

Measuring rounds every operand once more, so it costs time; without it a layer pays one attribute test.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

Operand = Literal["input", "weight", "grad"]


@dataclass
class _Sums:
    """Added up on the device over all calls; nothing waits for it before somebody reads."""

    error: Tensor | float = 0.0
    square: Tensor | float = 0.0
    saturated: Tensor | float = 0.0
    flushed: Tensor | float = 0.0
    count: int = 0


@dataclass
class Rounding:
    """What one layer's rounding did to its operands while it was measured."""

    sums: dict[Operand, _Sums] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, operand: Operand, x: Tensor, rounded: Tensor, by_row: bool) -> None:
        x, rounded = x.detach().float(), rounded.float()
        sums = self.sums.setdefault(operand, _Sums())
        sums.error = sums.error + (rounded - x).double().square().sum()
        sums.square = sums.square + x.double().square().sum()
        # A value as large as the largest that shares its scale sits on the last code.
        largest = rounded.abs().amax(dim=-1, keepdim=True) if by_row else rounded.abs().amax()
        sums.saturated = sums.saturated + ((rounded.abs() == largest) & (rounded != 0)).sum()
        sums.flushed = sums.flushed + ((rounded == 0) & (x != 0)).sum()
        sums.count += x.numel()

    def error(self, operand: Operand) -> float:
        """|rounded - x| / |x|, Euclidean, over everything seen."""
        sums = self._of(operand)
        return float((torch.as_tensor(sums.error) / torch.as_tensor(sums.square).clamp(min=1e-300)).sqrt())

    def saturated(self, operand: Operand) -> float:
        """The share of values that sit on their scale's largest code. At least one per scale does."""
        return float(self._of(operand).saturated) / max(1, self._of(operand).count)

    def flushed(self, operand: Operand) -> float:
        """The share of values that became zero and were not."""
        return float(self._of(operand).flushed) / max(1, self._of(operand).count)

    def _of(self, operand: Operand) -> _Sums:
        if operand not in self.sums:
            seen = ", ".join(self.sums) or "nothing"
            raise ValueError(f"no {operand} was seen, only {seen}; run a forward (and for grad a backward) inside")
        return self.sums[operand]


@contextmanager
def measure_rounding(model: nn.Module) -> Iterator[dict[str, Rounding]]:
    """Measure every quantized layer of the model inside the `with`; by name."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "rounding")}
    if not layers:
        raise ValueError("the model has no quantized layer; convert_linears(model, 'switchback') makes them")
    found = {name: Rounding() for name in layers}
    try:
        for name, layer in layers.items():
            layer.rounding = found[name]
        yield found
    finally:
        for layer in layers.values():
            layer.rounding = None
