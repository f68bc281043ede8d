"""Rounding errors of the quantized layers of a model: relative error, saturation and underflow of each layer.

    with measure_rounding(model) as seen:
        model(batch).sum().backward()
    print(seen["blocks.0.mlp.up"].error("input"))

Measuring rounds every operand a second time. Without it, a layer pays one attribute test.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

Operand = Literal["input", "weight", "grad"]


@dataclass
class Rounding:
    """Rounding statistics of the operands of one layer."""

    # Per operand, over all calls: squared error, square, saturated, flushed, count. Not synchronised until read.
    sums: dict[Operand, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, operand: Operand, x: Tensor, rounded: Tensor, by_row: bool) -> None:
        x, rounded = x.detach().float(), rounded.float()
        # Values equal to the largest one with the same scale have the last code.
        largest = rounded.abs().amax(dim=-1, keepdim=True) if by_row else rounded.abs().amax()
        saturated = ((rounded.abs() == largest) & (rounded != 0)).sum()
        flushed = ((rounded == 0) & (x != 0)).sum()
        squares = [(rounded - x).double().square().sum(), x.double().square().sum()]
        new = torch.stack([*squares, saturated.double(), flushed.double(), squares[0].new_tensor(x.numel())])
        self.sums[operand] = new + self.sums.get(operand, 0.0)

    def error(self, operand: Operand) -> float:
        """|rounded - x| / |x|, Euclidean, over all calls."""
        error, square, *_ = self._of(operand)
        return math.sqrt(error / max(square, 1e-300))

    def saturated(self, operand: Operand) -> float:
        """The share of values with the largest code of their scale; at least one value per scale."""
        _, _, saturated, _, count = self._of(operand)
        return saturated / max(1, count)

    def flushed(self, operand: Operand) -> float:
        """The share of non-zero values that were rounded to zero."""
        *_, flushed, count = self._of(operand)
        return flushed / max(1, count)

    def _of(self, operand: Operand) -> list[float]:
        if operand not in self.sums:
            known = ", ".join(self.sums) or "nothing"
            raise ValueError(f"no {operand} was measured, only {known}; run a forward (and for grad a backward) inside")
        sums: list[float] = self.sums[operand].tolist()
        return sums


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
