"""The facts of the verdict about each study; `trimtab.report.verdict` has the sentences."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab.analysis.findings import Comparison, Curve, Findings, Fit, Forecast, Result, Signal, Source
from trimtab.analysis.measure import group_by, run_fails
from trimtab.analysis.thresholds import LOGZ_DRIFT, NEAR_EPS

Sign = Literal["logits", "logz", "spike", "eps", "none"]
Effect = Literal["prevents", "raises", "none"]


@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    arm: str
    switches: tuple[str, ...]
    curves: tuple[Curve, ...]  # by size, the largest last
    failing: Curve | None  # with the lowest failing learning rate; of several the smallest
    held_lr: float | None  # if all sizes fail at the same learning rate: the one below it
    ahead: tuple[Forecast, ...]  # failures by attention logits that were not observed, the smallest size first
    near_eps: Forecast | None  # the smallest size at which gradients come near eps
    causes: Mapping[Sign, int]  # failed runs by the signal that left its range first
    effect: Effect | None = None  # whether it avoids the failure of the first arm, if that fails

    @property
    def largest(self) -> Curve:
        return self.curves[-1]


@dataclass(frozen=True, kw_only=True)
class StudyVerdict:
    source: Source
    arms: tuple[ArmVerdict, ...]  # empty: no run has a finite loss
    finished: bool
    comparisons: tuple[tuple[Comparison, Curve, Curve], ...]  # first arm and another, at the largest size of the first
    backtests: tuple[tuple[float, Fit], ...]  # of fits to attention logits, with the factor; the best first


def judge(findings: Findings, source: Source) -> StudyVerdict:
    curves = [curve for curve in findings.curves if curve.study == source.name]
    arms = group_by(curves, lambda curve: curve.arm).values()
    by_size = [sorted(those, key=lambda curve: curve.params or 0) for those in arms]
    base = by_size[0][-1] if by_size else None
    fits = [f for f in findings.fits if (f.study, f.signal) == (source.name, "logit_max") and not f.bounded]
    backtests = [(fit.backtest.factor, fit) for fit in fits if fit.backtest is not None]
    by_key = {curve.key: curve for curve in curves}
    pairs = [
        (one, base, other)
        for one in findings.comparisons
        if base is not None and one.size == base.size and math.isfinite(one.ratio)
        if (other := by_key.get((one.study, one.other, one.size))) is not None
    ]
    return StudyVerdict(
        source=source,
        arms=tuple(_arm(findings, source, those, base) for those in by_size),
        finished=any(result.finished for result in findings.results if result.study == source.name),
        comparisons=tuple(pairs),
        backtests=tuple(sorted(backtests, key=lambda pair: pair[0])),
    )


def _arm(findings: Findings, source: Source, curves: Sequence[Curve], base: Curve | None) -> ArmVerdict:
    arm, largest = curves[0].arm, curves[-1]
    failing = min(
        (curve for curve in curves if curve.failing_lr is not None),
        key=lambda curve: (curve.failing_lr or 0, curve.params or 0),
        default=None,
    )
    rates = {curve.failing_lr for curve in curves}
    held = [lr for lr in largest.lrs if failing is not None and lr < (failing.failing_lr or 0)]
    logits = _forecasts(findings, source, arm, "logit_max")
    failed = {forecast.lr for forecast in logits if forecast.seen}  # these learning rates fail for another reason
    near = [x for x in _forecasts(findings, source, arm, "grad_rms") if x.lr not in failed]
    return ArmVerdict(
        arm=arm,
        switches=source.switches(arm),
        curves=tuple(curves),
        failing=failing,
        held_lr=held[-1] if held and len(curves) > 1 and len(rates) == 1 else None,
        ahead=tuple(forecast for forecast in logits if not forecast.seen),
        near_eps=near[0] if near else None,
        causes=_causes(findings, curves),
        effect=_effect(largest, base) if base is not None and arm != base.arm else None,
    )


def _forecasts(findings: Findings, source: Source, arm: str, signal: Signal) -> list[Forecast]:
    """Those with a failing size, the smallest first."""
    key = (source.name, arm, signal)
    found = [x for x in findings.forecasts if (x.study, x.arm, x.signal) == key and x.fails_at is not None]
    return sorted(found, key=lambda forecast: forecast.fails_at or 0)


def _causes(findings: Findings, curves: Sequence[Curve]) -> Mapping[Sign, int]:
    by_key = {curve.key: curve for curve in curves}
    found: Counter[Sign] = Counter()
    for result in findings.results:
        curve = by_key.get(result.key)
        if result.finished and curve is not None and run_fails(result, curve):
            signs = signs_of(result, findings.critical.value)
            found[min(signs, key=lambda sign: sign[0])[1] if signs else "none"] += 1
    return dict(found.most_common())


def signs_of(result: Result, critical: float) -> list[tuple[int, Sign]]:
    """(step, signal) for each signal that left its range."""
    found: list[tuple[int, Sign]] = [(step, "spike") for step, _ in result.spikes[:1]]
    found += [(step, "logits") for step, value in result.logits if value > critical][:1]
    found += [(result.steps, "eps")] * (result.grad_rms < NEAR_EPS * result.eps)
    return found + [(step, "logz") for step, value in result.logz if abs(value - result.logz[0][1]) > LOGZ_DRIFT][:1]


def _effect(curve: Curve, base: Curve) -> Effect | None:
    if base.failing_lr is None or curve.size != base.size:
        return None
    if curve.failing_lr is None:
        return "prevents" if curve.lrs[-1] >= base.failing_lr else None
    return "raises" if curve.failing_lr > base.failing_lr else "none"
