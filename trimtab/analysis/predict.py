"""The verdict for one size: will this recipe fail there, at this learning rate?

    fails       the whole range of the predicted attention logit is above the critical value, or this learning rate has
                failed already, at this size or a smaller one
    fine        the whole range is below the critical value
    uncertain   neither, or the size is further than HORIZON powers of ten from what was run, or too few sizes were

A learning rate between two of the grid takes the logarithms of both, weighed by distance; one beside the grid is not
guessed. What is predicted is one mechanism, growing attention logits, and beside it the gradient's distance to eps: a
recipe may fail for other reasons, and the words say what was looked at.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.analysis.findings import Critical, Findings, Fit, clean
from trimtab.analysis.fits import HORIZON, shrink
from trimtab.analysis.forecasts import NEAR, SIZES, first_failure
from trimtab.analysis.words import join, say_count, say_decades, say_number, say_rate, say_rates

Outcome = Literal["fails", "fine", "uncertain"]
Range = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What is predicted for one learning rate."""

    lr: float
    outcome: Outcome
    why: str
    logit: float = math.nan
    logit_low: float = math.nan
    logit_high: float = math.nan
    grad_rms: float = math.nan
    update_left: float = math.nan  # what eps leaves of the update; 1 is all


@dataclass(frozen=True, kw_only=True)
class Prediction:
    study: str
    arm: str
    params: float
    decades: float  # beyond the largest size that was run; 0 inside
    hint: bool  # further beyond them than the sizes that were run span
    critical: Critical
    rates: tuple[Rate, ...]
    outcome: Outcome  # of the learning rate asked for; of all of them, that of the one that is best at the largest size
    words: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = clean(self)
        return data


def predict_size(findings: Findings, params: float, lr: float | None = None, arm: str | None = None) -> Prediction:
    """Predict one size, at one learning rate or at all of the grid, for one arm or the first."""
    if not (math.isfinite(params) and params > 0):
        raise ValueError(f"params={params} must be a number above zero; try 1e9")
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"lr={lr} must be a number above zero; try 0.01")
    study, arm = _choose(findings, arm)
    grid = sorted({r.lr for r in findings.results if (r.study, r.arm) == (study, arm) and math.isfinite(r.lr)})
    sizes = [r.params for r in findings.results if r.study == study and r.finished and r.params]
    decades = max(math.log10(params / max(sizes)), 0.0) if sizes else 0.0
    span = math.log10(max(sizes) / min(sizes)) if sizes else 0.0
    rates = tuple(_rate(findings, study, arm, params, decades, x) for x in ([lr] if lr is not None else grid))
    curves = [curve for curve in findings.curves if (curve.study, curve.arm) == (study, arm)]
    best = max(curves, key=lambda curve: curve.params or 0).best_lr if curves else None
    central = next((rate for rate in rates if rate.lr == best), rates[0] if rates else None)
    return Prediction(
        study=study,
        arm=arm,
        params=params,
        decades=decades,
        hint=decades > span,
        critical=findings.critical,
        rates=rates,
        outcome=central.outcome if central is not None else "uncertain",
        words=(*_words(findings.critical, arm, params, decades, span, rates), *_tested(findings, study, arm)),
    )


def _choose(findings: Findings, arm: str | None) -> tuple[str, str]:
    """The study and the arm that is meant."""
    known = list(dict.fromkeys((result.study, result.arm) for result in findings.results))
    chosen = [pair for pair in known if arm in (None, pair[1])]
    if not chosen:
        raise ValueError(f"arm {arm!r} is not there; try {join([repr(name) for _, name in known], 'or')}")
    return chosen[0]


def _rate(findings: Findings, study: str, arm: str, params: float, decades: float, lr: float) -> Rate:
    logit, why = _predict(findings, study, arm, "logit_max", params, lr)
    grad, _ = _predict(findings, study, arm, "grad_rms", params, lr)
    eps = next((r.eps for r in findings.results if (r.study, r.arm) == (study, arm) and math.isfinite(r.eps)), math.nan)
    outcome, reason = _judge(findings, study, arm, params, decades, lr, logit, why)
    left = math.nan
    if grad is not None:
        left = shrink(grad[0], eps)
        if grad[0] < NEAR * eps:
            reason += f"; eps leaves {left:.0%} of the update"
    value, low, high = logit or (math.nan,) * 3
    return Rate(
        lr=lr,
        outcome=outcome,
        why=reason,
        logit=value,
        logit_low=low,
        logit_high=high,
        grad_rms=grad[0] if grad is not None else math.nan,
        update_left=left,
    )


def _judge(
    findings: Findings,
    study: str,
    arm: str,
    params: float,
    decades: float,
    lr: float,
    logit: Range | None,
    why: str,
) -> tuple[Outcome, str]:
    failed = first_failure(findings.curves, study, arm, lr)
    if failed is not None and (failed.params or math.inf) <= params:
        rate = failed.failing_lr or lr
        at = "it" if math.isclose(rate, lr, rel_tol=1e-6) else f"learning rate {say_rate(rate)}"
        return "fails", f"{at} failed already at {say_count(failed.params or 0)} parameters"
    if logit is None:
        return "uncertain", why
    critical = findings.critical
    value, low, high = logit
    told = f"attention logit {say_number(value)} ({say_number(low)} to {say_number(high)})"
    if decades > HORIZON:
        return "uncertain", f"{told}, but that is {say_decades(decades)}: too far for the fit"
    if low > critical.value and value > critical.high:
        return "fails", f"{told}, above {say_number(critical.value)}"
    if high < critical.value and value < critical.low:
        return "fine", f"{told}, below {say_number(critical.value)}"
    return "uncertain", f"{told}, too near to {say_number(critical.value)} to tell"


def _predict(
    findings: Findings, study: str, arm: str, signal: str, params: float, lr: float
) -> tuple[Range | None, str]:
    """Value and range, or why there is none."""
    fits = sorted(
        (fit for fit in findings.fits if (fit.study, fit.arm, fit.signal) == (study, arm, signal)),
        key=lambda fit: fit.lr,
    )
    usable = [fit for fit in fits if len(fit.params) >= SIZES]
    if not usable:
        most = max((len(fit.params) for fit in fits), default=0)
        nothing = "no attention logits were logged (docs/lab.md says how a model of your own gives them)"
        return None, f"a prediction needs {SIZES} sizes, there are {most}" if fits else nothing
    same = [fit for fit in usable if math.isclose(fit.lr, lr, rel_tol=1e-6)]
    if same:
        return same[0].predict(params), ""
    below, above = [fit for fit in usable if fit.lr < lr], [fit for fit in usable if fit.lr > lr]
    if not below or not above:
        return None, f"it lies beside the grid, which has {say_rates([fit.lr for fit in usable])}"
    return _between(below[-1], above[0], params, lr), ""


def _between(below: Fit, above: Fit, params: float, lr: float) -> Range:
    weight = math.log(lr / below.lr) / math.log(above.lr / below.lr)
    pairs = zip(below.predict(params), above.predict(params), strict=True)
    value, low, high = (math.exp((1 - weight) * math.log(a) + weight * math.log(b)) for a, b in pairs)
    return value, low, high


def _words(
    critical: Critical, arm: str, params: float, decades: float, span: float, rates: Sequence[Rate]
) -> list[str]:
    size = f"At {say_count(params)} parameters {arm}"
    if not rates:
        return [f"{size} cannot be predicted: it has no runs"]
    if len(rates) == 1:
        said = {"fails": "will fail", "fine": "should be fine", "uncertain": "cannot be called"}[rates[0].outcome]
        words = [f"{size} {said} at learning rate {say_rate(rates[0].lr)}: {rates[0].why}."]
    else:
        parts = []
        for outcome, said in (("fine", "should be fine"), ("uncertain", "cannot be called"), ("fails", "will fail")):
            those = [rate.lr for rate in rates if rate.outcome == outcome]
            if those:
                parts.append(f"{said} at {say_rates(those)}")
        words = [f"{size} {join(parts)}."]
        words += [f"Learning rate {say_rate(rate.lr)}: {rate.outcome}, {rate.why}." for rate in rates]
    if decades > 0:
        far = f"; those span {span:.1f} powers of ten, so take it for a hint" if decades > span else ""
        words.append(f"This is {say_decades(decades)}{far}.")
    words.append(f"The critical attention logit is {say_number(critical.value)}: {critical.why}.")
    words.append("Only attention logits and the gradient's distance to eps were looked at.")
    return words


def _tested(findings: Findings, study: str, arm: str) -> list[str]:
    """How far the same kind of prediction was off where it could be checked."""
    mine = [f for f in findings.fits if (f.study, f.arm, f.signal) == (study, arm, "logit_max") and not f.bounded]
    factors = sorted(fit.backtest.factor for fit in mine if fit.backtest is not None)
    if not factors:
        return []
    middle, worst = factors[len(factors) // 2], factors[-1]
    return [
        "Checked where it can be: the largest size, predicted from the smaller ones, was off by a factor of "
        f"{middle:.1f} in the middle of {len(factors)} learning rates and of {worst:.1f} at worst."
    ]
