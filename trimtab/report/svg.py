"""A figure as an SVG file: panels side by side with the same axes, linear or logarithmic.

Plotly, which draws the page of the lab, needs a browser; these files are shown by any viewer of Markdown.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from trimtab.analysis.answers import Figure, Line
from trimtab.report.numbers import number

COLOURS = ("#1b6ca8", "#c2410c", "#15803d", "#7c3aed", "#b91c1c", "#0f766e", "#a16207", "#475569")
PANEL, GAP, HEIGHT, LEFT, TOP = 250, 52, 170, 60, 64
ROW = 16  # of the legend
DOTS = 16  # a line with more points has no dots
MARGIN = 0.04  # of an axis, on both sides


def draw(figure: Figure) -> str:
    """One panel per title, one colour per line name."""
    names = list(dict.fromkeys(line.name for panel in figure.panels for line in panel.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    lines = [line for panel in figure.panels for line in panel.lines]
    x = _axis((v for line in lines for v, y in zip(line.x, line.y, strict=True) if y is not None), figure.log_x)
    y = _axis((v for line in lines for v in (*line.y, *line.low, *line.high) if v is not None), figure.log_y)
    if x is None or y is None:
        return _svg([], 360, 60, f"{figure.title}: no finished runs")
    parts: list[str] = []
    for i, panel in enumerate(figure.panels):
        place = _Place(x, y, LEFT + i * (PANEL + GAP))
        parts += place.frame(panel.title)
        for line in panel.lines:
            parts += place.line(line, colours[line.name])
    bottom = TOP + HEIGHT + 30
    parts.append(_text(LEFT + PANEL / 2, bottom, figure.x, "middle"))
    parts.append(_text(12, TOP - 24, figure.y, "start"))
    for i, name in enumerate(names):
        at = bottom + ROW * (i + 1)
        parts.append(f'<rect x="{LEFT}" y="{at - 8}" width="12" height="8" fill="{colours[name]}"/>')
        parts.append(_text(LEFT + 18, at, name, "start"))
    width = max(LEFT + len(figure.panels) * (PANEL + GAP), 420)
    return _svg(parts, width, bottom + ROW * (len(names) + 1), figure.title)


@dataclass(frozen=True)
class _Axis:
    """From values to shares of the axis."""

    low: float
    high: float
    log: bool

    def share(self, value: float) -> float | None:
        """None: a value that a logarithmic axis does not have."""
        if self.log and value <= 0:
            return None
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """Powers of ten; of a shorter axis, multiples of 1, 2 or 5 times one, at most five."""
        if self.log and (powers := _powers(self.low, self.high)):
            return powers
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span))
        step = next(k * power for k in (0.1, 0.2, 0.5, 1, 2, 5) if span <= 5 * k * power)
        return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """At most five powers of ten; none if there are not two."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [10.0**power for power in range(first, last + 1, (last - first) // 5 + 1)] if last > first else []


def _axis(values: Iterator[float], log: bool) -> _Axis | None:
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not known:
        return None
    low, high = min(known), max(known)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    if log:
        factor = (high / low) ** MARGIN
        return _Axis(low / factor, high * factor, log)
    return _Axis(low - MARGIN * (high - low), high + MARGIN * (high - low), log)


@dataclass(frozen=True)
class _Place:
    """A panel at its place."""

    x: _Axis
    y: _Axis
    left: float

    def at(self, x: float, y: float | None) -> tuple[float, float] | None:
        across, up = self.x.share(x), None if y is None else self.y.share(y)
        if across is None or up is None:
            return None
        return self.left + PANEL * across, TOP + HEIGHT * (1 - min(max(up, 0.0), 1.0))

    def frame(self, title: str) -> list[str]:
        parts = [f'<rect x="{self.left}" y="{TOP}" width="{PANEL}" height="{HEIGHT}" fill="none" stroke="#94a3b8"/>']
        parts.append(_text(self.left, TOP - 6, title, "start"))
        for value in self.x.ticks():
            across = self.left + PANEL * (self.x.share(value) or 0.0)
            parts.append(f'<path d="M{across:.1f} {TOP}v{HEIGHT}" stroke="#e2e8f0"/>')
            parts.append(_text(across, TOP + HEIGHT + 14, number(value), "middle"))
        for value in self.y.ticks():
            up = TOP + HEIGHT * (1 - (self.y.share(value) or 0.0))
            parts.append(_text(self.left - 4, up + 4, number(value), "end"))
        return parts

    def line(self, line: Line, colour: str) -> list[str]:
        points = [place for x, y in zip(line.x, line.y, strict=True) if (place := self.at(x, y)) is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
        if len(points) <= DOTS:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
        for x, low, high in _ranges(line):
            ends = self.at(x, low), self.at(x, high)
            if ends[0] is not None and ends[1] is not None:
                across = f"{ends[0][0]:.1f}"
                parts.append(f'<path d="M{across} {ends[0][1]:.1f}V{ends[1][1]:.1f}" stroke="{colour}"/>')
        return parts


def _ranges(line: Line) -> Iterator[tuple[float, float, float]]:
    for x, low, high in zip(line.x, line.low, line.high, strict=False):
        if low is not None and high is not None:
            yield x, low, high


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="{anchor}" fill="#475569">{escape(text)}</text>'


def _svg(parts: Sequence[str], width: float, height: float, title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">'
    back = f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>'
    heading = f'<text x="12" y="18" font-size="13">{escape(title)}</text>'
    return "\n".join([head, back, heading, *parts, "</svg>"]) + "\n"
