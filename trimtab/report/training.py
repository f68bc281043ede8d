"""Training loss over the steps, a panel per arm and a line per run, spikes marked; boxes choose which are shown."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from trimtab.analysis.findings import Result
from trimtab.analysis.words import plural
from trimtab.report.axes import axis, figure, loss_axis, roomy
from trimtab.report.layout import Figure, Panel, View, run_words
from trimtab.report.numbers import html, loss, number

POINTS = 60_000  # of all lines together: what a browser draws without a pause and a page carries without weight
ALL = ("", "all")


def training(view: View, panel: Panel) -> Figure | None:
    every = _drawn(view.findings.results)
    runs = _drawn(view.results(panel))
    if not runs:
        return None
    each = max(40, POINTS // len(every))
    traces = [_line(view, run, each) for run in runs] + [_spikes(view, run) for run in runs if run.spikes]
    return figure(traces, x=axis("step", rangemode="tozero"), y=loss_axis(_range(every)), unit="training loss, nats")


def training_words(view: View, panel: Panel) -> str:
    runs = _drawn(view.results(panel))
    spikes = sum(len(run.spikes) for run in runs)
    said = f"{plural(len(runs), 'run')}, with {plural(spikes, 'spike')} marked"
    return f"Training loss over the steps, {view.title(panel)}: {said}."


def boxes(view: View) -> str:
    """What to show: at first the largest size, every seed."""
    runs = _drawn(view.findings.results)
    sizes = [size for size in view.sizes if any(run.size == size for run in runs)]
    choices = {
        "size": [(size, view.size_words(size)) for size in sizes],
        "seed": [(str(seed), str(seed)) for seed in sorted({run.seed for run in runs})],
    }
    chosen = {"size": sizes[-1]} if sizes else {}
    shown = [_box(name, some, chosen.get(name, "")) for name, some in choices.items() if len(some) > 1]
    return f'<div class="choose">{"".join(shown)}</div>' if shown else ""


def thin(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most so many points: first, last, and of each stretch between the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], max(1, most - 2)
    edges = [round(i * len(inner) / stretches) for i in range(stretches + 1)]
    kept = [max(inner[a:b], key=lambda p: (not math.isfinite(p[1]), p[1])) for a, b in pairwise(edges)]
    return [points[0], *kept, points[-1]]


def _drawn(runs: Iterable[Result]) -> list[Result]:
    return [run for run in runs if run.losses and run.lr > 0]


def _meta(run: Result) -> dict[str, str]:
    return {"size": run.size, "seed": str(run.seed)}


def _line(view: View, run: Result, most: int) -> dict[str, Any]:
    points = thin(run.losses, most)
    ended = loss(run.loss) if math.isfinite(run.loss) else "broke off" if run.finished else "not ended"
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [step for step, _ in points],
        "y": [float(f"{y:.4g}") if math.isfinite(y) else None for _, y in points],
        "line": {"color": view.lr_colour(run.lr), "width": 1.4},
        "text": f"{run_words(run)}<br>validation loss {ended}",
        "hovertemplate": "%{text}<br>training loss %{y:.3f} at step %{x}<extra></extra>",
        "legendgroup": f"lr {run.lr:g}",
        "meta": _meta(run),
    }


def _spikes(view: View, run: Result) -> dict[str, Any]:
    steps = [step for step, _ in run.spikes]
    top = max((y for _, y in run.losses if math.isfinite(y)), default=0.0)
    colour = view.lr_colour(run.lr)
    said = [f"{run_words(run)}<br>spike from step {step:,}, up to {number(peak)}" for step, peak in run.spikes]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": steps,
        "y": [peak if math.isfinite(peak) else top for _, peak in run.spikes],
        "marker": {"symbol": "triangle-down", "size": 9, "color": colour, "line": {"width": 1, "color": "--card"}},
        "text": said,
        "hovertemplate": "%{text}<extra></extra>",
        "legendgroup": f"lr {run.lr:g}",
        "meta": _meta(run),
        "cliponaxis": False,
    }


def _range(runs: list[Result]) -> tuple[float, float]:
    """From the lowest loss to a little above that of an untrained model: what is higher has left the chart."""
    values = [y for run in runs for _, y in run.losses if math.isfinite(y)]
    start = [run.first for run in runs if math.isfinite(run.first)] or values
    low, high = min(values, default=0.0), 1.25 * max(start, default=1.0)
    high = min(high, max(values, default=high))
    return roomy(low, high)


def _box(name: str, items: list[tuple[str, str]], chosen: str) -> str:
    options = "".join(
        f'<option value="{html(key)}"{" selected" if key == chosen else ""}>{html(words)}</option>'
        for key, words in (ALL, *items)
    )
    return f'<label>{name.capitalize()} <select name="{name}">{options}</select></label>'
