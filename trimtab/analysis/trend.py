"""The edge of stability against size, and the probability that a learning rate fails at a larger size.

    log10 edge(N) = a + b · x,   x = log10 N - log10 of the largest size that was run

The line is a distribution, not a fit. Before the runs are seen:

    b   the slope: a normal distribution around SLOPE; the edge falls as models grow
    a   the edge at the largest size: a normal distribution around GAP powers of ten above the best learning rate there

Every size that was run then weights the lines: one with an edge by its distance to the line, one without a failing
learning rate by the probability that its edge is above the grid. So three sizes decide almost alone, one size leaves
the prior slope, and a grid that ends too low gives a wide answer instead of a wrong one.

    P(η fails at N) = mean over the lines of Φ((log10 η - line(N)) / spread(N))

`spread` grows with the distance from the largest size, because the edge need not follow a line. It needs no signal
from inside the model, so it works for any model. The constants are set on half of the recipes of `bench/forecasts.py`
and tested on the other half (docs/results/forecasts.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from trimtab.analysis.findings import Curve
from trimtab.analysis.thresholds import EDGE_SPREAD, GAP, GAP_SPREAD, SLOPE, SLOPE_SPREAD, SPREAD_PER_DECADE
from trimtab.hints import load_extra
from trimtab.runs.reader import Floats

_STEP = 0.02  # of the grid of lines, in powers of ten
_WIDTH = 4.0  # standard deviations that the grid covers


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The edges of one arm by size, the smallest first."""

    params: tuple[int, ...]
    edges: tuple[float | None, ...]  # None: no learning rate failed
    ranges: tuple[tuple[float, float], ...]  # of the edge over seeds; without one, from the highest learning rate on
    best_lr: float  # at the largest size

    def probability(self, params: float, lr: float) -> float:
        """That this learning rate fails at this size."""
        x = self._distance(params)
        at, slopes, weights = self._lines
        spread = math.hypot(EDGE_SPREAD, SPREAD_PER_DECADE * max(x, 0.0))
        return float((weights * _below((math.log10(lr) - at - slopes * x) / spread)).sum())

    def edge(self, params: float, probability: float = 0.5) -> float:
        """The learning rate that fails at this size with this probability."""
        low, high = math.log10(self.best_lr) - 6, math.log10(self.best_lr) + 6
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.probability(params, 10**middle) > probability else (middle, high)
        return float(10**low)

    @property
    def measured(self) -> int:
        """Sizes at which a learning rate failed."""
        return sum(edge is not None for edge in self.edges)

    @property
    def slope(self) -> tuple[float, float]:
        """Mean and standard deviation, in powers of ten of the edge per power of ten of the size."""
        _, slopes, weights = self._lines
        mean = float((weights * slopes).sum())
        return mean, math.sqrt(float((weights * (slopes - mean) ** 2).sum()))

    @cached_property
    def _lines(self) -> tuple[Floats, Floats, Floats]:
        """The edges at the largest size, the slopes, and the weight of each pair."""
        known = [math.log10(edge) for edge in self.edges if edge is not None]
        middle = math.log10(self.best_lr) + GAP
        reach = _WIDTH * GAP_SPREAD
        ends = min([middle - reach, *known]) - 1, max([middle + reach, *known]) + 1
        at = np.arange(*ends, _STEP)[:, None]
        slopes = np.arange(SLOPE - _WIDTH * SLOPE_SPREAD, SLOPE + _WIDTH * SLOPE_SPREAD, _STEP)[None, :]
        logs = -(((at - middle) / GAP_SPREAD) ** 2) / 2 - ((slopes - SLOPE) / SLOPE_SPREAD) ** 2 / 2
        for params, edge, (low, high) in zip(self.params, self.edges, self.ranges, strict=True):
            line = at + slopes * self._distance(params)
            if edge is None:  # above the highest learning rate
                logs = logs + np.log(np.maximum(_below((line - math.log10(low)) / EDGE_SPREAD), 1e-300))
            else:
                spread = math.hypot(EDGE_SPREAD, math.log10(high / low) / 4)
                logs = logs - ((line - math.log10(edge)) / spread) ** 2 / 2
        weights = np.exp(logs - logs.max())
        return at, slopes, weights / weights.sum()

    def _distance(self, params: float) -> float:
        return math.log10(params / self.params[-1])


def trend_of(curves: Sequence[Curve]) -> Trend | None:
    """The trend of the curves of one arm that have learned something; None without one."""
    known = sorted(
        (x for x in curves if x.params and x.learned and len(x.lrs) > 1), key=lambda curve: curve.params or 0
    )
    if not known:
        return None
    return Trend(
        params=tuple(curve.params or 0 for curve in known),
        edges=tuple(curve.edge for curve in known),
        ranges=tuple((curve.edge_low or curve.lrs[-1], curve.edge_high or math.inf) for curve in known),
        best_lr=known[-1].best_lr,
    )


def _below(z: Any) -> Any:
    """The standard normal distribution function."""
    return load_extra("scipy.special", extra="lab", purpose="a forecast").ndtr(z)
