"""The forecast for one size and learning rate: does it fail there, with which probability, and by which signs?

    edge      the trend of the edge of stability over size (trend.py): any model, no signal from inside
    logits    the largest attention logit, fitted over size, against the critical value that the study measured
    eps       the gradient of the first MLP matrix, fitted over size, against Adam's eps
    logz      the drift of log Z, fitted over size, against LOGZ_DRIFT

The probability joins `edge` and `logits` where both say something: the mean of their log odds, weighted by EDGE_WEIGHT.
The other two are causes that no recipe of bench/forecasts.py had, so they are warnings and do not change it.

    fails        the probability is FIRM or more, or the learning rate was run at this size and failed
    holds        it is 1 - FIRM or less, or the learning rate was run at this size and did not fail
    cannot tell  it is between, or there is a reason not to believe it: `Reason`

A learning rate between two of the grid is interpolated in logarithms. A size beyond HORIZON is not judged, whatever the
probability: bench/forecasts.py has not tested so far.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import Literal

from trimtab.analysis.findings import Critical, Curve, Findings, HeldOut, Outcome, Result, Signal
from trimtab.analysis.fits import shrink
from trimtab.analysis.thresholds import EDGE_WEIGHT, FEWEST_SIZES, FIRM, HORIZON, LOGZ_DRIFT, NEAR_EPS
from trimtab.analysis.trend import Trend, trend_of

Range = tuple[float, float, float]  # value, low, high
SignName = Literal["edge", "logits", "eps", "logz"]
# Why a sign says nothing.
Silence = Literal["", "not measured", "few sizes", "bounded", "no critical value", "outside grid", "no eps"]
# Why the outcome is what it is.
Reason = Literal["observed", "probability", "undecided", "too far", "no runs", "open grid", "outside grid"]
_SIGNALS: dict[SignName, Signal] = {"logits": "logit_max", "eps": "grad_rms", "logz": "logz_drift"}
_SAME_SIZE = 0.02  # share by which two sizes may differ and count as the same
_REACH = 10**0.5  # how far outside the grid a learning rate may be
_LEAST, _MOST = 0.001, 0.999  # of a probability: a sign is never certain


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What one sign says about one learning rate at one size."""

    name: SignName
    probability: float | None = None  # of a failure; None: it says nothing, because of `silence`
    silence: Silence = ""
    value: float = math.nan  # of the signal at this size; for `edge` the edge of stability
    low: float = math.nan
    high: float = math.nan
    level: float = math.nan  # at which it fails; for `edge` the learning rate


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The forecast for one learning rate."""

    lr: float
    outcome: Outcome
    reason: Reason
    probability: float  # of a failure; NaN if unknown
    signs: tuple[Sign, ...] = ()
    update_left: float = math.nan  # the share of the update that remains with eps

    def sign(self, name: SignName) -> Sign:
        return next(sign for sign in self.signs if sign.name == name)

    @property
    def disagree(self) -> bool:
        """One sign says that it fails, another that it holds."""
        known = [x for name in ("edge", "logits") if (x := self.sign(name).probability) is not None]
        return bool(known) and min(known) < 0.5 < max(known) and max(known) - min(known) > 2 * FIRM - 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    study: str
    arm: str
    params: float
    decades: float  # beyond the largest size that was run; 0 inside
    sizes: tuple[int, ...]  # params of the sizes that were run
    edge: Range | None  # of stability at this size, Recipe.edge; None beyond the horizon
    critical: Critical
    rates: tuple[Rate, ...]
    outcome: Outcome  # of `lr`; without one, of the learning rate that is best at the largest size


def predict_size(findings: Findings, params: float, lr: float | None = None, arm: str | None = None) -> Prediction:
    """Forecast one size, at one learning rate or at all of the grid, for one arm or the first."""
    if not (math.isfinite(params) and params > 0):
        raise ValueError(f"params={params} must be a number above zero; try 1e9")
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"lr={lr} must be a number above zero; try 0.01")
    known = list(dict.fromkeys((result.study, result.arm) for result in findings.results))
    chosen = [pair for pair in known if arm in (None, pair[1])]
    if not chosen:
        raise ValueError(f"there is no arm {arm!r}; try {' or '.join(repr(name) for _, name in known)}")
    return Recipe(findings, *chosen[0]).predict(params, lr)


@dataclass(frozen=True)
class Recipe:
    """One arm of a study."""

    findings: Findings
    study: str
    arm: str

    @cached_property
    def results(self) -> list[Result]:
        return [result for result in self.findings.results if (result.study, result.arm) == (self.study, self.arm)]

    @cached_property
    def curves(self) -> list[Curve]:
        """Those with a known size, the smallest first."""
        found = [x for x in self.findings.curves if (x.study, x.arm) == (self.study, self.arm) and x.params]
        return sorted(found, key=lambda curve: curve.params or 0)

    @cached_property
    def trend(self) -> Trend | None:
        return trend_of(self.curves)

    def predict(self, params: float, lr: float | None = None) -> Prediction:
        grid = sorted({result.lr for result in self.results if math.isfinite(result.lr) and not result.extra})
        rates = tuple(self.rate(params, x) for x in ([lr] if lr is not None else grid))
        best = self.curves[-1].best_lr if self.curves else None
        central = next((rate for rate in rates if rate.lr == best), rates[0] if rates else None)
        known = self.trend is not None and self.decades(params) <= HORIZON
        return Prediction(
            study=self.study,
            arm=self.arm,
            params=params,
            decades=self.decades(params),
            sizes=tuple(curve.params or 0 for curve in self.curves),
            edge=self.edge(params) if known else None,
            critical=self.findings.critical,
            rates=rates,
            outcome=central.outcome if central is not None else "cannot tell",
        )

    def decades(self, params: float) -> float:
        """Powers of ten beyond the largest size that was run."""
        return max(math.log10(params / (self.curves[-1].params or 1)), 0.0) if self.curves else 0.0

    def edge(self, params: float) -> Range:
        """The edge of stability at a size, and the learning rates that fail with probability 1 - FIRM and FIRM."""
        assert self.trend is not None
        middle, low, high = (self.trend.edge(params, x) for x in (0.5, 1 - FIRM, FIRM))
        return middle, low, high

    def rate(self, params: float, lr: float) -> Rate:
        signs = (self._edge_sign(params, lr), *(self._signal_sign(name, params, lr) for name in _SIGNALS))
        weighted = zip(signs[:2], (EDGE_WEIGHT, 1 - EDGE_WEIGHT), strict=True)
        probability = join_odds([(sign.probability, w) for sign, w in weighted if sign.probability is not None])
        outcome, reason = self._outcome(params, lr, probability)
        if reason == "observed":
            probability = float(outcome == "fails")
        return Rate(
            lr=lr,
            outcome=outcome,
            reason=reason,
            probability=probability,
            signs=signs,
            update_left=shrink(signs[2].value, signs[2].level / NEAR_EPS),
        )

    def _outcome(self, params: float, lr: float, probability: float) -> tuple[Outcome, Reason]:
        if not any(curve.learned for curve in self.curves):
            return "cannot tell", "no runs"
        run = next((x for x in self.curves if abs((x.params or 0) / params - 1) <= _SAME_SIZE and lr in x.lrs), None)
        if run is not None:
            failed = not run.learned or run.excess(lr, run.loss[run.lrs.index(lr)]) > 1
            return "fails" if failed else "holds", "observed"
        if self.decades(params) > HORIZON:
            return "cannot tell", "too far"
        largest = self.curves[-1]
        if not largest.lrs[0] / _REACH <= lr <= largest.lrs[-1] * _REACH:
            return "cannot tell", "outside grid"
        if largest.best_lr == largest.lrs[-1]:  # neither the best learning rate nor the edge is known
            return "cannot tell", "open grid"
        if 1 - FIRM < probability < FIRM:
            return "cannot tell", "undecided"
        return "fails" if probability >= FIRM else "holds", "probability"

    # --- The signs

    def _edge_sign(self, params: float, lr: float) -> Sign:
        if self.trend is None:
            return Sign(name="edge", silence="not measured")
        probability = min(max(self.trend.probability(params, lr), _LEAST), _MOST)
        value, low, high = self.edge(params)
        return Sign(name="edge", probability=probability, value=value, low=low, high=high, level=lr)

    def _signal_sign(self, name: SignName, params: float, lr: float) -> Sign:
        """A signal that is fitted over size, against its level."""
        found = self._fitted(_SIGNALS[name], params, lr)
        if not isinstance(found, tuple):
            return Sign(name=name, silence=found)
        value, low, high = found
        level, spread = self._level(name)
        sign = Sign(name=name, value=value, low=low, high=high, level=level)
        if name == "logits" and not self.findings.critical.measured:
            return replace(sign, silence="no critical value")
        if not math.isfinite(level):
            return replace(sign, silence="no eps")
        # The range covers about two standard deviations on each side.
        width = math.hypot(math.log10(high / low) / 4, spread)
        distance = math.log10(value / level) * (-1 if name == "eps" else 1)  # gradients fail when they are small
        probability = NormalDist().cdf(distance / max(width, 1e-3))
        return replace(sign, probability=min(max(probability, _LEAST), _MOST))

    def _level(self, name: SignName) -> tuple[float, float]:
        """The level at which a signal fails, and its standard deviation in powers of ten."""
        if name == "logits":
            critical = self.findings.critical
            return critical.value, math.log10(critical.high / critical.low) / 4
        if name == "logz":
            return LOGZ_DRIFT, 0.0
        eps = next((result.eps for result in self.results if math.isfinite(result.eps)), math.nan)
        return NEAR_EPS * eps, 0.0

    def _fitted(self, signal: Signal, params: float, lr: float) -> Range | Silence:
        """Value and range of a signal at a size, or why there is none."""
        fits = [x for x in self.findings.fits if (x.study, x.arm, x.signal) == (self.study, self.arm, signal)]
        usable = sorted((fit for fit in fits if len(fit.params) >= FEWEST_SIZES), key=lambda fit: fit.lr)
        if not usable:
            return "few sizes" if fits else "not measured"
        if signal == "logit_max" and all(fit.bounded for fit in usable):
            return "bounded"
        same = next((fit for fit in usable if math.isclose(fit.lr, lr, rel_tol=1e-6)), None)
        if same is not None:
            return same.predict(params)
        pair = next((pair for pair in pairwise(usable) if pair[0].lr < lr < pair[1].lr), None)
        if pair is None:
            return "outside grid"
        weight = math.log(lr / pair[0].lr) / math.log(pair[1].lr / pair[0].lr)
        ends = zip(*(fit.predict(params) for fit in pair), strict=True)
        value, low, high = (math.exp((1 - weight) * math.log(a) + weight * math.log(b)) for a, b in ends)
        return value, low, high


def join_odds(weighted: Sequence[tuple[float, float]]) -> float:
    """The probability whose log odds are the weighted mean of those of (probability, weight); NaN without any."""
    if not weighted:
        return math.nan
    mean = fmean([math.log(p / (1 - p)) for p, _ in weighted], [weight for _, weight in weighted])
    return 1 / (1 + math.exp(-mean))


# --- The check of a study by itself


def hold_out(findings: Findings, without: Callable[[str, str, int], Findings]) -> list[HeldOut]:
    """The largest size of each arm with three or more, forecast from the smaller ones at every learning rate.

    `without(study, arm, params)` are the findings without that size of that arm.
    """
    found = []
    for study, arm in dict.fromkeys((curve.study, curve.arm) for curve in findings.curves):
        recipe = Recipe(findings, study, arm)
        if len(recipe.curves) < FEWEST_SIZES:
            continue
        largest = recipe.curves[-1]
        smaller = Recipe(without(study, arm, largest.params or 0), study, arm)
        for lr in largest.lrs:
            said, seen = smaller.rate(largest.params or 0, lr), recipe.rate(largest.params or 0, lr)
            row = HeldOut(
                study=study,
                arm=arm,
                params=largest.params or 0,
                lr=lr,
                probability=said.probability,
                outcome=said.outcome,
                failed=seen.outcome == "fails",
            )
            found.append(row)
    return found
