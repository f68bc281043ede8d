"""The pages of docs/results, from the answers alone: an overall table, and one page per paper with figures.

    write_results(answers, folder)      folder/README.md, p1.md ... p4.md, figures/NAME.svg

Figures are drawn from the curves of the answers; no number is typed.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from trimtab.analysis.answers import Answer, Verdict
from trimtab.report.numbers import number

PAPERS = {
    "P1": "Stable and low-precision training for large-scale vision-language models (Wortsman et al. 2023a)",
    "P2": "8-bit optimizers via block-wise quantization (Dettmers et al. 2022)",
    "P3": "Small-scale proxies for large-scale Transformer training instabilities (Wortsman et al. 2023b)",
    "P4": "The stability-efficiency dilemma (Li et al. 2022)",
}
RULE = (
    "A question is **reproduced** if every claim of its file in `trimtab/lab/questions/` holds, **partly** if the "
    "first claim or at least half of them hold, **not** otherwise. The rules were there before the runs."
)
_COLOURS = ("#1b6ca8", "#c2410c", "#15803d", "#7c3aed", "#b91c1c", "#0f766e", "#a16207", "#475569")
_PANEL, _GAP, _HEIGHT, _LEFT, _TOP = 250, 40, 170, 44, 34


def write_results(answers: Sequence[Answer], folder: Path) -> list[Path]:
    """Write all pages; returns their paths, the overall table first."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    written = [_write(folder / "README.md", _overview(answers))]
    for paper, title in PAPERS.items():
        mine = [answer for answer in answers if answer.paper == paper]
        if mine:
            written.append(_write(folder / f"{paper.lower()}.md", _page(paper, title, mine)))
        for answer in mine:
            if answer.curves:
                written.append(_write(folder / "figures" / f"{answer.name}.svg", draw(answer)))
    return written


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _overview(answers: Sequence[Answer]) -> str:
    verdicts: list[Verdict] = ["reproduced", "partly", "not", "no answer"]
    counts = {verdict: sum(answer.verdict == verdict for answer in answers) for verdict in verdicts}
    found = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    lines = [
        "# The papers, reproduced small",
        "",
        f"Of {len(answers)} questions: {found}. Models of a few thousand to a million parameters, on a CPU. "
        "`trimtab reproduce` runs all of them and writes these pages; `trimtab reproduce NAME` one.",
        "",
        RULE,
        "",
        "| paper | question | answer | claims that hold |",
        "|---|---|---|---|",
    ]
    for answer in answers:
        held = sum(bool(check.passed) for check in answer.checks)
        link = f"[{answer.question}]({answer.paper.lower()}.md#{answer.name})"
        lines.append(f"| {answer.paper} | {link} | {answer.verdict} | {held} of {len(answer.checks)} |")
    lines += ["", *(f"{paper}: {title}." for paper, title in PAPERS.items())]
    return "\n".join(lines) + "\n"


def _page(paper: str, title: str, answers: Sequence[Answer]) -> str:
    lines = [f"# {paper}: {title}", "", RULE, ""]
    for answer in answers:
        lines += _section(answer)
    return "\n".join(lines)


def _section(answer: Answer) -> list[str]:
    design = answer.design
    lines = [f"## {answer.name}", "", f"**{answer.question}** {answer.about}", "", f"Answer: **{answer.verdict}**.", ""]
    lines += ["| claim | holds | numbers |", "|---|---|---|"]
    marks = {True: "yes", False: "no", None: "not enough runs"}
    lines += [f"| {check.claim} | {marks[check.passed]} | {_cell(check.evidence)} |" for check in answer.checks]
    if answer.curves:
        lines += ["", f"![Loss against the learning rate](figures/{answer.name}.svg)"]
    if design:
        arms = "; ".join(f"{arm}: {', '.join(switches) or 'as it is'}" for arm, switches in design["arms"].items())
        lrs, sizes = ", ".join(number(lr) for lr in design["lrs"]), ", ".join(design["sizes"])
        lines += [
            "",
            f"`{answer.command}`: {design['runs']} runs of {design['steps']} steps, sizes {sizes}, {design['seeds']} "
            f"seeds, learning rates {lrs}. Arms: {arms}. {answer.minutes:.0f} min on {answer.machine}, {answer.date}.",
        ]
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- Figures


def draw(answer: Answer) -> str:
    """Loss against the learning rate: a panel per size, a line per arm, with the range over seeds."""
    sizes = list(dict.fromkeys(str(curve["size"]) for curve in answer.curves))
    arms = list(dict.fromkeys(str(curve["arm"]) for curve in answer.curves))
    colours = {arm: _COLOURS[i % len(_COLOURS)] for i, arm in enumerate(arms)}
    losses = [x for curve in answer.curves for x in curve["loss"] if x is not None]
    lrs = [x for curve in answer.curves for x in curve["lrs"]]
    if not losses:
        return _svg([], 200, 40, "no finished runs")
    axes = _Axes(min(lrs), max(lrs), min(losses), max(losses))
    parts: list[str] = []
    for i, size in enumerate(sizes):
        left = _LEFT + i * (_PANEL + _GAP)
        parts += axes.frame(left, size)
        for curve in answer.curves:
            if str(curve["size"]) == size:
                parts += axes.line(left, curve, colours[str(curve["arm"])])
    width = _LEFT + len(sizes) * (_PANEL + _GAP)
    bottom = _TOP + _HEIGHT + 38
    for i, arm in enumerate(arms):
        y = bottom + 16 * i
        parts.append(f'<rect x="{_LEFT}" y="{y - 8}" width="12" height="8" fill="{colours[arm]}"/>')
        parts.append(f'<text x="{_LEFT + 18}" y="{y}" font-size="11">{escape(arm)}</text>')
    return _svg(
        parts, max(width, 360), bottom + 16 * len(arms), f"{answer.name}: validation loss against the learning rate"
    )


class _Axes:
    """Learning rates on a logarithmic axis, losses on a linear one, the same in every panel."""

    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self.first, self.span = math.log10(first), max(math.log10(last / first), 1e-9)
        self.low, self.height = low, max(high - low, 1e-9)

    def x(self, left: float, lr: float) -> float:
        return left + _PANEL * (math.log10(lr) - self.first) / self.span

    def y(self, loss: float) -> float:
        return _TOP + _HEIGHT * (1 - (loss - self.low) / self.height)

    def frame(self, left: float, title: str) -> list[str]:
        parts = [f'<rect x="{left}" y="{_TOP}" width="{_PANEL}" height="{_HEIGHT}" fill="none" stroke="#94a3b8"/>']
        parts.append(f'<text x="{left + 4}" y="{_TOP + 13}" font-size="11" fill="#475569">{escape(title)}</text>')
        for power in range(math.ceil(self.first - 1e-9), math.floor(self.first + self.span + 1e-9) + 1):
            x = self.x(left, 10.0**power)
            parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _HEIGHT}" stroke="#e2e8f0"/>')
            parts.append(_text(x, _TOP + _HEIGHT + 14, number(10.0**power), "middle"))
        for share in (0.0, 0.5, 1.0):
            loss = self.low + share * self.height
            parts.append(_text(left - 4, self.y(loss) + 4, f"{loss:.2f}", "end"))
        return parts

    def line(self, left: float, curve: Mapping[str, Any], colour: str) -> list[str]:
        rows = zip(curve["lrs"], curve["loss"], curve["low"], curve["high"], strict=True)
        points, parts = list[str](), list[str]()
        for lr, loss, low, high in rows:
            if loss is None:
                continue
            x = self.x(left, lr)
            points.append(f"{x:.1f},{self.y(loss):.1f}")
            parts.append(f'<circle cx="{x:.1f}" cy="{self.y(loss):.1f}" r="2.5" fill="{colour}"/>')
            if low is not None and high is not None:
                top, base = self.y(min(high, self.low + self.height)), self.y(max(low, self.low))
                parts.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{base:.1f}" stroke="{colour}"/>')
        return [f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>', *parts]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="10" text-anchor="{anchor}" fill="#475569">{escape(text)}</text>'


def _svg(parts: Sequence[str], width: float, height: float, title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">'
    back = f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>'
    heading = f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}</text>'
    return "\n".join([head, back, heading, *parts, "</svg>"]) + "\n"
