"""The results of a folder of runs: every cell, curves over the learning rate, fits over the size, forecasts, notes.

    folders --results--> Result --measure--> Curve, Slope, Comparison --fits, forecasts--> Fit, Critical, Forecast

`read` needs only the files, so an old or an unfinished study gives the same numbers as one that has just ended. What is
missing becomes a note, never an exception. Losses are cross entropy in nats; an unknown loss is NaN, that of a run that
stopped early or ended without a finite loss is infinite, and both are null in JSON.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from trimtab.runs import End
from trimtab.runs.records import as_text

Signal = Literal["logit_max", "grad_rms", "logz_drift"]
Outcome = Literal["fails", "holds", "cannot tell"]
ForecastOutcome = Literal["seen", "few sizes", "not within horizon", "at largest size", "ahead"]
Points = tuple[tuple[int, float], ...]  # (step, value)


class Status(StrEnum):
    """The state of a cell."""

    DONE = End.DONE.value
    STOPPED = "stopped"  # before its last step: it diverged, or its loss was not finite
    RUNNING = "running"  # has no result yet
    FAILED = "failed"  # raised an error
    MISSING = "missing"  # has no folder
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One cell, read from its folder."""

    folder: Path
    name: str
    study: str
    size: str = "?"  # "2x32": depth x width
    arm: str
    lr: float = math.nan
    seed: int = 0
    extra: bool = False  # a run beside the grid of its study, around the edge of stability
    status: Status = Status.MISSING
    why: str = ""  # the reason for its end, or the error that makes it unusable
    kind: str = ""  # "gpt", "clip", ...
    params: int | None = None
    depth: int | None = None
    width: int | None = None
    loss: float = math.nan  # last validation loss; infinite if the run stopped early or ended without a finite one
    first: float = math.nan  # validation loss before the first step: l0
    best: float = math.nan
    steps: int = 0  # taken
    planned: int = 0
    tokens: int = 0
    seconds: float = 0.0
    sha256: str = ""  # of the data
    versions: Mapping[str, str] = field(default_factory=dict)
    evaluations: Points = ()
    losses: Points = ()  # of training, thinned
    logit_max: float = math.nan  # largest attention logit of all layers early in the run, results.SNAPSHOT
    logit_step: int | None = None  # the last step that it includes
    logit_ends: tuple[float, float] = (math.nan, math.nan)  # the first and the last value that it includes
    logits: Points = ()  # largest of all layers, over the run
    lengths: Points = ()  # mean length of a query times that of a key, of the layer with the largest logit
    cosines: Points = ()  # mean cosine of queries and keys, of the same layer
    logz: Points = ()  # log of the softmax's denominator, over the run
    logz_drift: float = math.nan  # its largest distance from the first value
    grad_rms: float = math.nan  # of the first MLP matrix, mean of the last records; compared with Adam's eps
    update_rms: float = math.nan  # of the same matrix
    delta_rms: float = math.nan  # of the same updates without weight decay, divided by the learning rate
    qkv_grad_rms: float = math.nan  # of the first matrix of queries, keys and values
    out_rms: float = math.nan  # of the last block
    outs: tuple[float, ...] = ()  # of every block
    eps: float = math.nan  # of the optimizer; NaN if it has none
    bounded: bool = False  # qk-norm or kappa bounds the attention logits, so they do not predict a failure
    spikes: Points = ()  # of the training loss: where each begins, and its peak (infinite if not finite)
    loss_ratio: float = math.nan  # highest of training loss over the best before it
    alarms: int = 0
    broken: int = 0  # lines that could not be read

    @property
    def key(self) -> tuple[str, str, str]:
        """Of the curve that the run belongs to."""
        return self.study, self.arm, self.size

    @property
    def finished(self) -> bool:
        return self.status in (Status.DONE, Status.STOPPED)

    @property
    def score(self) -> float:
        """The loss that enters the sensitivity; NaN if it is unknown."""
        return score(self.loss, self.first) if self.finished and not math.isnan(self.loss) else math.nan


@dataclass(frozen=True, kw_only=True)
class Source:
    """One study, or one folder of runs without a study."""

    name: str
    folder: Path
    question: str = ""
    subject: str = ""
    cells: int = 0
    finished: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)  # the study file as it is; empty without a study

    def switches(self, arm: str) -> tuple[str, ...]:
        """The interventions of an arm, if the study file has them; it may contain anything."""
        arms = self.data.get("arms")
        for item in arms if isinstance(arms, list) else []:
            if isinstance(item, dict) and as_text(item.get("name")) == arm and isinstance(item.get("switches"), list):
                return tuple(as_text(switch) for switch in item["switches"])
        return ()


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something that is missing, mixed or insufficient."""

    kind: str  # a key of report.sentences.NOTES
    where: str = ""  # folder, study, or arm and size
    count: int = 0
    of: int = 0
    items: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One study, arm and size over the learning rate. The tuples correspond to `lrs`."""

    study: str
    arm: str
    size: str
    params: int | None
    depth: int | None = None
    width: int | None = None
    lrs: tuple[float, ...]  # those with a finished run
    loss: tuple[float, ...]  # mean over seeds of the score
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: tuple[int, ...]  # how many
    broken: tuple[int, ...]  # runs of them that stopped early or have no finite loss
    spikes: tuple[float, ...]  # per run
    loss_ratio: tuple[float, ...]  # loss over the best loss of the curve
    reference: tuple[float, ...] = ()  # the loss that it is compared with, measure.py
    limit: tuple[float, ...] = ()  # the largest difference to it without failing
    logit_max: tuple[float, ...]  # geometric mean over seeds; NaN where it was not measured
    grad_rms: tuple[float, ...]
    missing: tuple[float, ...] = ()  # learning rates that were planned and have no finished run
    first: float
    best_lr: float
    best_loss: float
    sensitivity: float  # NaN if there are fewer than two learning rates
    too_slow: float = math.nan  # the part of it below the best learning rate
    unstable: float = math.nan  # the part above
    sensitivity_low: float | None = None  # over seeds; None with fewer than two
    sensitivity_high: float | None = None
    window: tuple[float, float]  # learning rates that the sensitivity covers
    failing_lr: float | None = None  # the smallest that fails
    edge: float | None = None  # where the limit is crossed, between two learning rates; None: nowhere in the grid
    edge_low: float | None = None  # over seeds; with one seed, the two learning rates
    edge_high: float | None = None
    noise: float = math.nan  # standard deviation of the loss over seeds; NaN if no learning rate has two

    @property
    def key(self) -> tuple[str, str, str]:
        return self.study, self.arm, self.size

    @property
    def learned(self) -> bool:
        return self.best_loss < self.first

    @property
    def open_ended(self) -> bool:
        """The best learning rate is at an end of the grid, so a better one may be outside."""
        return self.best_lr in (self.lrs[0], self.lrs[-1])

    def excess(self, lr: float, loss: float) -> float:
        """How far a loss is above the reference, in units of the limit; above 1 it fails. Below the best learning rate
        0: a run that learns too slowly does not fail."""
        if lr < self.best_lr or lr not in self.lrs:
            return 0.0
        place = self.lrs.index(lr)
        return (loss - self.reference[place]) / self.limit[place]


@dataclass(frozen=True, kw_only=True)
class Slope:
    """How fast sensitivity grows with the size, along width, depth or both."""

    study: str
    arm: str
    along: Literal["width", "depth", "both"]
    sizes: tuple[str, ...]
    value: float  # sensitivity per decade of parameters


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Sensitivity of a study's first arm over that of another, at one size and over the learning rates of both."""

    study: str
    size: str
    params: int | None
    arm: str
    other: str
    ratio: float
    unstable: float = math.nan  # the same ratio of the parts above the best learning rate
    low: float | None = None  # over seeds
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """The largest size predicted from the smaller ones."""

    params: int
    predicted: float
    measured: float

    @property
    def factor(self) -> float:
        """How many times too high or too low; 1 is exact."""
        return max(self.predicted / self.measured, self.measured / self.predicted)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A polynomial of log10 signal over log10 params, for one arm and learning rate."""

    study: str
    arm: str
    lr: float
    signal: Signal
    params: tuple[int, ...]
    values: tuple[float, ...]  # geometric mean over seeds
    coefficients: tuple[float, ...]  # highest power first
    degree: int
    spread: float  # decades: root mean square residual of single runs
    refits: tuple[tuple[float, ...], ...] = ()  # coefficients with a seed or a size left out
    backtest: Backtest | None = None
    bounded: bool = False  # as in Result

    def predict(self, params: float) -> tuple[float, float, float]:
        """The value at a size, and the lowest and highest of the refits, each wider by `spread`."""
        x = math.log10(params)
        centre = evaluate(self.coefficients, x)
        around = [evaluate(refit, x) for refit in self.refits] + [centre]
        return power10(centre), power10(min(around) - self.spread), power10(max(around) + self.spread)


@dataclass(frozen=True, kw_only=True)
class Critical:
    """The attention logit that separates failed from successful runs."""

    value: float
    low: float
    high: float
    measured: bool  # False: the paper's value
    reason: Literal["separated", "overlap", "none failed", "all failed", "no logits", "not separated"]
    stable: int = 0  # runs that did not fail
    failed: int = 0
    wrong: int = 0  # runs on the wrong side


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The size above which a learning rate of an arm fails. None: no failure within the horizon."""

    study: str
    arm: str
    lr: float
    signal: Signal
    fails_at: float | None = None
    low: float | None = None  # earliest; None with a fails_at: cannot be bounded
    high: float | None = None  # latest; None with a fails_at: perhaps never
    seen: bool = False  # a run of this arm and learning rate has failed, at `fails_at`
    decades: float = 0.0  # from the largest size that was run to `fails_at`
    outcome: ForecastOutcome = "few sizes"
    level: float  # of the signal, at which a run fails
    value: float  # of the signal, at the largest size
    sizes: tuple[int, ...]  # params


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The largest size of an arm at one learning rate: the forecast from the smaller sizes, and what was measured."""

    study: str
    arm: str
    params: int
    lr: float
    probability: float  # of a failure
    outcome: Outcome
    failed: bool

    @property
    def right(self) -> bool | None:
        """None: it said that it cannot tell."""
        return None if self.outcome == "cannot tell" else (self.outcome == "fails") == self.failed


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All numbers of one or more studies."""

    studies: tuple[Source, ...]
    results: tuple[Result, ...]
    curves: tuple[Curve, ...] = ()
    slopes: tuple[Slope, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    fits: tuple[Fit, ...] = ()
    critical: Critical
    forecasts: tuple[Forecast, ...] = ()
    held_out: tuple[HeldOut, ...] = ()
    notes: tuple[Note, ...] = ()


def read(folders: Sequence[str | Path]) -> Findings:
    """Read studies, folders of runs and single runs. Raises RunError only if there is no run at all."""
    from trimtab.analysis.folders import read_folders
    from trimtab.analysis.notes import notes_of
    from trimtab.analysis.predict import hold_out

    sources, results, notes = read_folders([Path(folder) for folder in folders])
    findings = measure(results, sources)

    def without(study: str, arm: str, params: int) -> Findings:
        return measure([r for r in results if (r.study, r.arm, r.params) != (study, arm, params)])

    return replace(
        findings,
        held_out=tuple(hold_out(findings, without)),
        notes=(*notes, *notes_of(results, findings.curves)),
    )


def measure(results: Sequence[Result], sources: Sequence[Source] = ()) -> Findings:
    """All numbers that follow from the results."""
    # These modules use the classes above, so they cannot be imported first.
    from trimtab.analysis import forecasts, measure
    from trimtab.analysis.fits import fits_of

    curves, fits = measure.curves_of(results), fits_of(results)
    critical = forecasts.critical_of(results, curves)
    return Findings(
        studies=tuple(sources),
        results=tuple(results),
        curves=tuple(curves),
        slopes=tuple(measure.slopes_of(curves)),
        comparisons=tuple(measure.comparisons_of(results, curves)),
        fits=tuple(fits),
        critical=critical,
        forecasts=tuple(forecasts.forecasts_of(fits, curves, results, critical)),
    )


def score(loss: float, first: float) -> float:
    """The final loss, at most l0, the loss before training; l0 if it is not finite."""
    return min(loss, first) if math.isfinite(loss) else first


def geometric_mean(values: Iterable[float]) -> float:
    """Of those that are finite and above zero."""
    logs = [math.log(value) for value in values if math.isfinite(value) and value > 0]
    return math.exp(fmean(logs)) if logs else math.nan


def evaluate(coefficients: Sequence[float], x: float) -> float:
    """The value of a polynomial; coefficients with the highest power first."""
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def power10(x: float) -> float:
    """10^x, infinite where a float overflows: extrapolations may go anywhere."""
    return 10.0**x if x < 308 else math.inf


def clean(value: Any) -> Any:
    """Plain JSON: null for what is not finite, text for paths."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = {item.name: clean(getattr(value, item.name)) for item in fields(value)}
        return shown | ({"factor": clean(value.factor)} if isinstance(value, Backtest) else {})
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
