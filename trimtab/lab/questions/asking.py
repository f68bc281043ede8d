"""What every question is made of: a study that can answer it, and checks of what its runs say.

    ask(...)      a study of the lab's GPT: arms by name, sizes, learning rates
    Seen          its curves and runs among the findings, by arm and size; None where the runs do not suffice
    judge(...)    a claim, the numbers it rests on, and the rule it passes by

A check is True, False, or None: not enough runs. None is never a pass.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from trimtab.analysis.findings import Curve, Findings, Points, Result
from trimtab.lab.sizes import parse_size
from trimtab.lab.study import LRS, Arm, Study
from trimtab.lab.subjects import open_subject, with_steps

STEADIED = ("qk-norm", "z-loss")  # what the paper has on where it does not study them
XS, S, M, L = "2x16", "2x32", "3x64", "4x128"


@dataclass(frozen=True)
class Check:
    claim: str
    passed: bool | None  # None: the runs do not suffice to say
    evidence: str


def ask(
    name: str,
    question: str,
    *,
    arms: Mapping[str, Sequence[str]],
    sizes: Sequence[str] = (M,),
    lrs: Sequence[float] = LRS,
    seeds: int = 2,
    steps: int = 500,
    always: Sequence[str] = (),
) -> Study:
    """A study of the lab's GPT. `always` are switches that every arm begins with."""
    return Study(
        name=name,
        question=question,
        subject="gpt-lab",
        base=with_steps(open_subject("gpt-lab"), steps),
        sizes=tuple(parse_size(size) for size in sizes),
        lrs=tuple(lrs),
        arms=tuple(Arm(arm, (*always, *switches)) for arm, switches in arms.items()),
        seeds=tuple(range(seeds)),
    )


@dataclass(frozen=True)
class Seen:
    """The part of the findings that belongs to one study."""

    findings: Findings
    study: str

    def curve(self, arm: str, size: str = M) -> Curve | None:
        """A curve with every learning rate that was planned."""
        found = [c for c in self.findings.curves if (c.study, c.arm, c.size) == (self.study, arm, size)]
        return found[0] if found and not found[0].missing else None

    def runs(self, arm: str, size: str = M, lr: float | None = None) -> list[Result]:
        wanted = (self.study, arm, size)
        runs = [r for r in self.findings.results if (r.study, r.arm, r.size) == wanted and r.finished]
        return [r for r in runs if lr is None or math.isclose(r.lr, lr)]

    def sensitivity(self, arm: str, size: str = M) -> float | None:
        curve = self.curve(arm, size)
        return known(curve.sensitivity) if curve else None

    def best(self, arm: str, size: str = M) -> float | None:
        curve = self.curve(arm, size)
        return known(curve.best_loss) if curve else None

    def best_lr(self, arm: str, size: str = M) -> float | None:
        curve = self.curve(arm, size)
        return curve.best_lr if curve else None

    def loss(self, arm: str, size: str, lr: float) -> float | None:
        """Mean over seeds; never worse than before training."""
        return mean([run.score for run in self.runs(arm, size, lr)])

    def noise(self, arm: str, size: str = M) -> float:
        """How far the seeds are apart at the best learning rate."""
        curve = self.curve(arm, size)
        at = curve.lrs.index(curve.best_lr) if curve else 0
        return curve.high[at] - curve.low[at] if curve else math.nan


def judge(claim: str, values: Mapping[str, float | None], rule: Callable[..., bool], *, note: str = "") -> Check:
    """Check a rule on numbers, which it is given in their order."""
    missing = [name for name, value in values.items() if value is None]
    if missing or not values:
        return Check(claim, None, "not enough finished runs" + (f": {', '.join(missing)}" if missing else ""))
    evidence = ", ".join(f"{name}: {value:.4g}" for name, value in values.items())
    return Check(claim, bool(rule(*values.values())), evidence + (f" ({note})" if note else ""))


def within(share: float) -> Callable[..., bool]:
    """Whether the largest is at most this share above the smallest."""
    return lambda *values: max(values) <= (1 + share) * min(values)


def known(x: float) -> float | None:
    return x if math.isfinite(x) else None


def mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def growth(points: Points) -> float | None:
    """How many times the first value the largest is."""
    values = [value for _, value in points if math.isfinite(value) and value > 0]
    return max(values) / values[0] if len(values) > 1 else None


def grid_steps(lr: float, other: float, lrs: Sequence[float] = LRS) -> int:
    """How many points of the grid the other is to the right."""
    places = sorted({*lrs, lr, other})
    return places.index(other) - places.index(lr)
