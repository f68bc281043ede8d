"""The facts of the verdict about each study; `trimtab.report.verdict` has the sentences."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab.analysis.findings import Comparison, Critical, Curve, Findings, HeldOut, Result, Source
from trimtab.analysis.measure import group_by, run_fails
from trimtab.analysis.predict import Prediction, Recipe
from trimtab.analysis.thresholds import CRITICAL_LOGIT, LOGZ_DRIFT, NEAR_EPS

Cause = Literal["logits", "logz", "spike", "eps", "none"]
Effect = Literal["prevents", "raises", "none"]
AHEAD = 10  # times the largest size: the forecast of the headline


@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    arm: str
    switches: tuple[str, ...]
    curves: tuple[Curve, ...]  # by size, the largest last
    slope: tuple[float, float] | None  # of the edge of stability over size, Trend.slope
    ahead: Prediction | None  # at AHEAD times the largest size
    causes: Mapping[Cause, int]  # failed runs by the signal that left its range first
    held_out: tuple[HeldOut, ...]
    effect: Effect | None = None  # whether it avoids the failure of the first arm, if that fails

    @property
    def largest(self) -> Curve:
        return self.curves[-1]

    @property
    def open_ended(self) -> list[Curve]:
        return [curve for curve in self.curves if curve.open_ended and curve.learned and len(curve.lrs) > 1]


@dataclass(frozen=True, kw_only=True)
class StudyVerdict:
    source: Source
    arms: tuple[ArmVerdict, ...]  # empty: no run has a finite loss
    finished: bool
    comparisons: tuple[tuple[Comparison, Curve, Curve], ...]  # first arm and another, at the largest size of the first


def judge(findings: Findings, source: Source) -> StudyVerdict:
    curves = [curve for curve in findings.curves if curve.study == source.name]
    arms = group_by(curves, lambda curve: curve.arm).values()
    by_size = [sorted(those, key=lambda curve: curve.params or 0) for those in arms]
    base = by_size[0][-1] if by_size else None
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
    )


def _arm(findings: Findings, source: Source, curves: Sequence[Curve], base: Curve | None) -> ArmVerdict:
    arm, largest = curves[0].arm, curves[-1]
    recipe = Recipe(findings, source.name, arm)
    return ArmVerdict(
        arm=arm,
        switches=source.switches(arm),
        curves=tuple(curves),
        slope=recipe.trend.slope if recipe.trend is not None and recipe.trend.measured > 1 else None,
        ahead=recipe.predict(AHEAD * largest.params) if largest.params and recipe.trend is not None else None,
        causes=_causes(findings, curves),
        held_out=tuple(row for row in findings.held_out if (row.study, row.arm) == (source.name, arm)),
        effect=_effect(largest, base) if base is not None and arm != base.arm else None,
    )


def _causes(findings: Findings, curves: Sequence[Curve]) -> Mapping[Cause, int]:
    by_key = {curve.key: curve for curve in curves}
    found: Counter[Cause] = Counter()
    for result in findings.results:
        curve = by_key.get(result.key)
        if result.finished and curve is not None and run_fails(result, curve):
            causes = causes_of(result, findings.critical)
            found[min(causes, key=lambda cause: cause[0])[1] if causes else "none"] += 1
    return dict(found.most_common())


def causes_of(result: Result, critical: Critical) -> list[tuple[int, Cause]]:
    """(step, signal) for each signal that left its range."""
    found: list[tuple[int, Cause]] = [(step, "spike") for step, _ in result.spikes[:1]]
    # The measured critical value is one of early logits, and of runs without qk-norm.
    early = critical.measured and not result.bounded and result.logit_max > critical.value
    level = critical.value if early else CRITICAL_LOGIT
    found += [(step, "logits") for step, value in result.logits if value > level][:1]
    found += [(result.steps, "eps")] * (result.grad_rms < NEAR_EPS * result.eps)
    return found + [(step, "logz") for step, value in result.logz if abs(value - result.logz[0][1]) > LOGZ_DRIFT][:1]


def _effect(curve: Curve, base: Curve) -> Effect | None:
    if base.failing_lr is None or curve.size != base.size or not (base.learned and curve.learned):
        return None
    if curve.failing_lr is None:
        return "prevents" if curve.lrs[-1] >= base.failing_lr else None
    return "raises" if curve.failing_lr > base.failing_lr else "none"
