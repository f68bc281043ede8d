"""How a signal grows with size: a polynomial in log-log coordinates, per arm and learning rate.

    fit         log10 signal over log10 params: a line for two or three sizes, a parabola for four and more
    refits      the same with one seed alone, with one size left out, and as a line and a parabola: their range is the
                uncertainty
    back-test   the largest size predicted from the smaller ones, as a factor

Signals are the largest attention logit and the gradient of the first MLP matrix. Wortsman et al. 2023b, section 3.4,
fit parabolas to many more sizes; a parabola through three points has no residual.
"""

import math
from collections.abc import Sequence

import numpy as np

from trimtab.analysis.findings import Backtest, Fit, Result, Signal, evaluate, geometric_mean
from trimtab.analysis.measure import group_by
from trimtab.analysis.thresholds import HORIZON

_SIGNALS: tuple[Signal, ...] = ("logit_max", "grad_rms", "logz_drift")
Point = tuple[int, int, float]  # params, seed, value


def fits_of(results: Sequence[Result]) -> list[Fit]:
    """One per study, arm, learning rate and signal that was measured at two sizes or more."""
    known = [r for r in results if r.finished and r.params and math.isfinite(r.lr)]
    groups = group_by(known, lambda result: (result.study, result.arm, result.lr))
    fits = [_fit(key, signal, group) for key, group in groups.items() for signal in _SIGNALS]
    return sorted([fit for fit in fits if fit is not None], key=lambda fit: (fit.study, fit.signal, fit.arm, fit.lr))


def _fit(key: tuple[str, str, float], signal: Signal, group: Sequence[Result]) -> Fit | None:
    points = [(result.params or 0, result.seed, float(getattr(result, signal))) for result in group]
    points = [point for point in points if math.isfinite(point[2]) and point[2] > 0]
    sizes, values = _means(points)
    if len(sizes) < 2:
        return None
    coefficients = polynomial(sizes, values)
    return Fit(
        study=key[0],
        arm=key[1],
        lr=key[2],
        signal=signal,
        params=tuple(sizes),
        values=tuple(values),
        coefficients=coefficients,
        degree=len(coefficients) - 1,
        spread=_spread(points, coefficients),
        refits=(*_refits(points), *(_snapshot_refits(group, points) if signal == "logit_max" else ())),
        backtest=_backtest(sizes, values),
        bounded=all(result.bounded for result in group),
    )


def polynomial(sizes: Sequence[float], values: Sequence[float], *, degree: int | None = None) -> tuple[float, ...]:
    """Coefficients over log10, the highest power first."""
    degree = degree or (2 if len(sizes) >= 4 else 1)
    return tuple(float(c) for c in np.polyfit(np.log10(sizes), np.log10(values), degree))


def _means(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    """Sizes and the geometric means of their seeds."""
    sizes = sorted({params for params, _, _ in points})
    return sizes, [geometric_mean([value for params, _, value in points if params == size]) for size in sizes]


def _refits(points: Sequence[Point]) -> list[tuple[float, ...]]:
    """With each seed alone, with each size left out if two remain, and as a line and as a parabola."""
    seeds, sizes = sorted({seed for _, seed, _ in points}), {params for params, _, _ in points}
    parts = [[point for point in points if point[1] == seed] for seed in seeds] if len(seeds) > 1 else []
    parts += [[point for point in points if point[0] != size] for size in sorted({point[0] for point in points})]
    found = [polynomial(*_means(part)) for part in parts if len({point[0] for point in part}) > 1]
    return found + [polynomial(*_means(points), degree=degree) for degree in (1, 2) if len(sizes) > degree]


def _snapshot_refits(group: Sequence[Result], points: Sequence[Point]) -> list[tuple[float, ...]]:
    """With the first and with the last record of the snapshot alone, at the same mean level: only growth differs."""
    level, found = geometric_mean(value for _, _, value in points), []
    for end in (0, 1):
        ends = [(r.params or 0, r.seed, r.logit_ends[end]) for r in group if 0 < r.logit_ends[end] < math.inf]
        if len(ends) == len(points):
            scale = level / geometric_mean(value for _, _, value in ends)
            found.append(polynomial(*_means([(params, seed, scale * value) for params, seed, value in ends])))
    return found


def _spread(points: Sequence[Point], coefficients: Sequence[float]) -> float:
    """Residual standard deviation of single runs in decades; 0 without a degree of freedom."""
    left = [math.log10(value) - evaluate(coefficients, math.log10(params)) for params, _, value in points]
    free = len(points) - len(coefficients)
    return math.sqrt(sum(x * x for x in left) / free) if free > 0 else 0.0


def _backtest(sizes: Sequence[int], values: Sequence[float]) -> Backtest | None:
    if len(sizes) < 3:
        return None
    predicted = 10 ** evaluate(polynomial(sizes[:-1], values[:-1]), math.log10(sizes[-1]))
    return Backtest(params=sizes[-1], predicted=predicted, measured=values[-1])


def crossing(fit: Fit, level: float, part: int = 0) -> float | None:
    """The smallest size, from the largest that was run to HORIZON beyond, at which a part of `fit.predict` reaches it.

    Logits grow to the level, gradients fall to it.
    """

    def reached(x: float) -> bool:
        value = fit.predict(10**x)[part]
        return value >= level if fit.signal == "logit_max" else value <= level

    start = math.log10(fit.params[-1])
    grid = np.linspace(start, start + HORIZON, 201)
    place = next((i for i, x in enumerate(grid) if reached(x)), None)
    if place is None:
        return None
    if place == 0:
        return float(fit.params[-1])
    low, high = float(grid[place - 1]), float(grid[place])
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return float(10**high)


def shrink(grad_rms: float, eps: float) -> float:
    """The share of an update that remains with eps: r / (r + eps)."""
    return grad_rms / (grad_rms + eps) if grad_rms + eps > 0 else math.nan
