"""At which size a recipe will fail, from fits over the sizes that were run.

    critical    the attention logit that parts the runs that failed from those that did not
    forecast    the size at which a fit crosses the critical value. It takes SIZES sizes, and looks at most HORIZON
                powers of ten beyond the largest; how far it went is always said

The gradient of the first MLP matrix is treated likewise: it shrinks with size, and where it comes within NEAR times
Adam's eps, the update shrinks to r / (r + eps). Wortsman et al. 2023b, sections 3.1.1, 3.4 and 3.5.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from trimtab.analysis.findings import Critical, Curve, Fit, Forecast, Result
from trimtab.analysis.fits import HORIZON, crossing, shrink
from trimtab.analysis.measure import run_fails
from trimtab.analysis.words import join, plural, say_count, say_decades, say_number, say_range

SIZES = 3  # fewest for a forecast
PAPER_CRITICAL = 1e4  # above it every run of the paper had diverged
NEAR = 10.0
_PARTED = 0.8  # of the failing and of the fine runs, on average, must be on their side of the critical value


# --- The critical value


def critical_of(results: Sequence[Result], curves: Sequence[Curve]) -> Critical:
    """From the runs whose logits are free to grow; the paper's where these do not tell."""
    by_key = {(curve.study, curve.arm, curve.size): curve for curve in curves}
    runs = [r for r in results if r.finished and not r.bounded and r.logit_max > 0 and math.isfinite(r.logit_max)]
    judged = [(r, by_key[key]) for r in runs if (key := (r.study, r.arm, r.size)) in by_key]
    failing = sorted(r.logit_max for r, curve in judged if run_fails(r, curve))
    fine = sorted(r.logit_max for r, curve in judged if not run_fails(r, curve))
    if not failing or not fine:
        return _from_paper(
            "no run failed" if fine else "no run was fine" if failing else "no attention logits are known"
        )
    value = _threshold(fine, failing)
    if fine[-1] < failing[0]:
        why = (
            f"between {say_number(fine[-1])}, the largest attention logit of {plural(len(fine), 'run')} that did not "
            f"fail, and {say_number(failing[0])}, the smallest of {plural(len(failing), 'run')} that did"
        )
        return Critical(value=value, low=fine[-1], high=failing[0], measured=True, why=why)
    above, below = sum(x > value for x in fine), sum(x <= value for x in failing)
    if (above / len(fine) + below / len(failing)) / 2 > 1 - _PARTED:
        return _from_paper("attention logits do not part the runs that failed from those that did not")
    why = (
        f"the value that parts {plural(len(failing), 'run')} that failed from {len(fine)} that did not best; "
        f"{above + below} are on the wrong side"
    )
    return Critical(value=value, low=min(failing[0], value), high=max(fine[-1], value), measured=True, why=why)


def _threshold(fine: Sequence[float], failing: Sequence[float]) -> float:
    """Between two neighbours, half-way by ratio, where the fewest are on the wrong side; of several the middle one."""
    values = sorted({*fine, *failing})
    middles = [math.sqrt(a * b) for a, b in pairwise(values)]
    if not middles:
        return values[0]
    # Shares, not counts: a grid has many more fine cells than failing ones.
    errors = [sum(x > t for x in fine) / len(fine) + sum(x <= t for x in failing) / len(failing) for t in middles]
    best = [t for t, error in zip(middles, errors, strict=True) if error <= min(errors) + 1e-9]
    return best[len(best) // 2]


def _from_paper(reason: str) -> Critical:
    why = f"{say_number(PAPER_CRITICAL)}, the paper's for models of 2 million and more, because {reason} here"
    return Critical(value=PAPER_CRITICAL, low=PAPER_CRITICAL, high=PAPER_CRITICAL, measured=False, why=why)


# --- Forecasts


def forecasts_of(
    fits: Sequence[Fit], curves: Sequence[Curve], results: Sequence[Result], critical: Critical
) -> list[Forecast]:
    eps = {(result.study, result.arm): result.eps for result in results if math.isfinite(result.eps)}
    found = []
    for fit in fits:
        if fit.signal == "logit_max":
            found.append(_seen(fit, curves) or _logit_forecast(fit, critical))
        elif (fit.study, fit.arm) in eps:
            found.append(_eps_forecast(fit, eps[fit.study, fit.arm]))
    return found


def first_failure(curves: Sequence[Curve], study: str, arm: str, lr: float) -> Curve | None:
    """The smallest size at which this learning rate, or a lower one, was seen to fail."""
    those = [curve for curve in curves if (curve.study, curve.arm) == (study, arm) and curve.params]
    failed = [curve for curve in those if curve.failing_lr is not None and curve.failing_lr <= lr]
    return min(failed, key=lambda curve: curve.params or 0, default=None)


def _seen(fit: Fit, curves: Sequence[Curve]) -> Forecast | None:
    curve = first_failure(curves, fit.study, fit.arm, fit.lr)
    if curve is None or curve.params is None:
        return None
    at = float(curve.params)
    why = f"seen: at {say_count(at)} parameters the loss is above what counts as failing"
    return _forecast(fit, at, at, at, why, seen=True)


def _logit_forecast(fit: Fit, critical: Critical) -> Forecast:
    if len(fit.params) < SIZES:
        return _forecast(fit, None, None, None, f"a forecast needs {SIZES} sizes, there are {len(fit.params)}")
    level = critical.value
    at = crossing(lambda n: fit.predict(n)[0] / level, fit)
    # One doubt at a time: what the fit leaves open, then what the critical value leaves open.
    earliest = [
        crossing(lambda n: fit.predict(n)[2] / level, fit),
        crossing(lambda n: fit.predict(n)[0] / critical.low, fit),
    ]
    latest = [
        crossing(lambda n: fit.predict(n)[1] / level, fit),
        crossing(lambda n: fit.predict(n)[0] / critical.high, fit),
    ]
    return _between(fit, at, earliest, latest, f"the largest attention logit, {_now(fit)}, reaches {say_number(level)}")


def _eps_forecast(fit: Fit, eps: float) -> Forecast:
    if len(fit.params) < SIZES:
        return _forecast(fit, None, None, None, f"a forecast needs {SIZES} sizes, there are {len(fit.params)}")
    level = NEAR * eps
    at, early, late = (crossing(lambda n, i=i: level / fit.predict(n)[i], fit) for i in range(3))  # type: ignore[misc]
    taken = f"where eps takes {1 - shrink(level, eps):.0%} of the update"
    return _between(fit, at, [early], [late], f"the gradient, {_now(fit)}, falls to {level:.1g}, {taken},")


def _between(
    fit: Fit, at: float | None, earliest: Sequence[float | None], latest: Sequence[float | None], what: str
) -> Forecast:
    known = [x for x in (*earliest, at) if x is not None]
    low = min(known, default=None)
    if at is None:
        perhaps = f"; at the earliest at {say_count(low)}" if low is not None else ""
        why = f"{what} not within {HORIZON:.0f} powers of ten beyond the largest size{perhaps}"
        return _forecast(fit, None, low, None, why)
    high = max(at, *(x for x in latest if x is not None)) if None not in latest else None
    if at <= fit.params[-1]:
        return _forecast(fit, at, low, high, f"{what} already at the largest size, by the fit, and it has not failed")
    forecast = _forecast(fit, at, low, high, "")
    why = f"{what} at {say_count(at)} parameters ({say_range(low, high)}), {say_decades(forecast.decades)}"
    return _forecast(fit, at, low, high, why)


def _forecast(
    fit: Fit, at: float | None, low: float | None, high: float | None, why: str, *, seen: bool = False
) -> Forecast:
    beyond = math.log10(at / fit.params[-1]) if at is not None else 0.0
    return Forecast(
        study=fit.study,
        arm=fit.arm,
        lr=fit.lr,
        signal=fit.signal,
        fails_at=at,
        low=low,
        high=high,
        seen=seen,
        decades=max(beyond, 0.0),
        why=why,
    )


def _now(fit: Fit) -> str:
    return f"{say_number(fit.values[-1])} at {say_count(fit.params[-1])} parameters"


# --- Notes


def notes_of(results: Sequence[Result]) -> list[str]:
    notes = []
    finished = [result for result in results if result.finished]
    for study in dict.fromkeys(result.study for result in finished):
        those = [result for result in finished if result.study == study]
        if not any(math.isfinite(result.logit_max) for result in those):
            notes.append(
                f"{study}: no attention logits were logged (signals.jsonl), so nothing can be predicted from them"
            )
            continue
        sizes = {result.params for result in those if result.params}
        if len(sizes) < SIZES:
            notes.append(f"{study}: a forecast needs {SIZES} sizes, there are {len(sizes)}")
    unknown = sorted({result.size for result in finished if not result.params})
    if unknown:
        notes.append(f"sizes without a parameter count are in no fit: {join(unknown)}")
    return notes
