"""At which size a signal reaches its limit, from fits over the sizes that were run.

    critical    the attention logit that separates failed from successful runs
    forecast    the size at which a fit crosses the critical value. It needs FEWEST_SIZES sizes, logits that are not
                bounded and a critical value that was measured, and covers at most HORIZON powers of ten beyond the
                largest size

The gradient of the first MLP matrix is treated in the same way: it shrinks with size, and within NEAR_EPS times Adam's
eps the update shrinks to r / (r + eps). Wortsman et al. 2023b, sections 3.1.1, 3.4 and 3.5.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from trimtab.analysis.findings import Critical, Curve, Fit, Forecast, ForecastOutcome, Result
from trimtab.analysis.fits import crossing
from trimtab.analysis.measure import run_fails
from trimtab.analysis.thresholds import CRITICAL_LOGIT, FEWEST_SIZES, NEAR_EPS

_SEPARATED = 0.8  # mean share of failed and of successful runs that must be on their side of the critical value


# --- The critical value


def critical_of(results: Sequence[Result], curves: Sequence[Curve]) -> Critical:
    """From the runs whose logits are not bounded; the paper's value if they do not determine one."""
    by_key = {curve.key: curve for curve in curves}
    runs = [r for r in results if r.finished and not r.bounded and r.logit_max > 0 and math.isfinite(r.logit_max)]
    # An arm that has learned nothing has failed for another reason.
    judged = [(r.logit_max, run_fails(r, x)) for r in runs if (x := by_key.get(r.key)) is not None and x.learned]
    failed = sorted(logit for logit, fails in judged if fails)
    stable = sorted(logit for logit, fails in judged if not fails)
    paper = Critical(
        value=CRITICAL_LOGIT,
        low=CRITICAL_LOGIT,
        high=CRITICAL_LOGIT,
        measured=False,
        reason="none failed" if stable else "all failed" if failed else "no logits",
        stable=len(stable),
        failed=len(failed),
    )
    if not failed or not stable:
        return paper
    value = _threshold(stable, failed)
    found = replace(paper, value=value, measured=True)
    if stable[-1] < failed[0]:
        return replace(found, low=stable[-1], high=failed[0], reason="separated")
    above, below = sum(x > value for x in stable), sum(x <= value for x in failed)
    if (above / len(stable) + below / len(failed)) / 2 > 1 - _SEPARATED:
        return replace(paper, reason="not separated")
    low, high = min(failed[0], value), max(stable[-1], value)
    return replace(found, low=low, high=high, reason="overlap", wrong=above + below)


def _threshold(stable: Sequence[float], failed: Sequence[float]) -> float:
    """The geometric mean of two neighbours with the fewest runs on the wrong side; of several the middle one."""
    values = sorted({*stable, *failed})
    middles = [math.sqrt(a * b) for a, b in pairwise(values)]
    if not middles:
        return values[0]
    # Shares, not counts: a grid has many more stable cells than failed ones.
    errors = [sum(x > t for x in stable) / len(stable) + sum(x <= t for x in failed) / len(failed) for t in middles]
    best = [t for t, error in zip(middles, errors, strict=True) if error <= min(errors) + 1e-9]
    return best[len(best) // 2]


# --- Forecasts


def forecasts_of(
    fits: Sequence[Fit], curves: Sequence[Curve], results: Sequence[Result], critical: Critical
) -> list[Forecast]:
    eps = {(result.study, result.arm): result.eps for result in results if math.isfinite(result.eps)}
    found = []
    for fit in fits:
        if fit.signal == "logit_max" and critical.measured and not fit.bounded:
            level = critical.value
            failed = first_failure(curves, fit.study, fit.arm, fit.lr)
            # One uncertainty at a time: that of the fit, then that of the critical value.
            early = [crossing(fit, level, 2), crossing(fit, critical.low)]
            late = [crossing(fit, level, 1), crossing(fit, critical.high)]
            found.append(_forecast(fit, level, early, late, failed))
        elif fit.signal == "grad_rms" and (fit.study, fit.arm) in eps:
            level = NEAR_EPS * eps[fit.study, fit.arm]
            found.append(_forecast(fit, level, [crossing(fit, level, 1)], [crossing(fit, level, 2)], None))
    return found


def first_failure(curves: Sequence[Curve], study: str, arm: str, lr: float) -> Curve | None:
    """The smallest size from which on this learning rate has failed at every size that was run."""
    those = [curve for curve in curves if (curve.study, curve.arm) == (study, arm) and curve.params]
    found = None
    for curve in sorted(those, key=lambda curve: -(curve.params or 0)):
        if curve.failing_lr is None or curve.failing_lr > lr:
            break
        found = curve
    return found


def _forecast(
    fit: Fit, level: float, early: Sequence[float | None], late: Sequence[float | None], failed: Curve | None
) -> Forecast:
    """`early` and `late` are the sizes at the ends of the range, None beyond the horizon."""
    forecast = Forecast(
        study=fit.study, arm=fit.arm, lr=fit.lr, signal=fit.signal, level=level, value=fit.values[-1], sizes=fit.params
    )
    if failed is not None:
        at = float(failed.params or 0)
        decades = max(math.log10(at / fit.params[-1]), 0.0)
        return replace(forecast, fails_at=at, low=at, high=at, seen=True, decades=decades, outcome="seen")
    if len(fit.params) < FEWEST_SIZES:
        return forecast
    crossed = crossing(fit, level)
    low = min((x for x in (*early, crossed) if x is not None), default=None)
    if crossed is None:
        return replace(forecast, low=low, outcome="not within horizon")
    high = max(crossed, *(x for x in late if x is not None)) if None not in late else None
    decades = max(math.log10(crossed / fit.params[-1]), 0.0)
    outcome: ForecastOutcome = "at largest size" if crossed <= fit.params[-1] else "ahead"
    return replace(forecast, fails_at=crossed, low=low, high=high, decades=decades, outcome=outcome)
