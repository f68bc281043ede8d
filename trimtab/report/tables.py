"""The page's tables: arms and sizes, the check of the forecast, forecasts, the back-test, every run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.analysis.findings import Fit, Forecast, HeldOut, Result, Signal, Slope
from trimtab.analysis.measure import group_by
from trimtab.report.layout import View
from trimtab.report.numbers import UNKNOWN, between, capital, count, duration, join_rates, link, loss, number, plural
from trimtab.report.sentences import forecast_words, percent, range_words, status_words
from trimtab.runs.folder import FILES

SHORT = 9  # rows; longer tables are folded
LONG = 30  # rows; a longer table of runs is folded


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, the value it is sorted by, and a remark in small letters."""

    text: str
    value: float | None = None
    small: str = ""
    kind: str = "n"  # "n": a number; "text"; "row": the row's name; "status"; "files"
    links: tuple[tuple[str, str], ...] = ()  # address, text

    @property
    def key(self) -> str:
        """The sort key as JavaScript reads it."""
        unknown = self.value is None or math.isnan(self.value)
        return "" if unknown else repr(float(self.value or 0)).replace("inf", "Infinity")


@dataclass(frozen=True)
class Table:
    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: str = ""  # the summary of a table that can be folded
    open: bool = False
    sortable: bool = False


def arms(view: View) -> list[Table]:
    """One row per arm and size."""
    rows = []
    for panel in view.panels:
        for curve in view.curves(panel):
            spread = between(curve.edge_low, curve.edge_high, lambda x: number(x, 2))
            edge = Cell(f"above {number(curve.lrs[-1])}", math.inf)
            if curve.edge is not None:
                edge = _value(curve.edge, lambda x: number(x, 2), spread)
            row = [Cell(view.title(panel), kind="row"), _size(curve.size, curve.params)]
            row += [_value(curve.best_loss, loss), _value(curve.best_lr), edge]
            row += [_value(curve.sensitivity, loss, between(curve.sensitivity_low, curve.sensitivity_high, loss))]
            rows.append([*row, _value(curve.too_slow, loss), _value(curve.unstable, loss)])
    head = (
        "Arm",
        "Size",
        "Best loss",
        "Best learning rate",
        "Edge of stability",
        "Sensitivity",
        "Too slow",
        "Unstable",
    )
    return _folded("Each arm and size", head, rows)


def held_out(view: View) -> list[Table]:
    """The largest size of each arm, forecast from the smaller ones."""
    rows = []
    for x in view.findings.held_out:
        right = {True: "right", False: "wrong", None: "cannot tell"}[x.right]
        chance = Cell(percent(x.probability), x.probability)
        measured = _text("failed" if x.failed else "did not fail")
        rows.append([_arm(view, x), _value(x.params, count), _value(x.lr), chance, measured, _text(right)])
    head = ("Arm", "Size", "Learning rate", "Forecast: fails", "Measured", "Verdict")
    title = "Check: the largest size, forecast from the smaller ones"
    return [Table("Check", head, rows, folded=title)] if rows else []


def comparisons(view: View) -> list[Table]:
    rows = []
    for one in view.findings.comparisons:
        times = Cell(f"{number(one.ratio, 2)}×", one.ratio, between(one.low, one.high, lambda x: number(x, 2)))
        above = Cell(f"{number(one.unstable, 2)}×", one.unstable)
        rows.append([_text(one.arm), _text(one.other), _size(one.size, one.params), times, above])
    head = ("Arm", "Compared with", "Size", "Times as sensitive", "Above the best learning rate")
    return _folded("Sensitivity compared", head, rows)


def slopes(view: View) -> list[Table]:
    rows = [
        [_arm(view, x), _text(x.along), _text(", ".join(x.sizes)), Cell(loss(x.value))]
        for x in view.findings.slopes
        if math.isfinite(x.value)
    ]
    return _folded("Growth of sensitivity", ("Arm", "Along", "Sizes", "Sensitivity per tenfold size"), rows)


def forecasts(view: View, signal: Signal) -> list[Table]:
    rows = []
    for x in view.findings.forecasts:
        if x.signal == signal and x.fails_at is not None:
            small = "observed" if x.seen else range_words(x)
            at = Cell(count(x.fails_at, 3 if x.seen else 2), x.fails_at, small)
            why = capital(forecast_words(x))
            rows.append([_value(x.lr), _arm(view, x), at, _text(why)])
    above = "Reaches the critical value at" if signal == "logit_max" else "Near ε above"
    return _folded("Forecast for larger models", ("Learning rate", "Arm", above, "Reason"), rows)


def stable(view: View, signal: Signal) -> list[str]:
    """The learning rates without a forecast failure, by arm."""
    found = [x for x in view.findings.forecasts if x.signal == signal and x.fails_at is None]
    by_arm = group_by(found, lambda x: view.title((x.study, x.arm)))
    return [f"{arm}: learning rate {join_rates([x.lr for x in those])}" for arm, those in by_arm.items()]


def backtests(view: View, signal: Signal) -> list[Table]:
    rows, worst = [], 0.0
    for fit in view.findings.fits:
        if fit.signal == signal and (test := fit.backtest) is not None:
            off = Cell(f"{number(test.factor, 2)}×", test.factor)
            values = [_value(test.params, count), _value(test.predicted), _value(test.measured), off]
            rows.append([_value(fit.lr), _arm(view, fit), *values])
            worst = max(worst, test.factor)
    head = ("Learning rate", "Arm", "Size", "Predicted", "Measured", "Off by")
    most = f"off by a factor of {number(worst, 2)} at most"
    title = f"Back-test: the largest size predicted from the smaller ones, {most}"
    return [Table("Back-test", head, rows, folded=title)] if rows else []


def cells(view: View, folder: Path) -> list[Table]:
    """Every run, sortable, folded when long."""
    runs = view.findings.results
    head = ("Run", "Size", "Learning rate", "Arm", "Seed", "Status", "Loss", "Above best", "Steps", "Time", "Files")
    states = {state: sum(run.status == state for run in runs) for state in dict.fromkeys(run.status for run in runs)}
    summary = f"{plural(len(runs), 'run')}: " + ", ".join(f"{many} {state.value}" for state, many in states.items())
    rows = [_run_row(view, run, folder) for run in runs]
    return [Table("All runs", head, rows, folded=summary, open=len(runs) <= LONG, sortable=True)] if runs else []


def _folded(name: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[Table]:
    summary = f"{name}: {plural(len(rows), 'row')}" if len(rows) > SHORT else ""
    return [Table(name, head, rows, folded=summary)] if rows else []


def _run_row(view: View, run: Result, folder: Path) -> list[Cell]:
    curve = view.curve(run)
    above = run.score - curve.best_loss if curve is not None else math.nan
    why = status_words(run)
    there = [path for name in FILES if (path := run.folder / name).is_file()]
    links = [(address, path.stem) for path in there if (address := link(path, folder)) is not None]
    return [
        Cell(run.name, kind="row"),
        _size(run.size, run.params),
        _value(run.lr),
        _arm(view, run),
        Cell(str(run.seed), run.seed),
        Cell(run.status.value, small=why if why != run.status.value else "", kind="status"),
        Cell(loss(run.loss) if not math.isinf(run.loss) else "stopped early", run.loss),
        _value(above, loss),
        Cell(f"{run.steps:,}", run.steps),
        Cell(duration(run.seconds) if run.seconds else UNKNOWN, run.seconds or None),
        Cell("" if links else UNKNOWN, kind="files", links=tuple(links)),
    ]


def _size(size: str, params: int | None) -> Cell:
    return Cell(size, params, count(params) if params else "")


def _value(x: float, text: Callable[[float], str] = number, small: str = "") -> Cell:
    return Cell(text(x), x, small)


def _arm(view: View, x: Result | Slope | Fit | Forecast | HeldOut) -> Cell:
    return _text(view.title((x.study, x.arm)))


def _text(text: str) -> Cell:
    return Cell(text, kind="text")
