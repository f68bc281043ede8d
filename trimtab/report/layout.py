"""What all charts share: the order of arms, sizes and learning rates, and the colour of each.

Sizes and learning rates are ordered, so each has one colour scale; arms are not, so each has a colour of its own. A
scale interpolates between a few anchors that colour-blind readers can distinguish, because their lightness is ordered.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trimtab.analysis.findings import Curve, Findings, Result
from trimtab.analysis.measure import run_fails
from trimtab.report.numbers import count, label, number, params

ARMS = 7  # colours of style.css
_RAMPS = {  # light page, dark page
    "size": (("#2fa08f", "#1f78a4", "#34358a", "#1d1440"), ("#5b83d6", "#41b8c4", "#9fe3b1", "#f4f7c5")),
    "lr": (("#bf8210", "#d65f1f", "#b52a5d", "#5b1a70"), ("#9a78e0", "#e2679a", "#fb9d5c", "#ffe27a")),
}
Figure = dict[str, Any]
Panel = tuple[str, str]  # study, arm
Legend = tuple[str, list[tuple[str, str, str]]]  # title; buttons that hide lines: key, text, colour


@dataclass(frozen=True)
class View:
    findings: Findings

    @cached_property
    def panels(self) -> list[Panel]:
        return list(dict.fromkeys((run.study, run.arm) for run in self.findings.results))

    @cached_property
    def sizes(self) -> list[str]:
        """From the smallest to the largest."""
        return sorted({run.size for run in self.findings.results}, key=lambda size: (self.params(size), size))

    @cached_property
    def lrs(self) -> list[float]:
        return sorted({x.lr for x in self.findings.results if x.lr > 0})

    @cached_property
    def grid(self) -> list[float]:
        """Without those that were added around the edge of stability."""
        return sorted({x.lr for x in self.findings.results if x.lr > 0 and not x.extra}) or self.lrs

    @cached_property
    def _params(self) -> dict[str, int]:
        return {run.size: run.params for run in self.findings.results if run.params}

    @cached_property
    def _curves(self) -> dict[tuple[str, str, str], Curve]:
        return {curve.key: curve for curve in self.findings.curves}

    def params(self, size: str) -> float:
        return self._params.get(size, math.inf)

    def curve(self, result: Result) -> Curve | None:
        return self._curves.get(result.key)

    def curves(self, panel: Panel) -> list[Curve]:
        """The curves of an arm, the smallest size first."""
        found = [curve for curve in self.findings.curves if (curve.study, curve.arm) == panel]
        return sorted(found, key=lambda curve: self.params(curve.size))

    def fails(self, result: Result) -> bool:
        """The run diverged, or stopped early."""
        curve = self.curve(result)
        return result.finished and (math.isinf(result.loss) or (curve is not None and run_fails(result, curve)))

    def results(self, panel: Panel) -> list[Result]:
        return [result for result in self.findings.results if (result.study, result.arm) == panel]

    def title(self, panel: Panel) -> str:
        """The arm, with its study if there are several."""
        several = len({study for study, _ in self.panels}) > 1
        return f"{panel[0]} · {panel[1]}" if several else panel[1]

    def switches(self, panel: Panel) -> str:
        found = (source.switches(panel[1]) for source in self.findings.studies if source.name == panel[0])
        return ", ".join(next(found, ()))

    def size_words(self, size: str) -> str:
        return f"{size} ({count(self._params[size])})" if size in self._params else size

    def arm_colour(self, panel: Panel) -> str:
        return f"--arm-{self.panels.index(panel) % ARMS}"

    def size_colour(self, size: str) -> str:
        return f"--size-{self.sizes.index(size)}"

    def lr_colour(self, lr: float) -> str:
        return f"--lr-{self.lrs.index(lr)}"

    def scales_css(self) -> str:
        """The colours of sizes and learning rates, as variables like those of style.css."""
        light, dark = ("".join(_variables(self, side)) for side in (0, 1))
        return f":root{{{light}}}@media screen and (prefers-color-scheme: dark){{:root:not([data-print]){{{dark}}}}}"

    def size_legend(self) -> Legend:
        return "Size", [(f"size {size}", self.size_words(size), self.size_colour(size)) for size in self.sizes]

    def arm_legend(self) -> Legend:
        return "Arm", [(f"arm {i}", self.title(p), self.arm_colour(p)) for i, p in enumerate(self.panels)]

    def lr_legend(self) -> Legend:
        return "Learning rate", [(f"lr {lr:g}", number(lr), self.lr_colour(lr)) for lr in self.lrs]


def run_words(result: Result) -> str:
    """The first lines of a run's hover text."""
    size = f"{label(result.size)} ({params(result.params)})" if result.params else label(result.size)
    lines = [f"<b>{label(result.name)}</b>", f"{size}, {label(result.arm)}, seed {result.seed}"]
    return "<br>".join([*lines, f"learning rate {number(result.lr)}"])


def sample(anchors: tuple[str, ...], share: float) -> str:
    """The colour at a share of the way from the first anchor to the last."""
    place = min(max(share, 0.0), 1.0) * (len(anchors) - 1)
    left = min(int(place), len(anchors) - 2)
    ends = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in anchors[left : left + 2])
    mix = [(1 - place + left) * a + (place - left) * b for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{round(part):02x}" for part in mix)


def _variables(view: View, side: int) -> Iterable[str]:
    for name, many in (("size", len(view.sizes)), ("lr", len(view.lrs))):
        for i in range(many):
            # Few colours are taken from inside the scale, not from its ends.
            share = (i + 0.35) / (many - 0.3) if many < 4 else i / (many - 1)
            yield f"--{name}-{i}:{sample(_RAMPS[name][side], share)};"
