"""Rounding errors of the quantized layers of a model: relative error, saturation and underflow of each layer.

    with measure_rounding(model) as seen:
        model(batch).sum().backward()
    print(seen["blocks.0.mlp.up"].error("input"))

Measuring rounds every operand a second time. Without it, a layer pays one attribute test.
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
    """Sums over all calls, on the device: no synchronisation until they are read."""

    error: Tensor | float = 0.0
    square: Tensor | float = 0.0
    saturated: Tensor | float = 0.0
    flushed: Tensor | float = 0.0
    count: int = 0


@dataclass
class Rounding:
    """Rounding statistics of the operands of one layer."""

    sums: dict[Operand, _Sums] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, operand: Operand, x: Tensor, rounded: Tensor, by_row: bool) -> None:
        x, rounded = x.detach().float(), rounded.float()
        sums = self.sums.setdefault(operand, _Sums())
        sums.error = sums.error + (rounded - x).double().square().sum()
        sums.square = sums.square + x.double().square().sum()
        # Values equal to the largest one with the same scale have the last code.
        largest = rounded.abs().amax(dim=-1, keepdim=True) if by_row else rounded.abs().amax()
        sums.saturated = sums.saturated + ((rounded.abs() == largest) & (rounded != 0)).sum()
        sums.flushed = sums.flushed + ((rounded == 0) & (x != 0)).sum()
        sums.count += x.numel()

    def error(self, operand: Operand) -> float:
        """|rounded - x| / |x|, Euclidean, over all calls."""
        sums = self._of(operand)
        return float((torch.as_tensor(sums.error) / torch.as_tensor(sums.square).clamp(min=1e-300)).sqrt())

    def saturated(self, operand: Operand) -> float:
        """The share of values with the largest code of their scale; at least one value per scale."""
        return float(self._of(operand).saturated) / max(1, self._of(operand).count)

    def flushed(self, operand: Operand) -> float:
        """The share of non-zero values that were rounded to zero."""
        return float(self._of(operand).flushed) / max(1, self._of(operand).count)

    def _of(self, operand: Operand) -> _Sums:
        if operand not in self.sums:
            known = ", ".join(self.sums) or "nothing"
            raise ValueError(f"no {operand} was measured, only {known}; run a forward (and for grad a backward) inside")
        return self.sums[operand]


@contextmanager
def measure_rounding(model: nn.Module) -> Iterator[dict[str, Rounding]]:
    """Measure all quantized layers of the model inside the `with`. Yields `Rounding` by layer name."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "rounding")}
    if not layers:
        raise ValueError("the model has no quantized layer; create them with convert_linears(model, 'switchback')")
    found = {name: Rounding() for name in layers}
    try:
        for name, layer in layers.items():
            layer.rounding = found[name]
        yield found
    finally:
        for layer in layers.values():
            layer.rounding = None
