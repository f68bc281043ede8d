"""One loss spike, picture by picture: the figures of docs/watch.md.

python -m bench.spikes --only clip-fast --seeds 1 --out runs/spikes          about a minute
python -m bench.spike_pictures runs/spikes/clip-fast-0                      writes docs/figures/spike-*.svg

1 the whole run      2 the worst spike close up, loss and RMS_t      3 RMS_t of every tensor, step by step
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import tyro

from trimtab.analysis.one_run import FirstSpike, first_spikes, losses_of, rms_of
from trimtab.analysis.spikes import PAPER
from trimtab.runs.reader import Floats, Run, read_run

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
WIDTH, LEFT, RIGHT, TOP = 760, 64, 24, 34
BLUE, RED, ORANGE, GREY = "#3b6fb6", "#c0392b", "#d98200", "#888888"
AROUND = (14, 14)  # steps before the onset and after the peak in the close-up


def main(folder: Path, /, out: Path = FIGURES) -> None:
    """Draw the worst loss spike of a run.

    Args:
        folder: a run with signals of every step
        out: where the pictures go
    """
    run = read_run(folder)
    spikes = first_spikes(run, PAPER.fitted(int(losses_of(run)[0][-1])))
    if not spikes:
        raise SystemExit(f"{folder} has no loss spike to draw; try another seed of bench.spikes")
    worst = max(spikes, key=lambda spike: spike.peak[1])
    for name, picture in (("1-run", whole), ("2-close", close_up), ("3-tensors", tensors)):
        (out / f"spike-{name}.svg").write_text(picture(run, worst))
    first = ", ".join(f"{name} (RMS {rms:.2f} at step {step})" for name, step, rms in worst.tensors[:3])
    print(f"usual loss {worst.usual[0]:.3g}; onset {worst.step}, peak {worst.peak[1]:.3g} at {worst.peak[0]}")
    print(f"first: {first}")


def whole(run: Run, spike: FirstSpike) -> str:
    steps, losses = losses_of(run)
    frame = _Frame(steps, losses, height=230, log=True)
    body = [frame.band(spike.step, spike.peak[0]), frame.line(steps, losses, BLUE)]
    return frame.close([*body, *frame.ticks()], "1. The loss of the whole run; the marked spike is the next picture")


def close_up(run: Run, spike: FirstSpike) -> str:
    """Loss above, RMS_t of the first tensors to spike below, on one time axis."""
    near = slice(*np.searchsorted(losses_of(run)[0], (spike.step - AROUND[0], spike.peak[0] + AROUND[1])))
    steps, losses = (x[near] for x in losses_of(run))
    watched, by_tensor = rms_of(run)
    chosen = [name for name, _, _ in spike.tensors[:3]]
    rms = {name: by_tensor[name][np.isin(watched, steps)] for name in chosen}
    top = _Frame(steps, losses, height=200, log=True)
    below = _Frame(steps, np.concatenate([*rms.values(), [PAPER.rms, 1.0]]), height=200, offset=200)
    body = [top.line(steps, losses, BLUE), top.mark(spike.step, "the loss leaves its usual range", BLUE), *top.ticks()]
    body += [top.label("loss"), below.label("RMS_t"), below.level(PAPER.rms, "2.3: alarm", RED), *below.ticks()]
    for values, color in zip(rms.values(), (RED, ORANGE, GREY), strict=False):
        body.append(below.line(steps, values, color))
    for i, ((name, step, _), color) in enumerate(zip(spike.tensors, (RED, ORANGE, GREY), strict=False)):
        body.append(_text(LEFT + 8, 200 + TOP + 16 + 17 * i, f"{name}, first at step {step}", color))
    return below.close(body, "2. Close up: loss above, RMS_t of the first tensors to spike below")


def tensors(run: Run, spike: FirstSpike) -> str:
    """A row per tensor, a column per step, the earliest on top."""
    watched, by_tensor = rms_of(run)
    steps = [s for s in watched.tolist() if spike.step - 6 <= s <= spike.peak[0] + 6]
    names = [name for name, _, _ in spike.tensors[:18]]
    cell, left, row = (WIDTH - 330 - RIGHT) / len(steps), 330, 17
    parts = []
    for y, name in enumerate(names):
        parts.append(_text(left - 8, TOP + row * y + 13, name, "#333", anchor="end"))
        values = by_tensor[name][np.isin(watched, steps)]
        for x, value in enumerate(values):
            parts.append(_box(left + cell * x, TOP + row * y, cell - 1, row - 1, _heat(float(value)), f"{value:.2f}"))
    bottom = TOP + row * len(names)
    for x, step in enumerate(steps):
        if step % 2 == 0:
            parts.append(_text(left + cell * (x + 0.5), bottom + 15, str(step), "#333", anchor="middle"))
    for step, text in ((spike.step, "onset"), (spike.peak[0], "peak")):
        parts.append(_text(left + cell * (steps.index(step) + 0.5), bottom + 32, text, BLUE, anchor="middle"))
    return _svg(parts, bottom + 40, "3. RMS_t by tensor and step, earliest on top: grey below 1.5, red from 2.3 on")


class _Frame:
    """Axes: steps to the right, a value upwards."""

    def __init__(
        self, steps: Sequence[int], values: Floats, *, height: int, log: bool = False, offset: int = 0
    ) -> None:
        finite = values[np.isfinite(values)]
        self.log, self.top, self.bottom = log, offset + TOP, offset + height - 30
        self.first, self.last = int(steps[0]), int(steps[-1])
        self.low, self.high = float(finite.min()), float(finite.max())

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        scale = np.log if self.log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return float(self.bottom - (self.bottom - self.top) * share)

    def line(self, steps: Sequence[int], values: Floats, color: str) -> str:
        points = " ".join(f"{self.x(s):.1f},{self.y(v):.1f}" for s, v in zip(steps, values, strict=True))
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'

    def band(self, first: int, last: int) -> str:
        return _box(self.x(first) - 3, self.top, self.x(last) - self.x(first) + 6, self.bottom - self.top, "#f6d5d1")

    def level(self, value: float, text: str, color: str) -> str:
        y = self.y(value)
        return _dashes(LEFT, y, WIDTH - RIGHT, y, color) + _text(WIDTH - RIGHT, y - 4, text, color, anchor="end")

    def mark(self, step: int, text: str, color: str) -> str:
        x = self.x(step)
        return _dashes(x, self.top, x, self.bottom, color) + _text(
            x - 5, self.top + 12, f"{text} (step {step})", color, anchor="end"
        )

    def label(self, text: str) -> str:
        return _text(6, self.top + 4, text, "#333")

    def ticks(self) -> list[str]:
        marks = [10.0**e * d for e in range(-3, 3) for d in (1, 3)] if self.log else [float(i) for i in range(0, 40, 2)]
        found = [
            _text(LEFT - 6, self.y(v) + 4, f"{v:g}", "#333", anchor="end") for v in marks if self.low <= v <= self.high
        ]
        every = max(1, round((self.last - self.first) / 8 / 5) * 5)
        steps = range(-(-self.first // every) * every, self.last + 1, every)
        return found + [_text(self.x(s), self.bottom + 16, str(s), "#333", anchor="middle") for s in steps]

    def close(self, parts: list[str], title: str) -> str:
        return _svg(parts, self.bottom + 26, title)


def _heat(rms: float) -> str:
    return "#ececec" if rms < 1.5 else "#f4c9a8" if rms < PAPER.rms else "#e07b54" if rms < 4 else "#a92b1f"


def _dashes(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-dasharray="5 4"/>'


def _box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inside = f"<title>{title}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{inside}</rect>'


def _text(x: float, y: float, text: str, color: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="12" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: list[str], height: float, title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">'
    back = f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
    heading = f'<text x="{LEFT}" y="18" font-size="14" fill="#222">{escape(title)}</text>'
    return "\n".join([head, back, heading, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    tyro.cli(main)
