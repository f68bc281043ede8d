"""What all charts share: the order of arms, sizes and learning rates, and the colour of each.

Sizes and learning rates are ordered, so each has one scale from its smallest to its largest; arms are not, so each has
a colour of its own. Scales are samples of a few anchors, chosen to be told apart by colour-blind readers (lightness
alone orders them), light and dark page apart.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trimtab.analysis.findings import Curve, Findings, Result
from trimtab.analysis.measure import run_fails
from trimtab.report.numbers import count, html, label, number

ARMS = 7  # colours of style.css
_RAMPS = {
    "size": (("#2fa08f", "#1f78a4", "#34358a", "#1d1440"), ("#5b83d6", "#41b8c4", "#9fe3b1", "#f4f7c5")),
    "lr": (("#bf8210", "#d65f1f", "#b52a5d", "#5b1a70"), ("#9a78e0", "#e2679a", "#fb9d5c", "#ffe27a")),
}
Figure = dict[str, Any]
Panel = tuple[str, str]  # study, arm


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
    def _params(self) -> dict[str, int]:
        return {run.size: run.params for run in self.findings.results if run.params}

    @cached_property
    def _curves(self) -> dict[tuple[str, str, str], Curve]:
        return {(curve.study, curve.arm, curve.size): curve for curve in self.findings.curves}

    def params(self, size: str) -> float:
        return self._params.get(size, math.inf)

    def curve(self, result: Result) -> Curve | None:
        return self._curves.get((result.study, result.arm, result.size))

    def fails(self, result: Result) -> bool:
        """It lost what training had gained, or broke off."""
        curve = self.curve(result)
        return result.finished and (math.isinf(result.loss) or (curve is not None and run_fails(result, curve)))

    def results(self, panel: Panel) -> list[Result]:
        return [result for result in self.findings.results if (result.study, result.arm) == panel]

    def title(self, panel: Panel) -> str:
        """The arm, with its study where there are several."""
        several = len({study for study, _ in self.panels}) > 1
        return f"{panel[0]} · {panel[1]}" if several else panel[1]

    def switches(self, panel: Panel) -> list[str]:
        """What the arm changes, if its study says so. study.json may hold anything by now."""
        for source in self.findings.studies:
            arms = source.data.get("arms") if source.name == panel[0] else None
            for arm in arms if isinstance(arms, list) else []:
                if isinstance(arm, dict) and arm.get("name") == panel[1] and isinstance(arm.get("switches"), list):
                    return [str(switch) for switch in arm["switches"]]
        return []

    def size_words(self, size: str) -> str:
        params = self._params.get(size)
        return f"{size} ({count(params)})" if params else size

    def arm_colour(self, panel: Panel) -> str:
        return f"--arm-{self.panels.index(panel) % ARMS}"

    def size_colour(self, size: str) -> str:
        return f"--size-{self.sizes.index(size)}"

    def lr_colour(self, lr: float) -> str:
        return f"--lr-{self.lrs.index(lr)}"

    def scales_css(self) -> str:
        """The colours of sizes and learning rates, as variables beside those of style.css."""
        light, dark = ("".join(_variables(self, side)) for side in (0, 1))
        dark_only = "@media screen and (prefers-color-scheme: dark)"
        return f":root{{{light}}}{dark_only}{{:root:not([data-print]){{{dark}}}}}"

    def size_legend(self) -> str:
        return _legend("Size", [(f"size {size}", self.size_words(size), self.size_colour(size)) for size in self.sizes])

    def arm_legend(self) -> str:
        items = [(f"arm {i}", self.title(panel), self.arm_colour(panel)) for i, panel in enumerate(self.panels)]
        return _legend("Arm", items)

    def lr_legend(self) -> str:
        return _legend("Learning rate", [(f"lr {lr:g}", number(lr), self.lr_colour(lr)) for lr in self.lrs])


def run_words(result: Result) -> str:
    """What hovering over a run shows first: its name and where it stands in the grid."""
    params = f" ({count(result.params)} parameters)" if result.params else ""
    lines = [f"<b>{label(result.name)}</b>", f"{label(result.size)}{params}, {label(result.arm)}, seed {result.seed}"]
    return "<br>".join([*lines, f"learning rate {number(result.lr)}"])


def sample(anchors: tuple[str, ...], share: float) -> str:
    """The colour at a share of the way from the first anchor to the last."""
    place = min(max(share, 0.0), 1.0) * (len(anchors) - 1)
    left = min(int(place), len(anchors) - 2)
    mix = [
        (1 - place + left) * a + (place - left) * b for a, b in zip(*map(_rgb, anchors[left : left + 2]), strict=True)
    ]
    return "#" + "".join(f"{round(part):02x}" for part in mix)


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _variables(view: View, side: int) -> Iterable[str]:
    for name, many in (("size", len(view.sizes)), ("lr", len(view.lrs))):
        for i in range(many):
            # Two of a kind are the middle of the scale's halves, not its ends.
            share = (i + 0.35) / (many - 0.3) if many < 4 else i / (many - 1)
            yield f"--{name}-{i}:{sample(_RAMPS[name][side], share)};"


def _legend(title: str, items: list[tuple[str, str, str]]) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-key="{html(key)}" style="--c:var({colour})">'
        f"<i></i>{html(words)}</button>"
        for key, words, colour in items
    )
    return f'<div class="legend" role="group" aria-label="{title}: show or hide"><span>{title}</span>{buttons}</div>'
