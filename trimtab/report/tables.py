"""The page's tables: arms at the largest size, what is expected of larger models, the back-test, every run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.analysis.findings import Curve, Fit, Forecast, Result, Signal
from trimtab.analysis.words import join, plural, say_factor
from trimtab.report.layout import View
from trimtab.report.numbers import between, count, duration, html, link, loss, number, relative

SHORT = 9  # rows; other longer tables are folded
LONG = 30  # rows; a longer table of runs is folded
FILES = ("config.json", "log.jsonl", "events.jsonl", "signals.jsonl", "result.json")


@dataclass(frozen=True)
class Value:
    """A number in a table: as it is written, as it is sorted, and what is said about it in small."""

    text: str
    key: float | None = None
    small: str = ""

    def cell(self) -> str:
        small = f" <small>{html(self.small)}</small>" if self.small else ""
        key = "" if self.key is None or math.isnan(self.key) else repr(float(self.key)).replace("inf", "Infinity")
        return f'<td class="n" data-value="{key}">{html(self.text)}{small}</td>'


def glance(view: View) -> str:
    """One row per arm, at the largest size it was trained at."""
    rows = []
    for panel in view.panels:
        curves = [curve for curve in view.findings.curves if (curve.study, curve.arm) == panel]
        if curves:
            rows.append(_glance_row(view, max(curves, key=lambda curve: curve.params or 0)))
    head = ("Arm", "Size", "Best loss", "Best learning rate", "First that fails", "Sensitivity")
    return table("Each arm at its largest size", head, rows) if rows else ""


def comparisons(view: View) -> str:
    rows = []
    for one in view.findings.comparisons:
        small = between(one.low, one.high, lambda x: number(x, 2))
        times = Value(f"{number(one.ratio, 2)}×", one.ratio, small)
        rows.append([_text(one.arm), _text(one.other), _size(one.size, one.params), times.cell()])
    head = ("Most sensitive arm", "Compared with", "Size", "Times as sensitive")
    return folded("How much steadier", head, rows)


def slopes(view: View) -> str:
    rows = [
        [
            _text(view.title((x.study, x.arm))),
            _text(x.along),
            _text(", ".join(x.sizes)),
            Value(loss(x.value)).cell(),
        ]
        for x in view.findings.slopes
        if math.isfinite(x.value)
    ]
    head = ("Arm", "Growing in", "Sizes", "Sensitivity per tenfold size")
    return folded("How sensitivity grows", head, rows)


def forecasts(view: View, signal: Signal) -> str:
    """What fails at which size; those that do not, in one line each arm."""
    ahead = [x for x in view.findings.forecasts if x.signal == signal]
    rows = [_forecast_row(view, x) for x in ahead if x.fails_at is not None]
    head = ("Learning rate", "Arm", "Fails at" if signal == "logit_max" else "Near ε at", "Why")
    listed = folded("Expected of larger models", head, rows)
    calm: dict[str, list[str]] = {}
    for x in ahead:
        if x.fails_at is None:
            calm.setdefault(view.title((x.study, x.arm)), []).append(number(x.lr))
    said = "".join(f"<li>{html(arm)}: learning rate {html(join(lrs))}</li>" for arm, lrs in calm.items())
    return listed + (f'<div class="calm"><h3>No failure in sight</h3><ul>{said}</ul></div>' if said else "")


def backtests(view: View, signal: Signal) -> str:
    rows = []
    for fit in view.findings.fits:
        if fit.signal == signal and fit.backtest is not None:
            test = fit.backtest
            values = (number(test.predicted), test.predicted), (number(test.measured), test.measured)
            factor = Value(f"{number(test.factor, 2)}×", test.factor)
            cells = [Value(*value).cell() for value in values]
            size = Value(count(test.params), test.params).cell()
            rows.append([_lr(fit.lr), _text(view.title((fit.study, fit.arm))), size, *cells, factor.cell()])
    head = ("Learning rate", "Arm", "Size", "Foretold", "Measured", "Off by")
    worst = max((row for row in view.findings.fits if row.signal == signal and row.backtest), key=_off, default=None)
    if worst is None:
        return ""
    title = f"Back-test: the largest size foretold from the smaller ones, {say_factor(_off(worst))} off at worst"
    return f"<details><summary>{html(title)}</summary>{table('', head, rows, name='Back-test')}</details>"


def cells(view: View, folder: Path) -> str:
    """Every run, sortable, folded when long."""
    runs = view.findings.results
    if not runs:
        return ""
    rows = [_run_row(view, run, folder) for run in runs]
    head = ("Run", "Size", "Learning rate", "Arm", "Seed", "Status", "Loss", "Above best", "Steps", "Time", "Files")
    inside = table("", head, rows, name="All runs", sortable=True)
    states = {state: sum(run.status == state for run in runs) for state in dict.fromkeys(run.status for run in runs)}
    summary = f"{plural(len(runs), 'run')}: " + ", ".join(f"{many} {state}" for state, many in states.items())
    opened = "" if len(runs) > LONG else " open"
    return f"<details{opened}><summary>{html(summary)}</summary>{inside}</details>"


def folded(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that is folded when it is longer than a glance takes; nothing without rows."""
    if len(rows) <= SHORT:
        return table(caption, head, rows) if rows else ""
    summary = html(f"{caption}: {plural(len(rows), 'row')}")
    return f"<details><summary>{summary}</summary>{table('', head, rows, name=caption)}</details>"


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    name: str = "",
    sortable: bool = False,
) -> str:
    """A table that scrolls by itself where it is wider than the page."""
    rows = list(rows)
    right = {i for i, cell in enumerate(rows[0]) if cell.startswith('<td class="n"')}
    heads = []
    for i, title in enumerate(head):
        words = f'<button type="button">{html(title)}</button>' if sortable else html(title)
        heads.append(f'<th scope="col"{" class=n" if i in right else ""}>{words}</th>')
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    above = f"<caption>{html(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html(caption or name)}"><table>{above}'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _glance_row(view: View, curve: Curve) -> list[str]:
    fails = Value(number(curve.failing_lr), curve.failing_lr) if curve.failing_lr else Value("none", math.inf)
    spread = between(curve.sensitivity_low, curve.sensitivity_high, loss)
    return [
        f'<th scope="row" class="text">{html(view.title((curve.study, curve.arm)))}</th>',
        _size(curve.size, curve.params),
        Value(loss(curve.best_loss), curve.best_loss).cell(),
        Value(number(curve.best_lr), curve.best_lr).cell(),
        fails.cell(),
        Value(loss(curve.sensitivity), curve.sensitivity, spread).cell(),
    ]


def _forecast_row(view: View, x: Forecast) -> list[str]:
    if x.seen:
        at = Value(count(x.fails_at), x.fails_at, "seen")
    else:
        at = Value(count(x.fails_at, 2), x.fails_at, between(x.low, x.high, lambda y: count(y, 2)))
    return [_lr(x.lr), _text(view.title((x.study, x.arm))), at.cell(), _text(x.why[:1].upper() + x.why[1:])]


def _run_row(view: View, run: Result, folder: Path) -> list[str]:
    curve = view.curve(run)
    above = run.score - curve.best_loss if curve is not None else math.nan
    ended = Value(loss(run.loss) if not math.isinf(run.loss) else "broke off", run.loss)
    why = f" <small>{html(run.why)}</small>" if run.why and run.why != run.status else ""
    return [
        f'<th scope="row" class="text">{html(run.name).replace("/", "/<wbr>")}</th>',
        _size(run.size, run.params),
        _lr(run.lr),
        _text(view.title((run.study, run.arm))),
        Value(str(run.seed), run.seed).cell(),
        f'<td class="text"><span class="status {run.status}">{html(run.status)}</span>{why}</td>',
        ended.cell(),
        Value(loss(above), above).cell(),
        Value(f"{run.steps:,}", run.steps).cell(),
        Value(duration(run.seconds) if run.seconds else "–", run.seconds or None).cell(),
        f'<td class="files">{_links(run, folder)}</td>',
    ]


def _links(run: Result, folder: Path) -> str:
    there = [run.folder / name for name in FILES if (run.folder / name).is_file()]
    ways = [(path, relative(path, folder)) for path in there]
    return "".join(f'<a href="{link(way)}">{path.stem}</a>' for path, way in ways if way is not None) or "–"


def _off(fit: Fit) -> float:
    return fit.backtest.factor if fit.backtest is not None else 0.0


def _size(size: str, params: int | None) -> str:
    return Value(size, params, count(params) if params else "").cell()


def _lr(lr: float) -> str:
    return Value(number(lr), lr).cell()


def _text(text: str) -> str:
    return f'<td class="text">{html(text)}</td>'
