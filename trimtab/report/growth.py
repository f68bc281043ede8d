"""Signals against size: attention logits that grow, gradients that shrink to ε.

Points are runs, lines are fits, dashed beyond the largest size. The shaded part is a forecast. Squares are the
back-test: the largest size, predicted from the smaller ones.
"""

import math
from typing import Any

import numpy as np

from trimtab.analysis.findings import Fit, Forecast, Result, Signal
from trimtab.analysis.thresholds import NEAR_EPS
from trimtab.report import axes
from trimtab.report.axes import Range, Trace
from trimtab.report.layout import Figure, Panel, View, run_words
from trimtab.report.numbers import between, capital, count, number, params
from trimtab.report.sentences import forecast_words

FARTHEST = 1e4  # times the largest size: forecasts beyond are not drawn
NAMES: dict[Signal, str] = {"logit_max": "largest attention logit", "grad_rms": "gradient RMS"}
ENDS: dict[Signal, str] = {"logit_max": "the fit reaches the critical value", "grad_rms": "the fit comes near ε"}
_DRAWN = 40  # points of a fitted line


def growth(view: View, panel: Panel, signal: Signal) -> Figure | None:
    runs = [r for r in view.results(panel) if r.params and r.lr > 0 and 0 < getattr(r, signal) < math.inf]
    if not runs:
        return None
    fits = [fit for fit in view.findings.fits if (fit.study, fit.arm) == panel and fit.signal == signal]
    forecasts = [x for x in view.findings.forecasts if (x.study, x.arm) == panel and x.signal == signal]
    ahead = [x for x in forecasts if x.fails_at is not None and not x.seen]
    across, largest = _across(view, signal)
    critical = view.findings.critical
    limits = [critical.value] if signal == "logit_max" else sorted({run.eps for run in runs if 0 < run.eps < math.inf})
    up = _up(view, signal, limits)
    uncertain = {x.lr for x in ahead}
    traces = [trace for fit in fits for trace in _line(view, fit, across, up, banded=fit.lr in uncertain)]
    traces += [_points(view, runs, lr, signal) for lr in sorted({run.lr for run in runs})]
    traces += [_backtest(view, fit) for fit in fits if fit.backtest is not None]
    traces += [_forecast(view, x) for x in ahead if across[0] <= (x.fails_at or 0) <= across[1]]
    edge = largest * 1.25
    box = {"type": "rect", "yref": "paper", "x0": edge, "x1": across[1], "y0": 0, "y1": 1, "layer": "below"}
    shapes: list[dict[str, Any]] = [{**box, "fillcolor": "--shade", "line": {"width": 0}}]
    words = [axes.note("forecast", axes.share(edge, across), 1.0, font={"size": 11.5, "color": "--muted"})]
    for limit in limits:
        low, high = (critical.low, critical.high) if signal == "logit_max" else (0.0, NEAR_EPS * limit)
        zone = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": max(low, up[0]), "y1": min(high, up[1])}
        shapes.append({**zone, "layer": "below", "fillcolor": "--fail", "opacity": 0.09, "line": {"width": 0}})
        shapes.append(axes.horizontal(limit, "--fail", width=1.5))
        name = number(limit, 2) if signal == "logit_max" else "ε"
        font = {"size": 12, "color": "--fail"}
        words.append(axes.note(name, 1.0, axes.share(limit, up), xshift=4, yanchor="middle", font=font))
    x, y = axes.params_axis(across, [float(run.params or 0) for run in runs]), axes.value_axis(up)
    return axes.figure(traces, x=x, y=y, unit=NAMES[signal], right=44, shapes=shapes, annotations=words)


def limit_words(view: View, signal: Signal) -> str:
    """The meaning of the red line."""
    critical = view.findings.critical
    if signal == "grad_rms":
        return f"Adam's ε; within {number(NEAR_EPS)} times of it updates shrink"
    if not critical.measured:
        return f"{number(critical.value, 2)}, the paper's critical value; it was not measured here"
    spread = between(critical.low, critical.high, lambda x: number(x, 2))
    return f"runs fail above {number(critical.value, 2)}" + (f" ({spread})" if critical.low < critical.high else "")


def growth_words(view: View, panel: Panel, signal: Signal) -> str:
    """The chart as text, for screen readers."""
    forecasts = [x for x in view.findings.forecasts if (x.study, x.arm) == panel and x.signal == signal]
    text = " ".join(f"Learning rate {number(x.lr)}: {forecast_words(x)}." for x in forecasts)
    return f"{capital(NAMES[signal])} against size, {view.title(panel)}. {text}"


def _across(view: View, signal: Signal) -> tuple[Range, float]:
    """From the smallest size to the last forecast, at least ten times the largest; the same in all panels."""
    sizes = [run.params for run in view.findings.results if run.params]
    largest = float(max(sizes))
    every = [x for x in view.findings.forecasts if x.signal == signal and x.fails_at is not None]
    far = [min(x.high or x.fails_at or 0, 30 * (x.fails_at or 0)) for x in every]
    end = min(max([12 * largest, *(2 * x for x in far)]), FARTHEST * largest)
    return (min(sizes) / 1.7, end), largest


def _up(view: View, signal: Signal, limits: list[float]) -> Range:
    """The range of the vertical axis, the same in all panels: every run and the limits, with a margin."""
    values = [*(getattr(run, signal) for run in view.findings.results if run.params), *limits]
    if signal == "grad_rms":
        return axes.wider(values, 4, 3)
    low, high = axes.wider(values, 2, 4)
    return min(low, 1.0), high


def _points(view: View, runs: list[Result], lr: float, signal: Signal) -> Trace:
    mine = [run for run in runs if run.lr == lr]
    fails = [view.fails(run) for run in mine]
    texts = []
    for run in mine:
        ended = "stopped early" if math.isinf(run.loss) else f"validation loss {number(run.loss)}"
        texts.append(f"{run_words(run)}<br>{NAMES[signal]} {number(getattr(run, signal))}<br>{ended}")
    marker = axes.run_marker(view.lr_colour(lr), fails, [9 if bad else 7 for bad in fails])
    xs, ys = [run.params for run in mine], [getattr(run, signal) for run in mine]
    return axes.scatter("markers", xs, ys, f"lr {lr:g}", marker=marker, **axes.hover(texts))


def _line(view: View, fit: Fit, across: Range, up: Range, *, banded: bool) -> list[Trace]:
    """Solid between the sizes that were trained, dashed beyond; with a forecast, also the range of the refits."""
    colour, group = view.lr_colour(fit.lr), f"lr {fit.lr:g}"
    sizes = np.geomspace([fit.params[0], fit.params[-1]], [fit.params[-1], across[1]], _DRAWN).T.tolist()
    # Clipped far outside of the chart, so that no line ends within it.
    inside, beyond = (np.clip([fit.predict(x) for x in xs], up[0] / 100, up[1] * 100).T.tolist() for xs in sizes)
    solid, dashed = {"color": colour, "width": 2}, {"color": colour, "width": 1.5, "dash": "dash"}
    area = {"fill": "toself", "opacity": 0.1, "fillcolor": colour, "line": {"width": 0}, "hoverinfo": "skip"}
    band = axes.scatter("lines", [*sizes[1], *sizes[1][::-1]], [*beyond[2], *beyond[1][::-1]], group, **area)
    return [
        *([band] if banded else []),
        axes.scatter("lines", sizes[0], inside[0], group, line=solid, hoverinfo="skip"),
        axes.scatter("lines", sizes[1], beyond[0], group, line=dashed, hoverinfo="skip"),
    ]


def _backtest(view: View, fit: Fit) -> Trace:
    test, colour = fit.backtest, view.lr_colour(fit.lr)
    assert test is not None
    text = f"<b>back-test</b>, learning rate {number(fit.lr)}<br>predicted from the smaller sizes: "
    text += f"{number(test.predicted)}<br>measured: {number(test.measured)}, a factor of {number(test.factor, 2)}"
    square = {"symbol": "square-open", "size": [0, 10], "color": colour, "line": {"width": 1.5, "color": colour}}
    line = {"color": colour, "width": 1, "dash": "dot"}
    xs, ys = [test.params, test.params], [test.measured, test.predicted]
    return axes.scatter("lines+markers", xs, ys, f"lr {fit.lr:g}", line=line, marker=square, **axes.hover(["", text]))


def _forecast(view: View, x: Forecast) -> Trace:
    """A diamond where the line meets the limit, with the range of the forecast."""
    at, colour = x.fails_at or 0.0, view.lr_colour(x.lr)
    high = x.high if x.high is not None and math.isfinite(x.high) else at * FARTHEST
    low = x.low if x.low is not None and x.low > 0 else at
    spread = between(x.low, x.high, count)
    text = f"<b>learning rate {number(x.lr)}, {ENDS[x.signal]}</b><br>above {params(at)}"
    bars = {"type": "data", "array": [max(high - at, 0)], "arrayminus": [max(at - low, 0)], "color": colour}
    return axes.scatter(
        "markers",
        [at],
        [x.level],
        f"lr {x.lr:g}",
        error_x={**bars, "thickness": 1.5, "width": 5},
        marker={"symbol": "diamond", "size": 13, "color": colour, "line": {"width": 1.5, "color": "--card"}},
        **axes.hover([text + (f"<br>({spread})" if spread else "")]),
    )
