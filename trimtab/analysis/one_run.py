"""One finished run: do RMS spikes predict its loss spikes, and in which tensor do they start?

A table over many tensors contains small p-values by chance: with a hundred tensors, one below 0.01 is expected. The row
`ANY` is about all tensors together, as an alarm on any tensor is.
"""

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trimtab.analysis import spikes
from trimtab.analysis.spikes import PAPER, SpikeRules
from trimtab.analysis.thresholds import LEAST_SPIKE, OUTLIER, OUTLIER_WINDOW
from trimtab.hints import load_extra
from trimtab.runs import EventKind
from trimtab.runs.reader import Floats, Ints, Run, read_run
from trimtab.runs.records import number

ANY = "any tensor"
VARIANCE = ("var_l1", "var_max")  # the gradient variance of Li et al. 2022: sum and maximum of √v


class Correlation(NamedTuple):
    r: float
    p: float  # two-sided, as if the pairs were independent
    pairs: int  # in which both are finite
    shifted: float = math.nan  # share of the circular shifts of one series with an r at least as high


@dataclass(frozen=True)
class LeadTime:
    """How well the RMS spikes of one tensor predict the loss spikes of the run."""

    name: str
    rms_spikes: list[int]
    loss_spikes: list[int]
    leads: list[int]  # steps from RMS spike to loss spike, one per predicted loss spike
    false_alarms: int  # RMS spikes without a loss spike after them
    chance: float  # expected share of predicted loss spikes if the two were unrelated
    p: float  # probability that chance predicts as many

    @property
    def explained(self) -> int:
        return len(self.leads)

    @property
    def median_lead(self) -> float | None:
        return statistics.median(self.leads) if self.leads else None


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
        """Steps from the first tensor's spike to where the loss begins to rise; 0 or less if the loss was first."""
        return self.step - self.tensors[0][1] if self.tensors else None


@dataclass(frozen=True)
class LossRatios:
    """Loss over the best finite loss of all steps before; infinite where the loss is not finite."""

    ratios: Floats
    floor: float  # noise: the 95th percentile over the last fifth of the run

    @property
    def highest(self) -> float:
        return float(self.ratios.max()) if len(self.ratios) else 1.0

    def above(self, limit: float) -> int:
        return int((self.ratios > limit).sum())


@dataclass(frozen=True)
class Course:
    """A signal of the whole model over the watched steps, where it is finite."""

    steps: Ints
    values: Floats

    @property
    def peak(self) -> int:
        """The step at which it is highest."""
        return int(self.steps[self.values.argmax()])

    def highest(self, share: float = 1.0) -> float:
        """The highest value in this first share of the run."""
        return float(self.values[self.steps <= max(share * self.steps[-1], self.steps[0])].max())


class Evaluation(NamedTuple):
    """A validation loss, and the clocks at that moment. `seconds` are of training steps only."""

    tokens: float
    seconds: float
    loss: float


@dataclass(frozen=True)
class Analysis:
    rules: SpikeRules
    lead_times: list[LeadTime]  # ANY first, then tensors by p
    first_spikes: list[FirstSpike]
    ratios: LossRatios
    correlations: dict[str, Correlation] = field(default_factory=dict)
    variance: dict[str, Course] = field(default_factory=dict)  # sum and maximum of √v
    lr_peak: int | None = None  # the first step at the highest learning rate; None without a log
    evaluations: list[Evaluation] = field(default_factory=list)

    def reaches(self, loss: float) -> Evaluation | None:
        """The first evaluation with at most this loss."""
        return next((found for found in self.evaluations if found.loss <= loss), None)


def analyze(run: Run | str | Path, rules: SpikeRules | None = None) -> Analysis:
    """All of the analysis of one run. The default rules are the paper's, fitted to short runs."""
    run = run if isinstance(run, Run) else read_run(run)
    rules = rules or rules_for(run)
    ratios = loss_ratios(losses_of(run)[1])
    rates = np.nan_to_num(run.log.column("lr"))
    return Analysis(
        rules,
        lead_times(run, rules),
        first_spikes(run, rules),
        ratios,
        correlations(run),
        variance={name: found for name in VARIANCE if (found := course(run, name))},
        lr_peak=int(run.log.steps[rates.argmax()]) if rates.any() else None,
        evaluations=[
            Evaluation(number(event.values.get("tokens")), number(event.values.get("seconds")), event.loss)
            for event in run.of_kind(EventKind.EVALUATED)
        ],
    )


def rules_for(run: Run) -> SpikeRules:
    """The paper's rules, fitted to the length of the run."""
    steps, _ = losses_of(run)
    return PAPER.fitted(int(steps[-1]) if len(steps) else 0)


def losses_of(run: Run) -> tuple[Ints, Floats]:
    """Steps and losses from the log, or from the signals of a loop that writes no log."""
    source = run.log if len(run.log.steps) else run.signals
    return source.steps, source.loss


def lead_times(run: Run, rules: SpikeRules = PAPER) -> list[LeadTime]:
    """A row for the spikes of all tensors, then one per tensor that spiked, the smallest p first."""
    steps, losses = losses_of(run)
    late = spikes.loss_spikes(steps, losses, rules)
    watched, by_tensor = rms_of(run)
    found = {name: spikes.rms_spikes(watched, rms, rules) for name, rms in by_tensor.items()}
    rows = [lead_time(name, early, late, steps, rules) for name, early in found.items() if early]
    rows.sort(key=lambda row: (row.p, -row.explained, row.name))
    together = sorted({step for early in found.values() for step in early})
    return [lead_time(ANY, together, late, steps, rules), *rows]


def lead_time(name: str, early: list[int], late: list[int], steps: ArrayLike, rules: SpikeRules = PAPER) -> LeadTime:
    causes = spikes.explain_spikes(late, early, rules)
    leads = [step - cause for step, cause in zip(late, causes, strict=True) if cause is not None]
    useful = {cause for cause in early for step in late if rules.lead[0] <= step - cause <= rules.lead[1]}
    chance = spikes.chance_rate(early, steps, rules)
    p = binomial_tail(len(leads), len(late), chance)
    return LeadTime(name, early, late, leads, len(early) - len(useful), chance, p)


def first_spikes(run: Run, rules: SpikeRules = PAPER) -> list[FirstSpike]:
    """For every loss spike, the tensors that spiked before its peak."""
    steps, losses = losses_of(run)
    mean, deviation = spikes.running_range(losses, rules.window)
    found = []
    for span in spikes.loss_spans(steps, losses, rules):
        place = int(np.searchsorted(steps, span[0]))
        peak = spikes.find_peak(steps, losses, span, rules)
        # From the longest lead before the onset to just before the peak.
        tensors = first_above(run, (span[0] - rules.lead[1], peak[0] - rules.lead[0]), rules.rms)
        found.append(FirstSpike(span[0], (float(mean[place]), float(deviation[place])), peak, tensors))
    return found


def outliers(run: Run, rules: SpikeRules = PAPER) -> list[FirstSpike]:
    """Single losses far above those before them that are part of no loss spike, as after one bad batch."""
    steps, losses = losses_of(run)
    mean, deviation = spikes.running_range(losses, OUTLIER_WINDOW)
    with np.errstate(invalid="ignore", over="ignore"):
        limit = mean + np.maximum(OUTLIER * deviation, (LEAST_SPIKE - 1) * np.abs(mean))
        high = np.isfinite(losses) & (losses > limit) & (np.arange(len(losses)) >= OUTLIER_WINDOW)
    high[:-1] &= losses[1:] <= limit[:-1]
    for first, last in spikes.loss_spans(steps, losses, rules):
        high &= (steps < first - rules.gap) | (steps > last + rules.gap)
    found = np.flatnonzero(high).tolist()
    return [FirstSpike(int(steps[i]), (mean[i], deviation[i]), (int(steps[i]), losses[i]), []) for i in found]


def first_above(run: Run, span: tuple[int, int], limit: float) -> list[tuple[str, int, float]]:
    """Tensors with RMS_t >= `limit` in a span of steps: name, first step, RMS_t there; the earliest first."""
    watched, by_tensor = rms_of(run)
    near = (watched >= span[0]) & (watched <= span[1])
    found = []
    for name, rms in by_tensor.items():
        high = np.flatnonzero(near & (np.nan_to_num(rms, nan=0.0) >= limit))
        if len(high):
            found.append((name, int(watched[high[0]]), float(rms[high[0]])))
    return sorted(found, key=lambda row: (row[1], -row[2]))


def loss_ratios(losses: Sequence[float] | Floats) -> LossRatios:
    """How far the loss was above its best (Li et al. 2022); 1 at the first step."""
    values = np.asarray(losses, dtype=np.float64)
    finite = np.isfinite(values)
    best = np.minimum.accumulate(np.concatenate([[np.inf], np.where(finite, values, np.inf)]))[:-1]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratios = np.where(np.isfinite(best), values / best, 1.0)
    ratios = np.where(finite, ratios, np.inf)
    tail = ratios[len(ratios) - len(ratios) // 5 :]
    tail = tail[np.isfinite(tail)]
    return LossRatios(ratios, float(np.quantile(tail, 0.95)) if len(tail) else math.nan)


def course(run: Run, name: str) -> Course | None:
    """A total over the watched steps; None if it was not measured."""
    if name not in run.signals.totals:
        return None
    values = run.signals.total(name)
    finite = np.isfinite(values)
    return Course(run.signals.steps[finite], values[finite]) if finite.any() else None


def correlations(run: Run, names: Sequence[str] = VARIANCE) -> dict[str, Correlation]:
    """Pearson's r of the loss ratio with sum and maximum of √v, over the watched steps."""
    steps, losses = losses_of(run)
    ratio_at = dict(zip(steps.tolist(), loss_ratios(losses).ratios.tolist(), strict=True))
    ratios = np.array([ratio_at.get(step, np.nan) for step in run.signals.steps.tolist()])
    return {name: pearson(ratios, run.signals.total(name)) for name in names if name in run.signals.totals}


def rms_of(run: Run) -> tuple[Ints, Mapping[str, Floats]]:
    """Steps and RMS_t by tensor; of a run without signals only the largest, if its optimizer measured it."""
    if by_tensor := run.signals.tensors("rms"):
        return run.signals.steps, by_tensor
    largest = run.log.rms_max
    return run.log.steps, {} if np.isnan(largest).all() else {"rms_max": largest}


def binomial_tail(hits: int, tries: int, rate: float) -> float:
    """P(X >= hits) in `tries` tries that succeed at `rate` each."""
    if hits <= 0:
        return 1.0
    special = load_extra("scipy.special", extra="lab", purpose="the p-value of a prediction")
    return 0.0 if hits > tries else float(special.bdtrc(hits - 1, tries, rate))


def pearson(x: ArrayLike, y: ArrayLike) -> Correlation:
    """Correlation of two series where both are finite; NaN with fewer than three pairs or if one does not vary.

    Steps of a run are not independent, so p is too small. `shifted` keeps the dependence within each series: it
    compares r with that of series shifted against each other by a tenth of their length or more.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    if len(a) < 3 or not (_varies(a) and _varies(b)):
        return Correlation(math.nan, math.nan, len(a))
    stats = load_extra("scipy.stats", extra="lab", purpose="the correlation of two signals")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly constant series
        # Scaled first: squares of large values would overflow.
        a, b = a / np.abs(a).max(), b / np.abs(b).max()
        r, p = stats.pearsonr(a, b)
    return Correlation(float(r), float(p), len(a), _shifted(a, b))


def _shifted(a: Floats, b: Floats) -> float:
    """A p-value, one-sided: the share of shifts whose r is at least that of the series as they are, itself included."""
    spectra = np.fft.rfft(a - a.mean()), np.fft.rfft(b - b.mean())
    products = np.fft.irfft(np.conj(spectra[0]) * spectra[1], n=len(a))  # r of every shift, up to a factor
    nearest = max(len(a) // 10, 1)
    shifts = products[nearest : len(a) - nearest + 1]
    return float((1 + (shifts >= products[0]).sum()) / (1 + len(shifts)))


def _varies(x: Floats) -> bool:
    """By more than rounding."""
    return bool(np.ptp(x / (np.abs(x).max() or 1.0)) > 1e-14)
