"""What a folder of runs says: every cell, the curves over the learning rate, the fits over the size, the verdict.

    folders --results--> Result --measure--> Curve, Slope, Comparison --fits, forecasts--> Fit, Critical, Forecast
                                                                      --verdict--> sentences

`read` makes all of it from files alone, so that a study of last year, or one that still runs, gives the same page as
one that has just ended. What is missing is a note, never an exception. Losses are cross entropy in nats; a loss that is
unknown is NaN, that of a run that broke is infinite, and both are null in JSON.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["done", "stopped", "running", "failed", "missing", "unreadable"]
Signal = Literal["logit_max", "grad_rms"]
Points = tuple[tuple[int, float], ...]  # (step, value)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One cell, read from its folder."""

    folder: Path
    name: str
    study: str
    size: str  # "2x32": depth x width
    arm: str
    lr: float
    seed: int
    status: Status  # stopped: early, as hopeless; running: begun and not ended
    why: str = ""  # it ended, or cannot be used
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
    sha256: str = ""  # of the corpus
    versions: Mapping[str, str] = field(default_factory=dict)
    evaluations: Points = ()
    losses: Points = ()  # of training, thinned
    logit_max: float = math.nan  # largest attention logit of all layers early in the run, results.SNAPSHOT
    logit_step: int | None = None  # the last step that went into it
    logits: Points = ()  # largest of all layers, over the run
    logz: Points = ()  # log of the softmax's denominator, over the run
    grad_rms: float = math.nan  # of the first MLP matrix, mean of the last looks; what Adam's eps is compared with
    update_rms: float = math.nan  # of the same matrix
    out_rms: float = math.nan  # of the last block
    eps: float = math.nan  # of the optimizer; NaN if it has none
    bounded: bool = False  # queries and keys are normalised: logits cannot grow, and say nothing about failing
    spikes: Points = ()  # of the training loss: where each begins, and its peak (infinite if not finite)
    loss_ratio: float = math.nan  # highest of training loss over the best before it
    alarms: int = 0
    broken: int = 0  # lines that could not be read

    @property
    def finished(self) -> bool:
        return self.status in ("done", "stopped")

    @property
    def score(self) -> float:
        """The loss as sensitivity counts it: never worse than before training, and a broken run is exactly that."""
        if not self.finished or math.isnan(self.loss):
            return math.nan
        return min(self.loss, self.first) if math.isfinite(self.loss) else self.first


@dataclass(frozen=True, kw_only=True)
class Source:
    """One study, or one folder of loose runs: what was planned and how much of it is there."""

    name: str
    folder: Path
    question: str = ""
    subject: str = ""
    cells: int = 0
    finished: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)  # study.json as it is; empty for loose runs


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One study, arm and size over the learning rate. Lists go with `lrs`; those without a run are not there."""

    study: str
    arm: str
    size: str
    params: int | None
    depth: int | None = None
    width: int | None = None
    lrs: tuple[float, ...]
    loss: tuple[float, ...]  # mean over seeds of the score
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: tuple[int, ...]  # how many
    broken: tuple[int, ...]  # runs of them that stopped early or have no finite loss
    spikes: tuple[float, ...]  # per run
    loss_ratio: tuple[float, ...]  # loss over the best loss of the curve
    logit_max: tuple[float, ...]  # geometric mean over seeds; NaN where nobody looked
    grad_rms: tuple[float, ...]
    missing: tuple[float, ...] = ()  # learning rates that were planned and have no finished run
    first: float
    best_lr: float
    best_loss: float
    sensitivity: float  # NaN if there are fewer than two learning rates
    sensitivity_low: float | None = None  # over seeds; None with fewer than two
    sensitivity_high: float | None = None
    window: tuple[float, float]  # learning rates that the sensitivity is taken over
    failing_lr: float | None = None  # the smallest that fails, measure.FAILS


@dataclass(frozen=True, kw_only=True)
class Slope:
    """How fast sensitivity grows when a model grows in one way."""

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
    spread: float  # decades: root mean square of what the fit leaves of single runs
    refits: tuple[tuple[float, ...], ...] = ()  # coefficients with a seed or a size left out
    backtest: Backtest | None = None
    bounded: bool = False  # as in Result: these logits do not grow as a power of the size

    def predict(self, params: float) -> tuple[float, float, float]:
        """The value at a size, and the lowest and highest of the refits, each wider by `spread`."""
        x = math.log10(params)
        centre = evaluate(self.coefficients, x)
        around = [evaluate(refit, x) for refit in self.refits] + [centre]
        return power10(centre), power10(min(around) - self.spread), power10(max(around) + self.spread)


@dataclass(frozen=True, kw_only=True)
class Critical:
    """The attention logit above which runs fail."""

    value: float
    low: float
    high: float
    measured: bool  # False: taken from the paper
    why: str


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One arm and learning rate: from which size on it fails. None: not within what can be said."""

    study: str
    arm: str
    lr: float
    signal: Signal
    fails_at: float | None
    low: float | None = None  # earliest; None with a fails_at: cannot be bounded
    high: float | None = None  # latest; None with a fails_at: perhaps never
    seen: bool = False  # a run of this arm and learning rate has failed already, at `fails_at`
    decades: float = 0.0  # from the largest size that was run to `fails_at`
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything the report shows and the verdict is made of."""

    studies: tuple[Source, ...]
    results: tuple[Result, ...]
    curves: tuple[Curve, ...] = ()
    slopes: tuple[Slope, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    fits: tuple[Fit, ...] = ()
    critical: Critical
    forecasts: tuple[Forecast, ...] = ()
    notes: tuple[str, ...] = ()  # what is missing, mixed or too little
    verdict: tuple[str, ...] = ()  # plain words, the headline first

    @property
    def backtest_factors(self) -> list[float]:
        """Of the attention logits where they are free to grow, the best first."""
        fits = [fit for fit in self.fits if fit.signal == "logit_max" and not fit.bounded]
        return sorted(fit.backtest.factor for fit in fits if fit.backtest is not None)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = clean(self)
        return data


def read(folders: Sequence[str | Path]) -> Findings:
    """Read studies, folders of runs and single runs. Raises RunError only if there is nothing at all."""
    # These build what is defined above, so they cannot be imported before it is.
    from trimtab.analysis import fits as fitted
    from trimtab.analysis import folders as places
    from trimtab.analysis import forecasts, measure, verdict

    sources, found, notes = places.read_folders([Path(folder) for folder in folders])
    curves = measure.curves_of(found)
    fits = fitted.fits_of(found)
    critical = forecasts.critical_of(found, curves)
    findings = Findings(
        studies=tuple(sources),
        results=tuple(found),
        curves=tuple(curves),
        slopes=tuple(measure.slopes_of(curves)),
        comparisons=tuple(measure.comparisons_of(found, curves)),
        fits=tuple(fits),
        critical=critical,
        forecasts=tuple(forecasts.forecasts_of(fits, curves, found, critical)),
        notes=tuple(notes + measure.notes_of(curves) + forecasts.notes_of(found)),
    )
    return verdict.judge(findings)


def rows_of_cells(findings: Findings) -> list[dict[str, Any]]:
    """A table of all cells: what is one number each."""
    left_out = {"evaluations", "losses", "logits", "logz", "spikes", "versions", "folder"}
    rows = []
    for result in findings.results:
        row = {item.name: getattr(result, item.name) for item in fields(Result) if item.name not in left_out}
        versions = " ".join(f"{name} {version}" for name, version in result.versions.items())
        rows.append(row | {"spikes": len(result.spikes), "versions": versions, "folder": str(result.folder)})
    return [{key: clean(value) for key, value in row.items()} for row in rows]


def rows_of_curves(findings: Findings) -> list[dict[str, Any]]:
    """A table of all curves: a row per learning rate."""
    lists = [item.name for item in fields(Curve) if item.name in _ALONG]
    alone = [item.name for item in fields(Curve) if item.name not in {*_ALONG, "lrs", "missing", "window"}]
    rows = []
    for curve in findings.curves:
        shared = {name: getattr(curve, name) for name in alone}
        for i, lr in enumerate(curve.lrs):
            rows.append(shared | {"lr": lr} | {name: getattr(curve, name)[i] for name in lists})
    return [{key: clean(value) for key, value in row.items()} for row in rows]


_ALONG = {"loss", "low", "high", "seeds", "broken", "spikes", "loss_ratio", "logit_max", "grad_rms"}


def evaluate(coefficients: Sequence[float], x: float) -> float:
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def power10(x: float) -> float:
    """10^x, infinite where a float ends: extrapolations go anywhere."""
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
    return str(value) if isinstance(value, Path) else value
