"""Draw a plan: as a table, as text for the terminal, or as SVG."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal

from trimtab.schedule.plan import Moment, Plan

Form = Literal["table", "text", "svg"]
Over = Literal["steps", "tokens"]
_BLOCKS = " ▁▂▃▄▅▆▇█"
_CURVES: tuple[tuple[str, str, Callable[[Moment], float]], ...] = (
    ("learning rate", "#1f77b4", lambda moment: moment.lr),
    ("length", "#d62728", lambda moment: moment.length),
    ("batch", "#2ca02c", lambda moment: moment.batch),
)


def draw(plan: Plan, form: Form = "text", *, over: Over = "steps") -> str:
    """Learning rate, length and batch of a plan, over its steps or its tokens."""
    if over not in ("steps", "tokens"):
        raise ValueError(f"over={over!r} is not known; try 'steps' or 'tokens'")
    if form == "table":
        return _table(plan)
    if form == "text":
        return _text(plan, over)
    if form == "svg":
        return _svg(plan, over)
    raise ValueError(f"form={form!r} is not known; try 'table' or 'text' or 'svg'")


def _table(plan: Plan, rows: int = 16) -> str:
    head = ("step", "samples before", "tokens before", "length", "batch", "learning rate")
    last = len(plan.moments) - 1
    chosen = [plan.moments[i] for i in sorted({round(last * row / (rows - 1)) for row in range(rows)})]
    lines = [head, *((*(f"{value:,}" for value in moment[:-1]), f"{moment.lr:.4e}") for moment in chosen)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*table, _sums(plan)])


def _text(plan: Plan, over: Over, width: int = 64, height: int = 4) -> str:
    lines, end = [], getattr(plan, over)
    for name, _, value in _CURVES:
        values = [value(moment) for moment in _columns(plan, over, width)]
        top = max(values)
        if min(values) == top:
            lines.append(f"{name}: {_number(top)} throughout")
            continue
        lines.append(f"{name}: {_number(values[0])} at first, {_number(top)} at most, {_number(values[-1])} at last")
        lines += [f"  |{bar}|" for bar in _bars([v / top for v in values], height)]
    lines.append(f"   0{f'{end:,} {over}':>{width - 1}}")
    return "\n".join([*lines, _sums(plan)])


def _bars(parts: Sequence[float], height: int) -> list[str]:
    """Bars in eighths of a character, `height` lines; `parts` are in [0, 1]."""
    eighths = [round(part * height * 8) for part in parts]
    rows = ["".join(_BLOCKS[min(max(e - 8 * row, 0), 8)] for e in eighths) for row in range(height)]
    return rows[::-1]


def _svg(plan: Plan, over: Over, width: int = 720, panel: int = 130) -> str:
    end = getattr(plan, over)
    height = panel * len(_CURVES) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for k, (name, color, value) in enumerate(_CURVES):
        bottom = panel * (k + 1)
        top = max(value(moment) for moment in plan.moments) or 1.0
        points = " ".join(
            f"{80 + (width - 100) * _clock(moment, over) / end:.1f},{bottom - (panel - 30) * value(moment) / top:.1f}"
            for moment in plan.moments
        )
        parts += [
            f'<line x1="80" x2="{width - 20}" y1="{bottom}" y2="{bottom}" stroke="#999"/>',
            f'<text x="72" y="{bottom}" text-anchor="end">0</text>',
            f'<text x="72" y="{bottom - panel + 34}" text-anchor="end">{_number(top)}</text>',
            f'<text x="{width - 20}" y="{bottom - panel + 24}" text-anchor="end" fill="{color}">{name}</text>',
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>',
        ]
    parts.append(f'<text x="{width - 20}" y="{height - 14}" text-anchor="end">{end:,} {over}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _columns(plan: Plan, over: Over, width: int) -> list[Moment]:
    """The moment in progress at each of `width` equally spaced points of the run."""
    starts = [_clock(moment, over) for moment in plan.moments]
    times = (getattr(plan, over) * column / (width - 1) for column in range(width))
    return [plan.moments[max(bisect_right(starts, time) - 1, 0)] for time in times]


def _clock(moment: Moment, over: Over) -> int:
    return moment.step if over == "steps" else moment.tokens


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2e}"


def _sums(plan: Plan) -> str:
    counters = f"{plan.steps:,} steps, {plan.samples:,} samples, {plan.tokens:,} tokens"
    return f"{counters}; {plan.cut_off:.0%} of the tokens read are cut off"
