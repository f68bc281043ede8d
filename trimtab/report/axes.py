"""The frame of every chart: font, grid, axes. Logarithmic axes have their own ticks: 0.0003 instead of 10^-3.5."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trimtab.report.layout import Figure
from trimtab.report.numbers import count, number

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
Range = tuple[float, float]
Trace = dict[str, Any]


def figure(
    traces: list[Trace], *, x: dict[str, Any], y: dict[str, Any], unit: str, right: int = 12, **layout: Any
) -> Figure:
    """A chart with the name of its vertical axis above it, where it takes no width."""
    place = {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"}
    hover = {"bgcolor": "--card", "bordercolor": "--muted", "align": "left"}
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
            "hoverlabel": {**hover, "font": {"family": FONT, "size": 13, "color": "--ink"}},
            "xaxis": x,
            "yaxis": y,
            "title": {"text": unit, **place, "pad": {"t": 6}, "font": {"color": "--muted", "size": 12.5}},
            **layout,
        },
    }


def scatter(mode: str, x: Sequence[Any], y: Sequence[Any], group: str, **more: Any) -> Trace:
    """Lines or markers; the legend's button of the same `group` hides them."""
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "legendgroup": group, **more}


def hover(texts: str | list[str], more: str = "") -> dict[str, Any]:
    return {"text": texts, "hovertemplate": f"%{{text}}{more}<extra></extra>"}


def run_marker(colour: str, fails: list[bool], sizes: list[float]) -> dict[str, Any]:
    """Circles for stable runs, crosses for those that diverge."""
    symbols = ["x-thin" if bad else "circle" for bad in fails]
    return {"color": colour, "opacity": 1, "size": sizes, "symbol": symbols, "line": {"width": 2, "color": colour}}


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    named = {"title": {"text": title, "standoff": 10, "font": {"size": 12.5}}, "automargin": True}
    lines = {"gridcolor": "--grid", "linecolor": "--line", "zeroline": False, "showline": False, "ticks": ""}
    return {**named, **lines, **more}


def log_axis(
    ends: Range, ticks: Iterable[float], title: str = "", *, text: Callable[[float], str] = number
) -> dict[str, Any]:
    at = [x for x in ticks if ends[0] <= x <= ends[1]]
    shown = {"range": [math.log10(end) for end in ends], "tickvals": at, "ticktext": [text(x) for x in at]}
    return axis(title, type="log", **shown, tickangle=0, minor={"showgrid": False})


def lr_axis(lrs: Sequence[float]) -> dict[str, Any]:
    """Every learning rate of the grid is a tick; of many, every second or third."""
    ends = (min(lrs) / 1.5, max(lrs) * 1.5)
    many = -(-len(lrs) // 7)
    return log_axis(ends, sorted(lrs)[::-1][::many][::-1], "learning rate")


def params_axis(ends: Range, sizes: Iterable[float]) -> dict[str, Any]:
    """Over many decades the ticks are powers of ten; over few, the sizes themselves unless they are too close."""
    if ends[1] / ends[0] > 300:
        return log_axis(ends, decades(ends, most=7), "parameters", text=count)
    return log_axis(ends, _apart(sorted(set(sizes), reverse=True), ends, 8), "parameters", text=count)


def loss_axis(ends: Range) -> dict[str, Any]:
    """Logarithmic with round ticks; linear if a loss is not positive."""
    if ends[0] <= 0:
        return axis(range=list(ends), nticks=6)
    if ends[1] / ends[0] > 100:
        return value_axis(ends)
    power = 10.0 ** math.floor(math.log10(ends[1] - ends[0]))
    steps = (times * power for times in (5, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02))
    ticks = next((found for step in steps if len(found := _multiples(step, ends)) >= 4), list(ends))
    return log_axis(ends, ticks, text=lambda x: number(x, 6))


def _multiples(step: float, ends: Range) -> list[float]:
    values = (step * i for i in range(int(ends[1] / step), math.ceil(ends[0] / step) - 1, -1))
    return _apart([x for x in values if x > 0], ends, 12)[::-1]


def _apart(values: Iterable[float], ends: Range, most: int) -> list[float]:
    """Of falling values, those at least 1/`most` of a logarithmic axis apart."""
    kept: list[float] = []
    for x in values:
        if not kept or math.log(kept[-1] / x) > math.log(ends[1] / ends[0]) / most:
            kept.append(x)
    return kept


def with_margin(low: float, high: float) -> Range:
    """Two losses with a margin; a positive one stays positive."""
    if low > 0:
        room = max((high / low) ** 0.08, 1.01)
        return low / room, high * room
    room = 0.08 * (high - low) or 0.1
    return low - room, high + room


def value_axis(ends: Range) -> dict[str, Any]:
    def text(x: float) -> str:
        return count(x, 2) if x >= 1 else number(x) if x > 5e-4 else f"{x:.0e}".replace("e-0", "e-")

    return log_axis(ends, decades(ends, most=8), text=text)


def decades(ends: Range, most: int) -> list[float]:
    """At most `most` powers of ten between two ends, equally spaced."""
    first, last = math.ceil(math.log10(ends[0]) - 1e-9), math.floor(math.log10(ends[1]) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [10.0**power for power in range(first, last + 1, step)]


def wider(values: Iterable[float], below: float, above: float) -> Range:
    """The range of the positive values, widened by a factor on either side."""
    good = [x for x in values if math.isfinite(x) and x > 0]
    return min(good) / below, max(good) * above


def note(text: str, x: float, y: float, **more: Any) -> dict[str, Any]:
    """Text at a position given as shares of the chart."""
    place = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    return {"text": text, "x": x, "y": y, **place, "font": {"size": 12, "color": "--muted"}, **more}


def horizontal(y: float, colour: str, **line: Any) -> dict[str, Any]:
    ends = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "layer": "between"}
    return {**ends, "line": {"color": colour, **line}}


def share(x: float, ends: Range) -> float:
    """The position of a value on a logarithmic axis: 0 at its start, 1 at its end."""
    return (math.log10(x) - math.log10(ends[0])) / (math.log10(ends[1]) - math.log10(ends[0]))
