"""Loss against learning rate, one panel per arm; sensitivity against size, one line per arm."""

import math
from typing import Any

from trimtab.analysis.findings import Curve
from trimtab.report.axes import Range, axis, figure, loss_axis, lr_axis, note, params_axis, roomy, share, wider
from trimtab.report.layout import ARMS, Figure, Panel, View, run_words
from trimtab.report.numbers import between, count, label, loss, number

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "hexagon", "star")


def lr_loss(view: View, panel: Panel) -> Figure | None:
    """One line per size: the mean over seeds, their range as a band, each run as a point; crosses fail."""
    curves = [curve for curve in view.findings.curves if (curve.study, curve.arm) == panel and curve.lrs]
    if not curves:
        return None
    curves.sort(key=lambda curve: view.params(curve.size))
    traces = [trace for curve in curves for trace in (*_band(view, curve), _mean(view, curve))]
    traces += [_runs(view, panel, curve.size) for curve in curves]
    ends, level = _loss_range(view)
    x, y = lr_axis(view.lrs), loss_axis(ends)
    lines, words = _before_training(level, ends)
    return figure(traces, x=x, y=y, unit="validation loss, nats", shapes=lines, annotations=words)


def lr_loss_words(view: View, panel: Panel) -> str:
    """The same chart for those who cannot see it."""
    parts = []
    for curve in view.findings.curves:
        if (curve.study, curve.arm) == panel:
            fails = f"fails from {number(curve.failing_lr)}" if curve.failing_lr is not None else "fails nowhere"
            parts.append(f"{curve.size}: best {loss(curve.best_loss)} at {number(curve.best_lr)}, {fails}")
    return f"Validation loss against learning rate, {view.title(panel)}. " + "; ".join(parts)


def sensitivity(view: View) -> Figure | None:
    """One line per arm over the size, with the range over seeds."""
    lines = {panel: _sensitive(view, panel) for panel in view.panels}
    lines = {panel: curves for panel, curves in lines.items() if curves}
    if not lines:
        return None
    every = [curve for curves in lines.values() for curve in curves]
    sizes = [float(curve.params or 0) for curve in every]
    highest = max(curve.sensitivity_high or curve.sensitivity for curve in every)
    traces = [_sensitivity_line(view, panel, curves) for panel, curves in lines.items()]
    x, y = params_axis(wider(sizes, 1.6, 1.6), sizes), axis(range=[0, max(highest, 1e-3) * 1.12], nticks=6)
    return figure(traces, x=x, y=y, unit="learning-rate sensitivity, nats")


def sensitivity_words(view: View) -> str:
    parts = [
        f"{view.title((curve.study, curve.arm))} at {count(curve.params)}: {number(curve.sensitivity)}"
        for curve in view.findings.curves
        if math.isfinite(curve.sensitivity)
    ]
    return "Learning-rate sensitivity against size. " + "; ".join(parts)


def _loss_range(view: View) -> tuple[Range, float | None]:
    """What the chart shows, the same in every panel so that panels can be compared; and the loss before training.

    Where no run comes near that loss, the chart ends below it: a wide empty stretch would flatten what there is to see.
    """
    curves = view.findings.curves
    values = [x for curve in curves for x in (*curve.low, *curve.high) if math.isfinite(x)] or [1.0]
    first = [curve.first for curve in curves if math.isfinite(curve.first)]
    low, high = min(values), max(values)
    level = sum(first) / len(first) if first else None
    if level is not None and high > (low + level) / 2:
        high = max(high, level)
    return roomy(low, high), level


def _before_training(level: float | None, ends: Range) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if level is None:
        return [], []
    if level > ends[1]:
        return [], [note(f"before training {loss(level)}, above", 1.0, 1.0, xanchor="right", yshift=2)]
    height = share(level, ends) if ends[0] > 0 else (level - ends[0]) / (ends[1] - ends[0])
    return [_level(level)], [note("before training", 0.01, height, yshift=1)]


def _band(view: View, curve: Curve) -> list[dict[str, Any]]:
    if max(curve.seeds, default=0) < 2:
        return []
    xs = [*curve.lrs, *reversed(curve.lrs)]
    ys = [*map(_finite, curve.high), *map(_finite, reversed(curve.low))]
    fill = {"fill": "toself", "fillcolor": view.size_colour(curve.size), "opacity": 0.14, "line": {"width": 0}}
    group = {"legendgroup": f"size {curve.size}", "hoverinfo": "skip", "mode": "lines", "type": "scatter"}
    return [{"x": xs, "y": ys, **fill, **group}]


def _mean(view: View, curve: Curve) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(curve.lrs),
        "y": [_finite(x) for x in curve.loss],
        "line": {"color": view.size_colour(curve.size), "width": 2.5},
        "legendgroup": f"size {curve.size}",
        "hoverinfo": "skip",
    }


def _runs(view: View, panel: Panel, size: str) -> dict[str, Any]:
    """Every run of a line. The best learning rate is a large point; crosses are at or above the first that fails."""
    runs = [run for run in view.results(panel) if run.size == size and run.lr > 0 and math.isfinite(run.score)]
    curve = view.curve(runs[0]) if runs else None
    best = curve.best_lr if curve else None
    fails = [view.fails(run) for run in runs]
    hover = []
    for run in runs:
        ended = loss(run.loss) if math.isfinite(run.loss) else f"broke off, counted as {loss(run.score)}"
        hover.append(f"{run_words(run)}<br>validation loss {ended}")
    sizes = [10 if bad else 11 if run.lr == best else 5.5 for run, bad in zip(runs, fails, strict=True)]
    symbols = ["x-thin" if bad else "circle" for bad in fails]
    colour = view.size_colour(size)
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [run.lr for run in runs],
        "y": [run.score for run in runs],
        "marker": {
            "color": colour,
            "opacity": 1,
            "size": sizes,
            "symbol": symbols,
            "line": {"width": 2, "color": colour},
        },
        "text": hover,
        "hovertemplate": "%{text}<extra></extra>",
        "legendgroup": f"size {size}",
    }


def _sensitive(view: View, panel: Panel) -> list[Curve]:
    found = [c for c in view.findings.curves if (c.study, c.arm) == panel and c.params and math.isfinite(c.sensitivity)]
    return sorted(found, key=lambda curve: curve.params or 0)


def _sensitivity_line(view: View, panel: Panel, curves: list[Curve]) -> dict[str, Any]:
    name, colour = label(view.title(panel), 40), view.arm_colour(panel)
    hover = []
    for curve in curves:
        spread = between(curve.sensitivity_low, curve.sensitivity_high)
        lines = [f"<b>{name}</b>", f"{label(curve.size)}, {count(curve.params)} parameters"]
        lines.append(f"sensitivity {number(curve.sensitivity)}" + (f"<br>{spread} over seeds" if spread else ""))
        lines.append(f"learning rates {number(curve.window[0])} to {number(curve.window[1])}")
        hover.append("<br>".join(lines))
    above = [(c.sensitivity_high or c.sensitivity) - c.sensitivity for c in curves]
    below = [c.sensitivity - (c.sensitivity if c.sensitivity_low is None else c.sensitivity_low) for c in curves]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [curve.params for curve in curves],
        "y": [curve.sensitivity for curve in curves],
        "error_y": {"type": "data", "array": above, "arrayminus": below, "color": colour, "thickness": 1.5, "width": 5},
        "line": {"color": colour, "width": 2.5},
        "marker": {"color": colour, "size": 9, "symbol": _symbol(view.panels.index(panel))},
        "text": hover,
        "hovertemplate": "%{text}<extra></extra>",
        "legendgroup": f"arm {view.panels.index(panel)}",
    }


def _symbol(place: int) -> str:
    """Colours come again after some arms; with another symbol each."""
    return SYMBOLS[(place + place // ARMS) % len(SYMBOLS)]


def _level(y: float) -> dict[str, Any]:
    line = {"color": "--muted", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line, "layer": "between"}


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
