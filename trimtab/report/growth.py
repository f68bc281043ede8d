"""Signals that lead a larger model to failure: attention logits that grow, gradients that shrink to ε.

Points are runs, lines the fit through them, dashed where no model has been trained. What is left of the shaded part is
measured; in it, everything is a forecast. Squares are the back-test: the largest size as the smaller ones foretold it.
"""

import math
from typing import Any

from trimtab.analysis.findings import Fit, Forecast, Result, Signal
from trimtab.analysis.forecasts import NEAR
from trimtab.report.axes import Range, figure, note, params_axis, share, value_axis, wider
from trimtab.report.layout import Figure, Panel, View, run_words
from trimtab.report.numbers import between, count, number

FARTHEST = 1e4  # times the largest size: forecasts beyond are not drawn
NAMES: dict[Signal, str] = {"logit_max": "largest attention logit", "grad_rms": "gradient RMS"}
ENDS: dict[Signal, str] = {"logit_max": "forecast to fail", "grad_rms": "forecast to come near ε"}
_DRAWN = 40  # points of a fitted line


def growth(view: View, panel: Panel, signal: Signal) -> Figure | None:
    runs = [run for run in view.results(panel) if run.params and run.lr > 0 and _positive(getattr(run, signal))]
    if not runs:
        return None
    fits = [fit for fit in view.findings.fits if (fit.study, fit.arm) == panel and fit.signal == signal]
    ahead = [x for x in view.findings.forecasts if (x.study, x.arm) == panel and x.signal == signal]
    across, largest = _across(view, signal, ahead)
    limits = [view.findings.critical.value] if signal == "logit_max" else sorted({run.eps for run in runs})
    up = _up(view, signal, [limit for limit in limits if _positive(limit)])
    unsure = {x.lr for x in ahead if x.fails_at is not None and not x.seen}
    traces = [trace for fit in fits for trace in _line(view, fit, across, up, banded=fit.lr in unsure)]
    traces += [_points(view, runs, lr, signal) for lr in sorted({run.lr for run in runs})]
    traces += [_backtest(view, fit) for fit in fits if fit.backtest is not None]
    level = limits[0] if signal == "logit_max" else NEAR * limits[0]
    marks = [_forecast(view, x, level) for x in ahead if x.fails_at is not None and not x.seen and _drawn(x, across)]
    shapes, words = _shaded(largest, across)
    for limit in filter(_positive, limits):
        zone, name = _zone(view, signal, limit)
        more, said = _limit(limit, zone, up, name)
        shapes, words = shapes + more, words + said
    sizes = [float(run.params or 0) for run in runs]
    x, y = params_axis(across, sizes), value_axis(up)
    return figure(traces + marks, x=x, y=y, unit=NAMES[signal], right=44, shapes=shapes, annotations=words)


def limit_words(view: View, signal: Signal) -> str:
    """What the red line is."""
    critical = view.findings.critical
    if signal == "grad_rms":
        return f"Adam's ε; within {number(NEAR)} times of it updates shrink"
    spread = between(critical.low, critical.high, lambda x: number(x, 2))
    return f"runs fail above {number(critical.value, 2)}" + (f" ({spread})" if critical.low < critical.high else "")


def _zone(view: View, signal: Signal, limit: float) -> tuple[Range, str]:
    critical = view.findings.critical
    if signal == "logit_max":
        return (critical.low, critical.high), number(limit, 2)
    return (0.0, NEAR * limit), "ε"


def growth_words(view: View, panel: Panel, signal: Signal) -> str:
    said = [x.why for x in view.findings.forecasts if (x.study, x.arm) == panel and x.signal == signal and x.why]
    return f"{NAMES[signal]} against size, {view.title(panel)}. ".capitalize() + " ".join(said)


def _across(view: View, signal: Signal, ahead: list[Forecast]) -> tuple[Range, float]:
    """From the smallest model to where the last forecast is, ten times the largest at least; the same in all panels."""
    sizes = [run.params for run in view.findings.results if run.params]
    largest = float(max(sizes))
    every = [x for x in view.findings.forecasts if x.signal == signal and x.fails_at is not None]
    far = [min(x.high or x.fails_at or 0, 30 * (x.fails_at or 0)) for x in every]
    end = min(max([12 * largest, *(2 * x for x in far)]), FARTHEST * largest)
    return (min(sizes) / 1.7, end), largest


def _up(view: View, signal: Signal, limits: list[float]) -> Range:
    """All panels have one scale: every run, and the limit with some room above or below it."""
    values = [getattr(run, signal) for run in view.findings.results if run.params]
    if signal == "grad_rms":
        return wider([*values, *limits], 4, 3)
    known = wider([*values, *limits], 2, 4)
    return min(known[0], 1.0), known[1]


def _points(view: View, runs: list[Result], lr: float, signal: Signal) -> dict[str, Any]:
    mine = [run for run in runs if run.lr == lr]
    colour = view.lr_colour(lr)
    fails = [view.fails(run) for run in mine]
    hover = [f"{run_words(run)}<br>{NAMES[signal]} {number(getattr(run, signal))}{_ended(run)}" for run in mine]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [run.params for run in mine],
        "y": [getattr(run, signal) for run in mine],
        "marker": {
            "color": colour,
            "opacity": 1,
            "size": [9 if bad else 7 for bad in fails],
            "symbol": ["x-thin" if bad else "circle" for bad in fails],
            "line": {"width": 2, "color": colour},
        },
        "text": hover,
        "hovertemplate": "%{text}<extra></extra>",
        "legendgroup": f"lr {lr:g}",
    }


def _line(view: View, fit: Fit, across: Range, up: Range, *, banded: bool) -> list[dict[str, Any]]:
    """Solid between the sizes that were trained, dashed beyond; where it foretells a failure, how far refits spread."""
    largest, smallest = float(max(fit.params)), float(min(fit.params))
    colour, group = view.lr_colour(fit.lr), f"lr {fit.lr:g}"
    inside, beyond = _steps(smallest, largest), _steps(largest, across[1])
    band = [fit.predict(x) for x in beyond]
    fence = (up[0] / 100, up[1] * 100)  # far outside, so that no line ends within the chart
    low, high = ([_clip(p[i], fence) for p in band] for i in (1, 2))
    base = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "legendgroup": group}
    solid = [_clip(fit.predict(x)[0], fence) for x in inside]
    dashed = [_clip(p[0], fence) for p in band]
    area = {"x": [*beyond, *beyond[::-1]], "y": [*high, *low[::-1]], "fill": "toself", "opacity": 0.1}
    return [
        *([base | area | {"fillcolor": colour, "line": {"width": 0}}] if banded else []),
        base | {"x": inside, "y": solid, "line": {"color": colour, "width": 2}},
        base | {"x": beyond, "y": dashed, "line": {"color": colour, "width": 1.5, "dash": "dash"}},
    ]


def _backtest(view: View, fit: Fit) -> dict[str, Any]:
    test = fit.backtest
    assert test is not None
    said = (
        f"<b>back-test</b>, learning rate {number(fit.lr)}<br>foretold {number(test.predicted)} from the smaller sizes"
    )
    said += f"<br>measured {number(test.measured)}: {number(test.factor, 2)} times off"
    colour = view.lr_colour(fit.lr)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [test.params, test.params],
        "y": [test.measured, test.predicted],
        "line": {"color": colour, "width": 1, "dash": "dot"},
        "marker": {"symbol": "square-open", "size": [0, 10], "color": colour, "line": {"width": 1.5, "color": colour}},
        "text": ["", said],
        "hovertemplate": "%{text}<extra></extra>",
        "legendgroup": f"lr {fit.lr:g}",
    }


def _forecast(view: View, x: Forecast, limit: float) -> dict[str, Any]:
    """A diamond where the line meets the limit, as wide as the forecast is uncertain."""
    at, colour = x.fails_at or 0.0, view.lr_colour(x.lr)
    high = x.high if x.high is not None and math.isfinite(x.high) else at * FARTHEST
    low = x.low if x.low is not None and x.low > 0 else at
    spread = between(x.low, x.high, count)
    said = f"<b>learning rate {number(x.lr)}: {ENDS[x.signal]}</b><br>at {count(at, 2)} parameters"
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [at],
        "y": [limit],
        "error_x": {"type": "data", "array": [max(high - at, 0)], "arrayminus": [max(at - low, 0)]}
        | {"color": colour, "thickness": 1.5, "width": 5},
        "marker": {"symbol": "diamond", "size": 13, "color": colour, "line": {"width": 1.5, "color": "--card"}},
        "text": [said + (f"<br>({spread})" if spread else "")],
        "hovertemplate": "%{text}<extra></extra>",
        "legendgroup": f"lr {x.lr:g}",
    }


def _shaded(largest: float, across: Range) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    edge = largest * 1.25
    box = {"type": "rect", "yref": "paper", "x0": edge, "x1": across[1], "y0": 0, "y1": 1, "layer": "below"}
    words = note("forecast", share(edge, across), 1.0, font={"size": 11.5, "color": "--muted"})
    return [{**box, "fillcolor": "--shade", "line": {"width": 0}}], [words]


def _limit(y: float, zone: Range, up: Range, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A red line with its name at its right end, and the zone around it that is not safe."""
    low, high = max(zone[0], up[0]), min(zone[1], up[1])
    box = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": high, "layer": "below"}
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "layer": "between"}
    words = note(name, 1.0, share(y, up), xshift=4, yanchor="middle", font={"size": 12, "color": "--fail"})
    shapes = [{**box, "fillcolor": "--fail", "opacity": 0.09, "line": {"width": 0}}]
    return [*shapes, {**line, "line": {"color": "--fail", "width": 1.5}}], [words]


def _drawn(x: Forecast, across: Range) -> bool:
    return x.fails_at is not None and across[0] <= x.fails_at <= across[1]


def _ended(run: Result) -> str:
    return "<br>broke off" if math.isinf(run.loss) else f"<br>validation loss {number(run.loss)}"


def _steps(start: float, end: float) -> list[float]:
    return [start * (end / start) ** (i / (_DRAWN - 1)) for i in range(_DRAWN)]


def _clip(x: float, fence: Range) -> float:
    return min(max(x, fence[0]), fence[1])


def _positive(x: Any) -> bool:
    return isinstance(x, float | int) and math.isfinite(x) and x > 0
