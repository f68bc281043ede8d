"""What a question of the papers consists of: runs or measurements that can answer it, and checks of them.

    Question      a study of many runs: name, text, grid, and a function that checks its findings
    Measurement   no grid: a function that measures, and one that checks its numbers
    Evidence      the curves and runs of a study; None if the runs do not suffice
    judge(...)    a claim, the numbers for it, and the rule that decides

A check is True, False, or None if there are not enough runs; None never passes. The first check is the main claim: a
question is reproduced if all checks pass, and partly if the first or at least half of them do (analysis/answers.py).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from trimtab.analysis.answers import Check, Figure, Paper, Table
from trimtab.analysis.findings import Curve, Findings, Points, Result, Status
from trimtab.analysis.one_run import Analysis, analyze
from trimtab.lab.sizes import Size, parse_size
from trimtab.lab.study import LRS, Arm, Study
from trimtab.lab.subjects import study_base
from trimtab.runs.reader import Run, read_run
from trimtab.train.config import with_values
from trimtab.train.evaluate import zero_shot
from trimtab.train.last_word import LastWords, last_words
from trimtab.train.zero_shot import ZeroShot

STEADIED = ("qk-norm", "z-loss")  # the paper's default, except in the questions about them
XS, S, M, L = "2x16", "2x32", "3x64", "4x128"
Values = dict[str, float | None]
Numbers = Mapping[str, Any]  # of a measurement, as JSON

Checks = Iterator[Check]


@dataclass(frozen=True)
class Asked:
    """What a study and a measurement have in common."""

    name: str
    doc: str | None  # begins with the question

    @property
    def text(self) -> str:
        return " ".join((self.doc or "").partition("?")[0].split()) + "?"

    @property
    def about(self) -> str:
        """What the paper found, and where; paragraphs of one line each."""
        paragraphs = (self.doc or "").partition("?")[2].split("\n\n")
        return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


@dataclass(frozen=True)
class Question(Asked):
    """A study of one of the lab's models, and the checks of its findings."""

    arms: Mapping[str, Sequence[str]]
    check: "Callable[[Evidence], Checks]"
    sizes: Sequence[str | Size] = (M,)
    lrs: Sequence[float] = LRS
    seeds: int = 3
    first_seed: int = 0  # a second design that an arm of the first one suggested has others
    steps: int = 500
    always: Sequence[str] = ()  # switches that every arm begins with
    paper: Paper = "P3"
    subject: str = "gpt-lab"
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the subject's config that differ, by dotted name
    figures: "Callable[[Evidence], Iterable[Figure]] | None" = None  # besides the loss against the learning rate
    tables: "Callable[[Evidence], Iterable[Table]] | None" = None
    curves: bool = True  # show the loss against the learning rate; of few rates and many arms it says nothing
    second: bool = False  # the second design; docs/log.md has the first
    measured: float | None = None  # minutes on two cores, where they cannot be estimated well

    @property
    def minutes(self) -> float:
        return self.measured or self.study().minutes or 0.0

    def study(self) -> Study:
        return Study(
            name=self.name,
            question=self.text,
            subject=self.subject,
            base=with_values(study_base(self.subject, self.steps), self.fields),
            sizes=tuple(parse_size(size) if isinstance(size, str) else size for size in self.sizes),
            lrs=tuple(self.lrs),
            arms=tuple(Arm(arm, (*self.always, *switches)) for arm, switches in self.arms.items()),
            seeds=tuple(range(self.first_seed, self.first_seed + self.seeds)),
        )

    def evidence(self, findings: Findings, **readers: Any) -> "Evidence":
        """The readers of run folders are those of Evidence."""
        return Evidence(findings, self.name, seeds=self.seeds, **readers)

    def answer(self, findings: Findings, **readers: Any) -> list[Check]:
        return list(self.check(self.evidence(findings, **readers)))


@dataclass(frozen=True)
class Measurement(Asked):
    """A function that measures into a folder, and the checks of its numbers."""

    measure: Callable[[Path], Numbers]  # continues what the folder has; the numbers are JSON
    check: Callable[[Numbers], Checks]
    minutes: float
    paper: Paper
    design: str  # what is measured, in a sentence
    figures: Callable[[Numbers], Iterable[Figure]] | None = None
    tables: Callable[[Numbers], Iterable[Table]] | None = None
    second: bool = False  # as of a Question

    def answer(self, numbers: Numbers) -> list[Check]:
        return list(self.check(numbers))


@dataclass(frozen=True)
class Evidence:
    """The findings of one study."""

    findings: Findings
    study: str
    analysis: Callable[[Path], Analysis] = analyze  # of one run: spikes, lead times, correlations
    # Of one run: the loss and the signals of every step. Of one CLIP: accuracy on concepts that it never saw. Claims,
    # tables and figures read the same runs, so each is read once.
    log: Callable[[Path], Run] = field(default_factory=lambda: cache(read_run))
    classify: Callable[[Path], ZeroShot] = field(default_factory=lambda: cache(zero_shot))
    words: Callable[[Path], LastWords] = last_words  # of one GPT: the last words of passages
    seeds: int = 1  # that were planned

    def analyses(self, arm: str, size: str = M, lr: float | None = None) -> list[Analysis]:
        """Of the finished runs."""
        return [self.analysis(run.folder) for run in self.runs(arm, size, lr)]

    def logs(self, arm: str, size: str = M, lr: float | None = None) -> list[Run]:
        """Of the finished runs."""
        return [self.log(run.folder) for run in self.runs(arm, size, lr)]

    def zero_shot(self, arm: str, size: str = M, lr: float | None = None) -> list[ZeroShot]:
        """Of the runs that reached their last step."""
        return [self.classify(run.folder) for run in self.runs(arm, size, lr) if run.status == Status.DONE]

    def last_words(self, arm: str, size: str = M, lr: float | None = None) -> list[LastWords]:
        """Of the runs that reached their last step."""
        return [self.words(run.folder) for run in self.runs(arm, size, lr) if run.status == Status.DONE]

    def curve(self, arm: str, size: str = M) -> Curve | None:
        """A curve for which all planned learning rates were run, with all seeds."""
        found = [c for c in self.findings.curves if (c.study, c.arm, c.size) == (self.study, arm, size)]
        complete = found and not found[0].missing and min(found[0].seeds, default=0) >= self.seeds
        return found[0] if complete else None

    def runs(self, arm: str, size: str = M, lr: float | None = None) -> list[Result]:
        """The finished runs."""
        place = (self.study, arm, size)
        runs = [r for r in self.findings.results if (r.study, r.arm, r.size) == place and r.finished]
        return [r for r in runs if lr is None or math.isclose(r.lr, lr)]

    def sensitivity(self, *arms: str, size: str = M) -> Values:
        """Learning-rate sensitivity by arm."""
        return {arm: known(curve.sensitivity) if (curve := self.curve(arm, size)) else None for arm in arms}

    def best(self, *arms: str, size: str = M) -> Values:
        """Loss at the best learning rate, by arm."""
        return {arm: known(curve.best_loss) if (curve := self.curve(arm, size)) else None for arm in arms}

    def best_lr(self, arm: str, size: str = M) -> float | None:
        curve = self.curve(arm, size)
        return curve.best_lr if curve else None

    def noise(self, arm: str, size: str = M) -> float:
        """Difference between the seeds at the best learning rate."""
        curve = self.curve(arm, size)
        at = curve.lrs.index(curve.best_lr) if curve else 0
        return curve.high[at] - curve.low[at] if curve else math.nan


def judge(claim: str, values: Mapping[str, float | None], rule: Callable[..., bool], *, note: str = "") -> Check:
    """Apply a rule to numbers, in their order."""
    missing = [name for name, value in values.items() if value is None]
    if missing or not values:
        return Check(claim, None, "not enough finished runs" + (f": {', '.join(missing)}" if missing else ""))
    evidence = ", ".join(f"{name}: {_four_digits(value)}" for name, value in values.items() if value is not None)
    return Check(claim, bool(rule(*values.values())), evidence + (f" ({note})" if note else ""))


def _four_digits(value: float) -> str:
    """Without a power of ten for the sizes that people read as numbers."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


# --- Rules


def within(share: float) -> Callable[..., bool]:
    """The largest is at most this share above the smallest."""
    return lambda *values: max(values) <= (1 + share) * min(values)


def at_most(factor: float) -> Callable[[float, float], bool]:
    """The second is at most this factor times the first."""
    return lambda a, b: b <= factor * a


def falls(*values: float) -> bool:
    return all(a > b for a, b in pairwise(values))


# --- Numbers


def known(x: float) -> float | None:
    return x if math.isfinite(x) else None


def mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def largest(points: Points) -> float:
    return max((value for _, value in points), default=math.nan)


def growth(points: Points) -> float:
    """The largest value relative to the first."""
    values = [value for _, value in points if math.isfinite(value) and value > 0]
    return max(values) / values[0] if len(values) > 1 else math.nan
