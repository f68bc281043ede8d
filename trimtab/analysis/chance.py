"""How likely a result is by chance: the binomial tail, and the correlation of two series with its p-value.

SciPy is an extra that a run log should not need, so both tails come from the regularized incomplete beta function

    I_x(a, b) = x^a (1-x)^b / (a B(a, b)) * 1 / (1 + d1 / (1 + d2 / (1 + ...)))

by its continued fraction (modified Lentz), which converges in a few dozen terms for x < (a+1) / (a+b+2); the other
side follows from I_x(a, b) = 1 - I_(1-x)(b, a).
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

_TINY, _EPS = 1e-300, 1e-15


class Correlation(NamedTuple):
    r: float
    p: float  # two-sided, as if the pairs were independent
    pairs: int  # in which both are finite


def pearson(x: ArrayLike, y: ArrayLike) -> Correlation:
    """Correlation of two series over the places where both are finite; NaN if one of them does not vary.

    Steps of a training are not independent, so p is too small; it orders results, and says no more.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    if len(a) < 3:
        return Correlation(math.nan, math.nan, len(a))
    a, b = _unit(a), _unit(b)
    r = float(np.clip(a @ b, -1.0, 1.0))
    if math.isnan(r):
        return Correlation(math.nan, math.nan, len(a))
    # r² / (1 - r²) = t² / n, and the tail in terms of n / (n + t²) is one of 1 - r²: no division that can fail.
    free = len(a) - 2
    return Correlation(r, incomplete_beta(free / 2, 0.5, (1 - r) * (1 + r)), len(a))


def t_tail(t: float, free: float) -> float:
    """Two-sided: how likely Student's t with `free` degrees of freedom is at least as far from 0."""
    return incomplete_beta(free / 2, 0.5, free / (free + t * t))


def binomial_tail(hits: int, tries: int, rate: float) -> float:
    """P(X >= hits) in `tries` tries that succeed at `rate` each."""
    if hits <= 0:
        return 1.0
    if hits > tries or math.isnan(rate):
        return 0.0 if hits > tries else math.nan
    return incomplete_beta(hits, tries - hits + 1, rate)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError(f"incomplete_beta needs a, b > 0 and x in [0, 1], got a={a}, b={b}, x={x}")
    if x in (0.0, 1.0):
        return float(x)
    return _left(a, b, x) if x <= (a + 1) / (a + b + 2) else 1.0 - _left(b, a, 1 - x)


def _left(a: float, b: float, x: float) -> float:
    front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(front) / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """1 + d1 / (1 + d2 / (1 + ...))."""
    value, c, d = 1.0, 1.0, 0.0
    for i in range(1, 100_000):
        m = i // 2
        if i % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _not_zero(1 + term * d)
        c = _not_zero(1 + term / c)
        value *= c * d
        if abs(c * d - 1) < _EPS:
            break
    return value


def _not_zero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY


def _unit(x: np.ndarray) -> np.ndarray:
    """Centred and of length one; NaN where there is nothing to centre. Scaled first: squares may overflow."""
    scale = np.abs(x).max()
    centred = x / scale if scale > 0 else x
    centred = centred - centred.mean()
    length = np.sqrt(centred @ centred)
    # What rounding leaves of a constant is no variation.
    return centred / length if length > 1e-14 * math.sqrt(len(x)) else np.full_like(x, np.nan)
