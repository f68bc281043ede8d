"""What the log of a finished run shows: did RMS_t see the loss spikes coming, and where did they begin?

    print(analyze("runs/gpt"))                 everything below, as text
    lead_times(run)                            per tensor: spikes, how many were announced, chance, lead in steps
    first_spikes(run)                          per loss spike: the tensor that spiked first
    loss_ratios(losses)                        how often and how far the loss was above its best (Li et al. 2022)
    correlations(run)                          of that ratio with the second moments, with p-values

A table over many tensors holds small p-values by luck alone: with a hundred tensors one in a hundred is expected.
`ANY` takes all tensors together and is the row that an alarm on any of them must answer for.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from trimtab.analysis.chance import Correlation, binomial_tail, pearson
from trimtab.analysis.spikes import (
    PAPER,
    Floats,
    Ints,
    SpikeRules,
    chance_rate,
    explain_spikes,
    find_peak,
    loss_spans,
    loss_spikes,
    rms_spikes,
    running_range,
)
from trimtab.runs.reader import Run, read_run

ANY = "any tensor"
LIMITS = (1.1, 1.2, 1.5)  # of the loss ratio; the paper counts the steps above the second


@dataclass(frozen=True)
class LeadTime:
    """How well the RMS spikes of one tensor announce the loss spikes of the run."""

    name: str
    rms_spikes: list[int]
    loss_spikes: list[int]
    leads: list[int]  # steps from RMS spike to loss spike, one per loss spike that was announced
    false_alarms: int  # RMS spikes that no loss spike followed
    chance: float  # share of the loss spikes that a blind guess would announce

    @property
    def explained(self) -> int:
        return len(self.leads)

    @property
    def p(self) -> float:
        """How likely chance would announce as many."""
        return binomial_tail(self.explained, len(self.loss_spikes), self.chance)

    @property
    def median_lead(self) -> float | None:
        return statistics.median(self.leads) if self.leads else None

    def __str__(self) -> str:
        lead = "" if self.median_lead is None else f", {self.median_lead:g} steps before (median)"
        return (
            f"{self.name}: {self.explained} of {len(self.loss_spikes)} loss spikes announced{lead}; chance "
            f"{self.chance:.2%}, p {self.p:.2g}; {self.false_alarms} of {len(self.rms_spikes)} RMS spikes false"
        )


@dataclass(frozen=True)
class FirstSpike:
    """One loss spike, and the tensors that spiked before its peak: the earliest first, of a step the highest."""

    step: int  # at which it begins
    usual: tuple[float, float]  # running mean of the loss before it, and deviation
    peak: tuple[int, float]  # step and height; a loss that is not finite is the highest
    tensors: list[tuple[str, int, float]]  # name, step, RMS_t there

    @property
    def size(self) -> float:
        """Peak over the usual loss."""
        return self.peak[1] / self.usual[0] if math.isfinite(self.peak[1]) and self.usual[0] else math.inf

    @property
    def lead(self) -> int | None:
        """Steps from the first tensor's spike to where the loss begins to rise; 0 or less if that came first."""
        return self.step - self.tensors[0][1] if self.tensors else None


@dataclass(frozen=True)
class LossRatios:
    """Loss over the best loss of all steps before; infinite where the loss is not finite."""

    ratios: Floats
    floor: float  # noise: the ratio that one step in twenty of the last fifth exceeds

    @property
    def highest(self) -> float:
        return float(self.ratios.max()) if len(self.ratios) else 1.0

    def above(self, limit: float) -> int:
        return int((self.ratios > limit).sum())

    def __str__(self) -> str:
        counts = ", ".join(
            f"{self.above(limit)} steps ({self.above(limit) / max(1, len(self.ratios)):.1%}) above {limit}"
            for limit in LIMITS
        )
        return f"loss ratio: {counts}; highest {self.highest:.3f}; noise at the end {self.floor:.3f}"


@dataclass(frozen=True)
class Analysis:
    rules: SpikeRules
    lead_times: list[LeadTime]  # ANY first, then tensors, the most telling first
    first_spikes: list[FirstSpike]
    ratios: LossRatios
    correlations: dict[str, Correlation] = field(default_factory=dict)

    def __str__(self) -> str:
        together, *tensors = self.lead_times
        telling = [row for row in tensors if row.explained][:8]
        lines = [str(together), *map(str, telling)]
        if len(tensors) > len(telling):
            lines.append(f"... and {len(tensors) - len(telling)} tensors with RMS spikes more")
        for spike in self.first_spikes:
            first = ", ".join(f"{name} {rms:.2f} at {step}" for name, step, rms in spike.tensors[:3]) or "no RMS spike"
            peak = f"{spike.peak[1]:.4g} at {spike.peak[0]}, usual {spike.usual[0]:.4g}"
            lines.append(f"loss spike at {spike.step}: {peak}; before the peak {first}")
        lines.append(str(self.ratios))
        for name, (r, p, pairs) in self.correlations.items():
            lines.append(f"loss ratio and {name}: Pearson {r:.3f}, p {p:.2g}, {pairs} steps")
        return "\n".join(lines)


def analyze(run: Run | str | Path, rules: SpikeRules | None = None) -> Analysis:
    """All of it. Without `rules` the paper's, fitted to short runs."""
    run = run if isinstance(run, Run) else read_run(run)
    steps, losses = losses_of(run)
    rules = rules or PAPER.fitted(int(steps[-1]) if len(steps) else 0)
    return Analysis(rules, lead_times(run, rules), first_spikes(run, rules), loss_ratios(losses), correlations(run))


def losses_of(run: Run) -> tuple[Ints, Floats]:
    """Steps and losses from the log, or from the signals of a loop that writes no log."""
    source = run.log if len(run.log.steps) else run.signals
    return source.steps, source.column("loss")


def lead_times(run: Run, rules: SpikeRules = PAPER) -> list[LeadTime]:
    """A row for the spikes of all tensors, then one per tensor that spiked, the least likely by chance first."""
    steps, losses = losses_of(run)
    late = loss_spikes(steps, losses, rules)
    watched, by_tensor = rms_of(run)
    found = {name: rms_spikes(watched, rms, rules) for name, rms in by_tensor.items()}
    rows = [lead_time(name, early, late, steps, rules) for name, early in found.items() if early]
    rows.sort(key=lambda row: (row.p, -row.explained, row.name))
    together = sorted({step for early in found.values() for step in early})
    return [lead_time(ANY, together, late, steps, rules), *rows]


def lead_time(name: str, early: list[int], late: list[int], steps: ArrayLike, rules: SpikeRules = PAPER) -> LeadTime:
    causes = explain_spikes(late, early, rules)
    leads = [step - cause for step, cause in zip(late, causes, strict=True) if cause is not None]
    useful = {cause for cause in early for step in late if rules.lead[0] <= step - cause <= rules.lead[1]}
    return LeadTime(name, early, late, leads, len(early) - len(useful), chance_rate(early, steps, rules))


def first_spikes(run: Run, rules: SpikeRules = PAPER) -> list[FirstSpike]:
    """For every loss spike, who spiked before its peak."""
    steps, losses = losses_of(run)
    mean, deviation = running_range(losses, rules.window)
    watched, by_tensor = rms_of(run)
    found = []
    for span in loss_spans(steps, losses, rules):
        place = int(np.searchsorted(steps, span[0]))
        usual = (float(mean[place]), float(deviation[place]))
        peak = find_peak(steps, losses, span, rules)
        found.append(FirstSpike(span[0], usual, peak, _before(span[0], peak[0], watched, by_tensor, rules)))
    return found


def loss_ratios(losses: Sequence[float] | Floats) -> LossRatios:
    """1 at the first step; a step whose loss is not finite counts as infinitely bad and never as the best."""
    values = np.asarray(losses, dtype=np.float64)
    finite = np.isfinite(values)
    best = np.minimum.accumulate(np.concatenate([[np.inf], np.where(finite, values, np.inf)]))[:-1]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratios = np.where(np.isfinite(best), values / best, 1.0)
    ratios = np.where(finite, ratios, np.inf)
    tail = ratios[len(ratios) - len(ratios) // 5 :]
    tail = tail[np.isfinite(tail)]
    return LossRatios(ratios, float(np.quantile(tail, 0.95)) if len(tail) else float("nan"))


def correlations(run: Run, names: Sequence[str] = ("var_l1", "var_max")) -> dict[str, Correlation]:
    """Pearson's r of the loss ratio with sums and maxima over all √v, over the watched steps."""
    steps, losses = losses_of(run)
    ratio_at = dict(zip(steps.tolist(), loss_ratios(losses).ratios.tolist(), strict=True))
    ratios = np.array([ratio_at.get(step, np.nan) for step in run.signals.steps.tolist()])
    present = [name for name in names if f"totals/{name}" in run.signals.names]
    return {name: pearson(ratios, run.signals.column(f"totals/{name}")) for name in present}


def rms_of(run: Run) -> tuple[Ints, Mapping[str, Floats]]:
    """Steps and RMS_t by tensor; of a run that was not watched only the largest, if its optimizer measured it."""
    by_tensor = run.tensors("rms")
    if by_tensor:
        return run.signals.steps, by_tensor
    return run.log.steps, {"rms_max": run.log.column("rms_max")} if "rms_max" in run.log.names else {}


def _before(
    onset: int, peak: int, watched: Ints, by_tensor: Mapping[str, Floats], rules: SpikeRules
) -> list[tuple[str, int, float]]:
    """Tensors above the threshold from the longest lead before the onset to just before the peak, at their first."""
    near = (watched >= onset - rules.lead[1]) & (watched <= peak - rules.lead[0])
    found = []
    for name, rms in by_tensor.items():
        high = np.flatnonzero(near & (np.nan_to_num(rms, nan=0.0) >= rules.rms))
        if len(high):
            found.append((name, int(watched[high[0]]), float(rms[high[0]])))
    return sorted(found, key=lambda row: (row[1], -row[2]))
