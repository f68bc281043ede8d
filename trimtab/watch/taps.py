"""Statistics of every layer, recorded through the model's taps during the forward and backward pass.

    attention.logits    logit_max    largest logit over batch, heads and unmasked pairs
                        entropy      mean of -Σ a ln a over the rows of softmax(logits)
    attention.q, .k     q_norm, k_norm    mean length of a query and of a key
                        cosine       mean over all query-key pairs of the same head and sequence
    block.out           out_rms, out_max       logz   mean of log Z       logits   logit_mean, logit_min, logit_max
    int8 layers         input_error, weight_error, grad_error       |rounded - x| / |x|, Euclidean

Values stay on the device until the step ends. Micro-batches and processes are combined: maxima by their maximum, all
others by their mean.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.nn.tap import listen, strip_wrappers
from trimtab.ops.sharding import widen
from trimtab.watch.processes import Errors

# Without the output logits: a chunked loss never holds them, and computing them takes memory. Request them by name.
DEFAULT = ("*.attention.logits", "*.attention.q", "*.attention.k", "*.out", "logz", "*.logz")
Key = tuple[str, str]  # layer, statistic
ENTROPY_CHUNK = 2**20  # logits


class LayerRecorder:
    """Records one step at a time: `open` before its forward pass, `close` after the step, then `read`."""

    def __init__(self, model: nn.Module, taps: bool | str | Sequence[str], errors: Errors) -> None:
        patterns = DEFAULT if isinstance(taps, bool) else (taps,) if isinstance(taps, str) else tuple(taps)
        self.model, self.patterns, self.errors = model, patterns, errors
        self.sums: dict[Key, tuple[Tensor, int]] = {}
        self.maxima: dict[Key, Tensor] = {}
        self._queries: dict[str, Tensor] = {}
        self._stack: ExitStack | None = None

    def open(self) -> None:
        if self._stack is not None:
            return
        self.sums, self.maxima, self._queries = {}, {}, {}
        self._stack = ExitStack()
        self._stack.enter_context(listen(self.model, self._on_tap, self.patterns))
        for name, module in self.model.named_modules():
            if getattr(module, "rounding", self) is None:  # a quantized layer that is not being measured already
                module.rounding = SimpleNamespace(add=partial(self._on_rounding, strip_wrappers(name)))
                self._stack.callback(setattr, module, "rounding", None)

    def close(self) -> None:
        if self._stack is not None:
            self._stack.close()
        self._stack, self._queries = None, {}

    def read(self) -> tuple[list[Key], list[Key], Tensor]:
        """Keys of the means, keys of the maxima, and their values in that order, on the device."""
        means, maxima = sorted(self.sums), sorted(self.maxima)
        values = [self.sums[key][0] / self.sums[key][1] for key in means] + [self.maxima[key] for key in maxima]
        row = torch.stack([widen(x) for x in values]) if values else torch.zeros(0, dtype=torch.float64)
        return means, maxima, row

    def _on_tap(self, path: str, x: Tensor) -> None:
        if not self.model.training or not x.numel():  # evaluation between two steps is not recorded
            return
        layer, _, what = path.rpartition(".")
        with self.errors, torch.no_grad():
            self._record(layer, what, x)

    def _on_rounding(self, layer: str, operand: str, x: Tensor, rounded: Tensor, by_row: bool) -> None:
        """Receives the operands of a quantized layer."""
        if self.model.training:
            with self.errors, torch.no_grad():
                difference = torch.linalg.vector_norm(rounded.float() - x.float())
                self._add_mean(layer, f"{operand}_error", difference / torch.linalg.vector_norm(x.float()))

    def _record(self, layer: str, what: str, x: Tensor) -> None:
        if what == "logits" and layer:
            self._add_max(layer, "logit_max", x.amax())
            self._add_mean(layer, "entropy", _entropy(x))
        elif what in ("q", "k"):
            lengths = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
            self._add_mean(layer, f"{what}_norm", lengths.mean())
            # The mean over all pairs of unit vectors is the product of their means.
            unit = (x / lengths[..., None].clamp(min=1e-12)).mean(-2)
            if what == "q":
                self._queries[layer] = unit
            elif layer in self._queries:
                self._add_mean(layer, "cosine", (self._queries.pop(layer) * unit).sum(-1).mean())
        elif what == "out":
            square = torch.linalg.vector_norm(x, dtype=torch.float32) ** 2
            self._add_mean(layer, "out_square", square / x.numel())
            self._add_max(layer, "out_max", x.abs().amax())
        elif what == "logz":
            self._add_mean(layer, "logz", x.float().mean())
        elif what == "logits":
            self._add_mean(layer, "logit_mean", x.float().mean())
            self._add_max(layer, "logit_max", x.amax())
            self._add_max(layer, "minus_logit_min", -x.amin())

    def _add_mean(self, layer: str, name: str, value: Tensor) -> None:
        total, count = self.sums.get((layer, name), (torch.zeros_like(widen(value)), 0))
        self.sums[layer, name] = total + value, count + 1

    def _add_max(self, layer: str, name: str, value: Tensor) -> None:
        known = self.maxima.get((layer, name))
        self.maxima[layer, name] = widen(value) if known is None else torch.maximum(known, widen(value))


def name_layers(keys: Sequence[Key], row: Sequence[float]) -> dict[str, dict[str, float]]:
    """Group a row of statistics by layer, under the names of the record."""
    layers: dict[str, dict[str, float]] = {}
    for (layer, name), value in zip(keys, row, strict=True):
        stats = layers.setdefault(layer, {})
        if name == "out_square":
            stats["out_rms"] = value**0.5 if value >= 0 else value
        elif name == "minus_logit_min":
            stats["logit_min"] = -value
        else:
            stats[name] = value
    return layers


def combine(means: int, rows: Tensor) -> Tensor:
    """One row from those of all processes: the first `means` columns by mean, the others by maximum. NaN stays NaN."""
    return torch.cat([rows[:, :means].mean(0), rows[:, means:].amax(0)])


def _entropy(z: Tensor) -> Tensor:
    """Mean entropy of the rows of softmax(z). In chunks: at once it needs as much memory again as the logits."""
    rows = max(1, ENTROPY_CHUNK // max(1, z[0].numel()))
    parts: Any = torch.split(z, rows)
    sums = [torch.special.entr(part.float().softmax(-1)).sum(-1).sum() for part in parts]
    return torch.stack(sums).sum() / z[..., 0].numel()
