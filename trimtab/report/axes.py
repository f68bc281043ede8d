"""The frame of every chart: one font, quiet grids, ticks that are numbers people write.

Logarithmic axes get their ticks by hand: plotly would say 10^-3.5 where a person says 0.0003.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trimtab.report.layout import Figure
from trimtab.report.numbers import count, number, tick

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
Range = tuple[float, float]


def figure(
    traces: list[dict[str, Any]], *, x: dict[str, Any], y: dict[str, Any], unit: str, right: int = 12, **layout: Any
) -> Figure:
    """A chart whose vertical axis is named above it, where it is read first and costs no width."""
    place = {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"}
    named = {"text": unit, **place, "pad": {"t": 6}, "font": {"color": "--muted", "size": 12.5}}
    return {
        "data": traces,
        "layout": {
            "autosize": True,
            "margin": {"l": 40, "r": right, "t": 34, "b": 54},
            "font": {"family": FONT, "size": 12.5, "color": "--muted"},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hovermode": "closest",
            "hoverdistance": 24,
            "showlegend": False,
            "hoverlabel": {
                "bgcolor": "--card",
                "bordercolor": "--muted",
                "align": "left",
                "font": {"family": FONT, "size": 13, "color": "--ink"},
            },
            "xaxis": x,
            "yaxis": y,
            "title": named,
            **layout,
        },
    }


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 10, "font": {"size": 12.5}},
        "gridcolor": "--grid",
        "linecolor": "--line",
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "automargin": True,
        **more,
    }


def log_axis(
    ends: Range, ticks: Iterable[float], title: str = "", *, say: Callable[[float], str] = number
) -> dict[str, Any]:
    at = [x for x in ticks if ends[0] <= x <= ends[1]]
    text = [say(x) for x in at]
    shown = [math.log10(end) for end in ends]
    return axis(title, type="log", range=shown, tickvals=at, ticktext=text, tickangle=0, minor={"showgrid": False})


def lr_axis(lrs: Sequence[float]) -> dict[str, Any]:
    """Every learning rate of the grid is a tick, and every second one where they would touch."""
    ends = (min(lrs) / 1.5, max(lrs) * 1.5)
    many = -(-len(lrs) // 7)
    return log_axis(ends, sorted(lrs)[::-1][::many][::-1], "learning rate")


def params_axis(ends: Range, sizes: Iterable[float]) -> dict[str, Any]:
    """Over many decades ticks are powers of ten; over few, the sizes themselves where they keep their distance."""
    if ends[1] / ends[0] > 300:
        return log_axis(ends, decades(ends, most=7), "parameters", say=tick)
    kept: list[float] = []
    for size in sorted(set(sizes), reverse=True):
        if not kept or math.log(kept[-1] / size) > math.log(ends[1] / ends[0]) / 8:
            kept.append(size)
    return log_axis(ends, kept, "parameters", say=tick)


def loss_axis(ends: Range) -> dict[str, Any]:
    """Losses are positive and read as numbers: logarithmic, with round ticks; plain where one is not positive."""
    if ends[0] <= 0:
        return axis(range=list(ends), nticks=6)
    if ends[1] / ends[0] > 100:
        return value_axis(ends)
    power = 10.0 ** math.floor(math.log10(ends[1] - ends[0]))
    steps = (times * power for times in (5, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02))
    ticks = next((found for step in steps if len(found := _multiples(step, ends)) >= 4), list(ends))
    return log_axis(ends, ticks, say=lambda x: number(x, 6))


def _multiples(step: float, ends: Range) -> list[float]:
    """Those of a step between two ends that keep a distance on a logarithmic axis, from the largest down."""
    kept: list[float] = []
    for i in range(int(ends[1] / step), math.ceil(ends[0] / step) - 1, -1):
        x = step * i
        if x > 0 and (not kept or math.log(kept[-1] / x) > math.log(ends[1] / ends[0]) / 12):
            kept.append(x)
    return kept[::-1]


def roomy(low: float, high: float) -> Range:
    """Two losses with a little room around them; a positive one stays positive."""
    if low > 0:
        room = max((high / low) ** 0.08, 1.01)
        return low / room, high * room
    room = 0.08 * (high - low) or 0.1
    return low - room, high + room


def value_axis(ends: Range) -> dict[str, Any]:
    return log_axis(ends, decades(ends, most=8), say=_short)


def decades(ends: Range, most: int) -> list[float]:
    """Powers of ten between two ends, every so many that there are not too many."""
    first, last = math.ceil(math.log10(ends[0]) - 1e-9), math.floor(math.log10(ends[1]) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [10.0**power for power in range(first, last + 1, step)]


def wider(values: Iterable[float], below: float, above: float) -> Range:
    """From the smallest to the largest positive value, and so many times more on either side."""
    good = [x for x in values if math.isfinite(x) and x > 0]
    return min(good) / below, max(good) * above


def note(text: str, x: float, y: float, **more: Any) -> dict[str, Any]:
    """Words at a place given as shares of the chart."""
    place = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    return {"text": text, "x": x, "y": y, **place, "font": {"size": 12, "color": "--muted"}, **more}


def share(x: float, ends: Range) -> float:
    """Where on a logarithmic axis a value is: 0 at its beginning, 1 at its end."""
    return (math.log10(x) - math.log10(ends[0])) / (math.log10(ends[1]) - math.log10(ends[0]))


def _short(x: float) -> str:
    """10 thousand is too wide beside an axis; 10k is not."""
    text = count(x, 2) if x >= 1 else number(x) if x > 5e-4 else f"{x:.0e}".replace("e-0", "e-")
    for word, letter in ((" thousand", "k"), (" million", "M"), (" billion", "B"), (" trillion", "T")):
        text = text.replace(word, letter)
    return text
