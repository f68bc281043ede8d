"""Loss against learning rate, one panel per arm; edge of stability and sensitivity against size, one line per arm."""

import math

import numpy as np

from trimtab.analysis.findings import Curve
from trimtab.analysis.predict import Recipe
from trimtab.analysis.thresholds import FIRM, HORIZON
from trimtab.analysis.trend import Trend
from trimtab.report import axes
from trimtab.report.axes import Range, Trace
from trimtab.report.layout import ARMS, Figure, Panel, View, run_words
from trimtab.report.numbers import between, count, label, loss, number, params

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "hexagon", "star")


def lr_loss(view: View, panel: Panel) -> Figure | None:
    """One line per size: the mean over seeds, their range as a band, each run as a point; crosses fail."""
    curves = [curve for curve in view.curves(panel) if curve.lrs]
    if not curves:
        return None
    traces = [trace for curve in curves for trace in _mean(view, curve)]
    traces += [_runs(view, panel, curve) for curve in curves]
    ends, level = _loss_range(view)
    shapes, notes = [], []
    if level is not None and level > ends[1]:
        notes = [axes.note(f"before training {loss(level)}, above", 1.0, 1.0, xanchor="right", yshift=2)]
    elif level is not None:
        height = axes.share(level, ends) if ends[0] > 0 else (level - ends[0]) / (ends[1] - ends[0])
        shapes = [axes.horizontal(level, "--muted", width=1, dash="dot")]
        notes = [axes.note("before training", 0.01, height, yshift=1)]
    x, y = axes.lr_axis(view.grid), axes.loss_axis(ends)
    return axes.figure(traces, x=x, y=y, unit="validation loss, nats", shapes=shapes, annotations=notes)


def lr_loss_words(view: View, panel: Panel) -> str:
    """The chart as text, for screen readers."""
    parts = []
    for curve in view.curves(panel):
        fails = f"fails from {number(curve.failing_lr)}" if curve.failing_lr is not None else "never fails"
        parts.append(f"{curve.size}: best {loss(curve.best_loss)} at {number(curve.best_lr)}, {fails}")
    return f"Validation loss against learning rate, {view.title(panel)}. " + "; ".join(parts)


def edges(view: View) -> Figure | None:
    """One line per arm over the size: measured edges, the trend through them, and its forecast for larger sizes."""
    trends = {panel: trend for panel in view.panels if (trend := Recipe(view.findings, *panel).trend) is not None}
    if not trends:
        return None
    sizes = [float(size) for trend in trends.values() for size in trend.params]
    largest = max(sizes)
    across = min(sizes) / 1.7, largest * 10**HORIZON
    traces = [trace for panel, trend in trends.items() for trace in _edge_line(view, panel, trend, across)]
    values = [y for trace in traces for y in trace["y"] if y]
    start = largest * 1.25
    box = {"type": "rect", "yref": "paper", "x0": start, "x1": across[1], "y0": 0, "y1": 1, "layer": "below"}
    words = axes.note("forecast", axes.share(start, across), 1.0, font={"size": 11.5, "color": "--muted"})
    return axes.figure(
        traces,
        x=axes.params_axis(across, sizes),
        y=axes.log_axis(
            ends := axes.wider(values, 1.3, 1.3), axes.decades((ends[0] / 10, ends[1]), most=8), text=number
        ),
        unit="learning rate above which training fails",
        shapes=[{**box, "fillcolor": "--shade", "line": {"width": 0}}],
        annotations=[words],
    )


def edges_words(view: View) -> str:
    """The chart as text, for screen readers."""
    parts = []
    for curve in view.findings.curves:
        edge = f"above {number(curve.lrs[-1])}" if curve.edge is None else number(curve.edge, 2)
        parts.append(f"{view.title((curve.study, curve.arm))} at {curve.size}: {edge}")
    return "Edge of stability against size. " + "; ".join(parts)


def _edge_line(view: View, panel: Panel, trend: Trend, across: Range) -> list[Trace]:
    name, colour, place = label(view.title(panel), 40), view.arm_colour(panel), view.panels.index(panel)
    group = f"arm {place}"
    xs = np.geomspace(trend.params[0], across[1], 24).tolist()
    middle, low, high = ([trend.edge(x, p) for x in xs] for p in (0.5, 1 - FIRM, FIRM))
    area = {"fill": "toself", "opacity": 0.12, "fillcolor": colour, "line": {"width": 0}, "hoverinfo": "skip"}
    dashed = {"color": colour, "width": 1.5, "dash": "dash"}
    texts, known, above, below = list[str](), list[float](), list[float](), list[float]()
    for params_, edge, spread in zip(trend.params, trend.edges, trend.ranges, strict=True):
        shown = (
            f"{number(edge, 2)} ({between(*spread, lambda x: number(x, 2))})" if edge else f"above {number(spread[0])}"
        )
        texts.append(f"<b>{name}</b><br>{params(params_)}<br>edge of stability {shown}")
        known.append(edge or spread[0])
        above.append(spread[1] - edge if edge else 0.0)
        below.append(edge - spread[0] if edge else 0.0)
    symbols = [SYMBOLS[place % len(SYMBOLS)] if edge else "triangle-up-open" for edge in trend.edges]
    return [
        axes.scatter("lines", [*xs, *xs[::-1]], [*high, *low[::-1]], group, **area),
        axes.scatter("lines", xs, middle, group, line=dashed, hoverinfo="skip"),
        axes.scatter(
            "markers",
            trend.params,
            known,
            group,
            error_y={"type": "data", "array": above, "arrayminus": below, "color": colour, "width": 5},
            marker={"size": 10, "color": colour, "symbol": symbols},
            **axes.hover(texts),
        ),
    ]


def sensitivity(view: View) -> Figure | None:
    """One line per arm over the size, with the range over seeds."""
    known = {p: [c for c in view.curves(p) if c.params and math.isfinite(c.sensitivity)] for p in view.panels}
    lines = {panel: curves for panel, curves in known.items() if curves}
    if not lines:
        return None
    every = [curve for curves in lines.values() for curve in curves]
    sizes = [float(curve.params or 0) for curve in every]
    highest = max(curve.sensitivity_high or curve.sensitivity for curve in every)
    traces = [_sensitivity_line(view, panel, curves) for panel, curves in lines.items()]
    x = axes.params_axis(axes.wider(sizes, 1.6, 1.6), sizes)
    y = axes.axis(range=[0, max(highest, 1e-3) * 1.12], nticks=6)
    return axes.figure(traces, x=x, y=y, unit="learning-rate sensitivity, nats")


def sensitivity_words(view: View) -> str:
    parts = [
        f"{view.title((curve.study, curve.arm))} at {count(curve.params)}: {number(curve.sensitivity)}"
        for curve in view.findings.curves
        if math.isfinite(curve.sensitivity)
    ]
    return "Learning-rate sensitivity against size. " + "; ".join(parts)


def _loss_range(view: View) -> tuple[Range, float | None]:
    """The range of the vertical axis, the same in every panel; and the loss before training.

    If no run comes near that loss, the chart ends below it: it would flatten the curves.
    """
    curves = view.findings.curves
    values = [x for curve in curves for x in (*curve.low, *curve.high) if math.isfinite(x)] or [1.0]
    first = [curve.first for curve in curves if math.isfinite(curve.first)]
    low, high = min(values), max(values)
    level = sum(first) / len(first) if first else None
    if level is not None and high > (low + level) / 2:
        high = max(high, level)
    return axes.with_margin(low, high), level


def _mean(view: View, curve: Curve) -> list[Trace]:
    """The mean over seeds, and the band between the lowest and the highest."""
    group, colour = f"size {curve.size}", view.size_colour(curve.size)
    line = {"line": {"color": colour, "width": 2.5}, "hoverinfo": "skip"}
    mean = axes.scatter("lines", curve.lrs, [_finite(x) for x in curve.loss], group, **line)
    if max(curve.seeds, default=0) < 2:
        return [mean]
    xs = [*curve.lrs, *reversed(curve.lrs)]
    ys = [*map(_finite, curve.high), *map(_finite, reversed(curve.low))]
    fill = {"fill": "toself", "fillcolor": colour, "opacity": 0.14, "line": {"width": 0}, "hoverinfo": "skip"}
    return [axes.scatter("lines", xs, ys, group, **fill), mean]


def _runs(view: View, panel: Panel, curve: Curve) -> Trace:
    """Every run of a line; those at the best learning rate are large."""
    runs = [run for run in view.results(panel) if run.size == curve.size and run.lr > 0 and math.isfinite(run.score)]
    fails = [view.fails(run) for run in runs]
    texts = []
    for run in runs:
        ended = loss(run.loss) if math.isfinite(run.loss) else f"none: stopped early, counted as {loss(run.score)}"
        texts.append(f"{run_words(run)}<br>validation loss {ended}")
    sizes = [10 if bad else 11 if run.lr == curve.best_lr else 5.5 for run, bad in zip(runs, fails, strict=True)]
    marker = axes.run_marker(view.size_colour(curve.size), fails, sizes)
    xs, ys = [run.lr for run in runs], [run.score for run in runs]
    return axes.scatter("markers", xs, ys, f"size {curve.size}", marker=marker, **axes.hover(texts))


def _sensitivity_line(view: View, panel: Panel, curves: list[Curve]) -> Trace:
    name, colour, place = label(view.title(panel), 40), view.arm_colour(panel), view.panels.index(panel)
    texts = []
    for curve in curves:
        spread = between(curve.sensitivity_low, curve.sensitivity_high)
        lines = [f"<b>{name}</b>", f"{label(curve.size)}, {params(curve.params)}"]
        lines.append(f"sensitivity {number(curve.sensitivity)}" + (f"<br>{spread} over seeds" if spread else ""))
        lines.append(f"{number(curve.too_slow, 2)} too slow, {number(curve.unstable, 2)} unstable")
        lines.append(f"learning rates {between(*curve.window)}")
        texts.append("<br>".join(lines))
    above = [(c.sensitivity_high or c.sensitivity) - c.sensitivity for c in curves]
    below = [c.sensitivity - (c.sensitivity if c.sensitivity_low is None else c.sensitivity_low) for c in curves]
    bars = {"type": "data", "array": above, "arrayminus": below, "color": colour, "thickness": 1.5, "width": 5}
    symbol = SYMBOLS[(place + place // ARMS) % len(SYMBOLS)]  # colours repeat, with another symbol
    return axes.scatter(
        "lines+markers",
        [curve.params for curve in curves],
        [curve.sensitivity for curve in curves],
        f"arm {place}",
        name=name,
        error_y=bars,
        line={"color": colour, "width": 2.5},
        marker={"color": colour, "size": 9, "symbol": symbol},
        **axes.hover(texts),
    )


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
