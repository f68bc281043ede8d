"""The prediction for one size: will this recipe fail there, at this learning rate?

    fails       the whole range of the predicted attention logit is above the critical value, or this learning rate has
                failed at this size or a smaller one
    fine        the whole range is below the critical value
    uncertain   neither, or the size is more than HORIZON powers of ten beyond what was run, or too few sizes were run

A learning rate between two of the grid is interpolated in logarithms; one outside the grid is not extrapolated. Only
growing attention logits are predicted, and the distance of the gradient to eps: a recipe may fail for other reasons.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trimtab.analysis.findings import Critical, Findings, Fit, Signal
from trimtab.analysis.fits import shrink
from trimtab.analysis.forecasts import first_failure
from trimtab.analysis.thresholds import FEWEST_SIZES, HORIZON, NEAR_EPS

Outcome = Literal["fails", "fine", "uncertain"]
Reason = Literal["failed", "no logits", "few sizes", "outside grid", "too far", "above", "below", "near"]
Range = tuple[float, float, float]  # value, low, high
Failed = tuple[float, int]  # the learning rate and the size (params) that failed


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The prediction for one learning rate."""

    lr: float
    outcome: Outcome
    reason: Reason
    failed: Failed | None = None
    logit: float = math.nan
    logit_low: float = math.nan
    logit_high: float = math.nan
    grad_rms: float = math.nan
    update_left: float = math.nan  # the share of the update that remains with eps
    near_eps: bool = False


@dataclass(frozen=True, kw_only=True)
class Prediction:
    study: str
    arm: str
    params: float
    decades: float  # beyond the largest size that was run; 0 inside
    span: float  # decades between the smallest and the largest size that was run
    hint: bool  # further beyond them than `span`
    critical: Critical
    sizes: int  # that have attention logits
    grid: tuple[float, ...]  # learning rates with a fit
    rates: tuple[Rate, ...]
    outcome: Outcome  # of `lr`; without one, of the learning rate that is best at the largest size
    backtests: tuple[float, ...]  # factors of the fits to the logits of this arm, the best first


def predict_size(findings: Findings, params: float, lr: float | None = None, arm: str | None = None) -> Prediction:
    """Predict one size, at one learning rate or at all of the grid, for one arm or the first."""
    if not (math.isfinite(params) and params > 0):
        raise ValueError(f"params={params} must be a number above zero; try 1e9")
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"lr={lr} must be a number above zero; try 0.01")
    known = list(dict.fromkeys((result.study, result.arm) for result in findings.results))
    chosen = [pair for pair in known if arm in (None, pair[1])]
    if not chosen:
        raise ValueError(f"there is no arm {arm!r}; try {' or '.join(repr(name) for _, name in known)}")
    recipe = _Recipe(findings, params, *chosen[0])
    lrs = {r.lr for r in findings.results if (r.study, r.arm) == recipe.key and math.isfinite(r.lr)}
    sizes = [r.params for r in findings.results if r.study == recipe.study and r.finished and r.params]
    decades = max(math.log10(params / max(sizes)), 0.0) if sizes else 0.0
    span = math.log10(max(sizes) / min(sizes)) if sizes else 0.0
    rates = tuple(recipe.rate(x, decades) for x in ([lr] if lr is not None else sorted(lrs)))
    curves = [curve for curve in findings.curves if (curve.study, curve.arm) == recipe.key]
    best = max(curves, key=lambda curve: curve.params or 0).best_lr if curves else None
    central = next((rate for rate in rates if rate.lr == best), rates[0] if rates else None)
    fits = recipe.fits("logit_max")
    return Prediction(
        study=recipe.study,
        arm=recipe.arm,
        params=params,
        decades=decades,
        span=span,
        hint=decades > span,
        critical=findings.critical,
        sizes=max((len(fit.params) for fit in fits), default=0),
        grid=tuple(fit.lr for fit in fits if len(fit.params) >= FEWEST_SIZES),
        rates=rates,
        outcome=central.outcome if central is not None else "uncertain",
        backtests=tuple(sorted(f.backtest.factor for f in fits if f.backtest is not None and not f.bounded)),
    )


@dataclass(frozen=True)
class _Recipe:
    """One arm of a study at the size to predict."""

    findings: Findings
    params: float
    study: str
    arm: str

    @property
    def key(self) -> tuple[str, str]:
        return self.study, self.arm

    def fits(self, signal: Signal) -> list[Fit]:
        those = [fit for fit in self.findings.fits if (fit.study, fit.arm, fit.signal) == (*self.key, signal)]
        return sorted(those, key=lambda fit: fit.lr)

    def rate(self, lr: float, decades: float) -> Rate:
        logit, grad = self.predict("logit_max", lr), self.predict("grad_rms", lr)
        mine = [result for result in self.findings.results if (result.study, result.arm) == self.key]
        eps = next((result.eps for result in mine if math.isfinite(result.eps)), math.nan)
        outcome, reason, failed = self.judge(lr, decades, logit)
        value, low, high = logit if isinstance(logit, tuple) else (math.nan,) * 3
        gradient = grad[0] if isinstance(grad, tuple) else math.nan
        return Rate(
            lr=lr,
            outcome=outcome,
            reason=reason,
            failed=failed,
            logit=value,
            logit_low=low,
            logit_high=high,
            grad_rms=gradient,
            update_left=shrink(gradient, eps),
            near_eps=gradient < NEAR_EPS * eps,
        )

    def judge(self, lr: float, decades: float, logit: Range | Reason) -> tuple[Outcome, Reason, Failed | None]:
        failed = first_failure(self.findings.curves, self.study, self.arm, lr)
        if failed is not None and failed.params is not None and failed.params <= self.params:
            return "fails", "failed", (failed.failing_lr or lr, failed.params)
        if not isinstance(logit, tuple):
            return "uncertain", logit, None
        critical, (value, low, high) = self.findings.critical, logit
        if decades > HORIZON:
            return "uncertain", "too far", None
        if low > critical.value and value > critical.high:
            return "fails", "above", None
        if high < critical.value and value < critical.low:
            return "fine", "below", None
        return "uncertain", "near", None

    def predict(self, signal: Signal, lr: float) -> Range | Reason:
        """Value and range of a signal, or why there is none."""
        fits = self.fits(signal)
        usable = [fit for fit in fits if len(fit.params) >= FEWEST_SIZES]
        if not usable:
            return "few sizes" if fits else "no logits"
        for fit in usable:
            if math.isclose(fit.lr, lr, rel_tol=1e-6):
                return fit.predict(self.params)
        pair = next((pair for pair in pairwise(usable) if pair[0].lr < lr < pair[1].lr), None)
        if pair is None:
            return "outside grid"
        weight = math.log(lr / pair[0].lr) / math.log(pair[1].lr / pair[0].lr)
        ends = zip(*(fit.predict(self.params) for fit in pair), strict=True)
        value, low, high = (math.exp((1 - weight) * math.log(a) + weight * math.log(b)) for a, b in ends)
        return value, low, high
