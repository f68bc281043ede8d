"""Training loss over the steps, a panel per arm and a line per run, with spikes; boxes select the runs."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from trimtab.analysis.findings import Result
from trimtab.report import axes
from trimtab.report.axes import Trace
from trimtab.report.layout import Figure, Panel, View, run_words
from trimtab.report.numbers import loss, number, plural

POINTS = 60_000  # of all lines together: keeps the page fast to load and to draw


def training(view: View, panel: Panel) -> Figure | None:
    every = _drawn(view.findings.results)
    runs = _drawn(view.results(panel))
    if not runs:
        return None
    each = max(40, POINTS // len(every))
    traces = [_line(view, run, each) for run in runs] + [_spikes(view, run) for run in runs if run.spikes]
    x, y = axes.axis("step", rangemode="tozero"), axes.loss_axis(_range(every))
    return axes.figure(traces, x=x, y=y, unit="training loss, nats")


def training_words(view: View, panel: Panel) -> str:
    runs = _drawn(view.results(panel))
    spikes = plural(sum(len(run.spikes) for run in runs), "loss spike")
    return f"Training loss over the steps, {view.title(panel)}: {plural(len(runs), 'run')} with {spikes}."


def choices(view: View) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By name: the selected value, at first the largest size and every seed, and the options (value, text)."""
    runs = _drawn(view.findings.results)
    sizes = [size for size in view.sizes if any(run.size == size for run in runs)]
    seeds = [str(seed) for seed in sorted({run.seed for run in runs})]
    options = {
        "size": (sizes[-1] if sizes else "", [(size, view.size_words(size)) for size in sizes]),
        "seed": ("", [(seed, seed) for seed in seeds]),
    }
    return {name: (chosen, [("", "all"), *some]) for name, (chosen, some) in options.items() if len(some) > 1}


def thin(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most so many points: first, last, and the highest of each interval between, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    inner, parts = points[1:-1], max(1, most - 2)
    edges = [round(i * len(inner) / parts) for i in range(parts + 1)]
    kept = [max(inner[a:b], key=lambda p: (not math.isfinite(p[1]), p[1])) for a, b in pairwise(edges)]
    return [points[0], *kept, points[-1]]


def _drawn(runs: Iterable[Result]) -> list[Result]:
    return [run for run in runs if run.losses and run.lr > 0]


def _line(view: View, run: Result, most: int) -> Trace:
    points = thin(run.losses, most)
    ended = loss(run.loss) if math.isfinite(run.loss) else "stopped early" if run.finished else "not finished"
    return axes.scatter(
        "lines",
        [step for step, _ in points],
        [float(f"{y:.4g}") if math.isfinite(y) else None for _, y in points],
        f"lr {run.lr:g}",
        line={"color": view.lr_colour(run.lr), "width": 1.4},
        meta={"size": run.size, "seed": str(run.seed)},
        **axes.hover(f"{run_words(run)}<br>validation loss {ended}", "<br>training loss %{y:.3f} at step %{x}"),
    )


def _spikes(view: View, run: Result) -> Trace:
    top = max((y for _, y in run.losses if math.isfinite(y)), default=0.0)
    text = [f"{run_words(run)}<br>loss spike from step {step:,}, up to {number(peak)}" for step, peak in run.spikes]
    line = {"width": 1, "color": "--card"}
    return axes.scatter(
        "markers",
        [step for step, _ in run.spikes],
        [peak if math.isfinite(peak) else top for _, peak in run.spikes],
        f"lr {run.lr:g}",
        marker={"symbol": "triangle-down", "size": 9, "color": view.lr_colour(run.lr), "line": line},
        meta={"size": run.size, "seed": str(run.seed)},
        cliponaxis=False,
        **axes.hover(text),
    )


def _range(runs: list[Result]) -> tuple[float, float]:
    """From the lowest loss to a little above that of an untrained model."""
    values = [y for run in runs for _, y in run.losses if math.isfinite(y)]
    start = [run.first for run in runs if math.isfinite(run.first)] or values
    low, high = min(values, default=0.0), 1.25 * max(start, default=1.0)
    return axes.with_margin(low, min(high, max(values, default=high)))
