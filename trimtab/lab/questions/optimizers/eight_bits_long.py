"""Does 8-bit optimizer state stay as good as 32-bit state over a long run? Dettmers et al. 2022.

An error that a rounding makes at every step could add up over thousands of them. The paper trains for up to hundreds of
thousands of steps; here there are 10,000 at a small size, with two values of beta2, because a longer average of the
second moment is rounded more often before it is forgotten. Runs of a seed see the same batches, and all are evaluated
on the same text at the same steps.
"""

import math
from collections.abc import Iterator
from statistics import fmean

from trimtab.analysis.answers import Figure, Line, Panel
from trimtab.lab.questions.optimizers.eight_bits import OURS, PUBLISHED
from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, at_most, judge

SIZE, STEPS, LR = "1x64", 10_000, 1e-2
EVERY = STEPS // 20  # steps between two evaluations
BETAS = ("beta2 0.95", "beta2 0.999")
METHODS = {"32 bits": (), "published": (PUBLISHED,), "8 bits": (OURS,)}
ARMS = {
    f"{method}, {beta}": (beta.replace(" ", "="), *switches) for beta in BETAS for method, switches in METHODS.items()
}


def check(found: Evidence) -> Checks:
    for beta in BETAS:
        for method in ("published", "8 bits"):
            claim = f"{method}, {beta}: the loss is nowhere more than 1% above that with 32 bits"
            yield judge(claim, {"largest": _largest(found, method, beta)}, lambda x: x <= 0.01, note="a share")
            ends = {name: _end(found, name, beta) for name in ("32 bits", method)}
            yield judge(f"{method}, {beta}: the last loss is at most 0.5% higher", ends, at_most(1.005))


def _largest(found: Evidence, method: str, beta: str) -> float | None:
    """The largest relative difference of the mean losses, from the first evaluation on; infinite if a run stopped."""
    if any(found.curve(f"{name}, {beta}", SIZE) is None for name in (method, "32 bits")):
        return None
    if not all(math.isfinite(run.loss) for run in found.runs(f"32 bits, {beta}", SIZE)):
        return None
    if not all(math.isfinite(run.loss) for run in found.runs(f"{method}, {beta}", SIZE)):
        return math.inf
    return max((x for _, x in _differences(found, method, beta)), default=None)


def _end(found: Evidence, method: str, beta: str) -> float | None:
    curve = found.curve(f"{method}, {beta}", SIZE)
    return curve.best_loss if curve else None  # there is one learning rate


def _losses(found: Evidence, method: str, beta: str) -> dict[int, list[float]]:
    """Validation losses of the seeds by step, without that before the first step."""
    losses: dict[int, list[float]] = {}
    for run in found.runs(f"{method}, {beta}", SIZE):
        for step, loss in run.evaluations:
            if step:
                losses.setdefault(step, []).append(loss)
    return losses


def _differences(found: Evidence, method: str, beta: str) -> list[tuple[int, float]]:
    base, other = (_losses(found, name, beta) for name in ("32 bits", method))
    return [(step, fmean(other[step]) / fmean(base[step]) - 1) for step in sorted(base.keys() & other.keys())]


def figures(found: Evidence) -> Iterator[Figure]:
    yield Figure(
        name="losses",
        title=f"Validation loss over {STEPS:,} steps, mean and range over the seeds",
        x="step",
        y="validation loss",
        panels=[Panel(beta, [_line(found, method, beta) for method in METHODS]) for beta in BETAS],
        log_x=True,
    )
    panels = []
    for beta in BETAS:
        lines = []
        for method in ("published", "8 bits"):
            points = _differences(found, method, beta)
            lines.append(Line(method, [step for step, _ in points], [100 * x for _, x in points]))
        panels.append(Panel(beta, lines))
    yield Figure(
        name="differences", title="Difference from 32 bits, mean over the seeds", x="step", y="%", panels=panels
    )


def _line(found: Evidence, method: str, beta: str) -> Line:
    losses = sorted(_losses(found, method, beta).items())
    steps = [step for step, _ in losses]
    seeds = [values for _, values in losses]
    return Line(method, steps, [fmean(x) for x in seeds], [min(x) for x in seeds], [max(x) for x in seeds])


QUESTION = Question(
    "eight-bits-long",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=(LR,),
    steps=STEPS,
    always=STEADIED,
    paper="P2",
    fields={"eval_every": EVERY, "batch": 8},
    figures=figures,
    curves=False,
)
