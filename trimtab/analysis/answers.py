"""The answer to a question of the papers: its claims with their numbers, figures and tables, in one small file.

    reproduced   every claim holds
    partly       the first claim holds, or at least half of them
    not          otherwise
    no answer    for at least one claim the runs do not suffice

The rules of the claims are in lab/questions; an answer has their results. It is what the pages of docs/results are made
from, so they can be made again without the runs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from trimtab.analysis.findings import Curve
from trimtab.runs import RunError, replace_json, require_json

Paper = Literal["P1", "P2", "P3", "P4", "all"]  # all: the four together
Verdict = Literal["reproduced", "partly", "not", "no answer"]
MOST_POINTS = 120  # of a line in a figure


@dataclass(frozen=True)
class Check:
    claim: str
    passed: bool | None  # None: the runs do not suffice
    evidence: str


@dataclass(frozen=True)
class Line:
    """Points of one arm; a y of None is not drawn. `low` and `high` are the range over seeds."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels side by side with the same axes. `name` is unique within the answer."""

    name: str
    title: str
    x: str  # what the axes show, with units
    y: str
    panels: Sequence[Panel]
    log_x: bool = False
    log_y: bool = False


Cell = str | int | float | None  # an int is a count and keeps all its digits


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    name: str
    paper: Paper
    question: str
    about: str  # what the paper found, and how this study differs
    second: bool = False  # the second design; the first one is in docs/log.md
    checks: tuple[Check, ...]
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    design: str = ""  # what was run, in a sentence
    command: str = ""
    minutes: float = 0.0  # of computing, on the cores that were there
    machine: str = ""
    date: str = ""

    @property
    def verdict(self) -> Verdict:
        return judge_all(self.checks)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        figures = tuple(thin(figure) for figure in self.figures)
        replace_json(path, clean(asdict(replace(self, figures=figures))))
        return path


@dataclass(frozen=True)
class OutOfReach:
    """A claim that runs of this size cannot show."""

    paper: Paper
    claim: str
    reason: str
    needs: str  # what would show it


def judge_all(checks: Sequence[Check]) -> Verdict:
    if not checks or any(check.passed is None for check in checks):
        return "no answer"
    held = sum(bool(check.passed) for check in checks)
    if held == len(checks):
        return "reproduced"
    return "partly" if checks[0].passed or 2 * held >= len(checks) else "not"


def read_answers(folder: Path) -> list[Answer]:
    """All answers of a folder, by paper and name."""
    found = [read_answer(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda answer: (answer.paper, answer.name))


def read_answer(path: Path) -> Answer:
    try:
        return msgspec.convert(require_json(path), Answer)
    except msgspec.ValidationError as error:
        raise RunError(f"{path} is no answer: {error}; remove it, and answer the question again") from None


# --- What every study has: curves over the learning rate


def curves_figure(curves: Sequence[Curve]) -> Figure:
    """A panel per size, a line per arm."""
    sizes = dict.fromkeys(curve.size for curve in curves)
    panels = [Panel(size, [_line(curve) for curve in curves if curve.size == size]) for size in sizes]
    return Figure(
        name="curves",
        title="Validation loss against the learning rate",
        x="learning rate",
        y="validation loss",
        panels=panels,
        log_x=True,
    )


def _line(curve: Curve) -> Line:
    return Line(curve.arm, curve.lrs, curve.loss, curve.low, curve.high)


def curves_table(curves: Sequence[Curve]) -> Table:
    """The numbers that the sensitivity must not be read without."""
    columns = ("size", "arm", "best loss", "range over seeds", "at lr", "sensitivity", "fails from lr", "stopped early")
    rows = [
        (
            *(c.size, c.arm, c.best_loss, _range(c), c.best_lr, c.sensitivity, c.failing_lr),
            f"{sum(c.broken)} of {sum(c.seeds)}",
        )
        for c in curves
    ]
    return Table("Best loss and sensitivity", columns, rows)


def _range(curve: Curve) -> str:
    """Of the seeds, at the best learning rate."""
    at = curve.lrs.index(curve.best_lr)
    return f"{curve.low[at]:.3g} to {curve.high[at]:.3g}"


def thin(figure: Figure) -> Figure:
    """At most MOST_POINTS equally spaced points per line, the last one included."""
    panels = [Panel(panel.title, [_thin(line) for line in panel.lines]) for panel in figure.panels]
    return replace(figure, panels=panels)


def _thin(line: Line) -> Line:
    stride = -(-len(line.x) // MOST_POINTS) or 1
    places = range((len(line.x) - 1) % stride, len(line.x), stride)

    def some(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in places] if len(values) else []

    return Line(line.name, some(line.x), some(line.y), some(line.low), some(line.high))


def clean(x: Any) -> Any:
    """For JSON: numbers with six digits, those that are not finite as null."""
    if isinstance(x, Mapping):
        return {key: clean(value) for key, value in x.items()}
    if isinstance(x, bool):
        return x
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    if isinstance(x, str) or not isinstance(x, Iterable):
        return x
    return [clean(value) for value in x]
