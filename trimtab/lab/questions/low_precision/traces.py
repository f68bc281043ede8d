"""Lines over the steps of runs: means over seeds, for figures of questions."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from trimtab.analysis.answers import Line, Panel
from trimtab.analysis.findings import Points, Result
from trimtab.lab.questions.question import Evidence

PARTS = 40  # of a run: the training loss is the mean of each


def loss_panels(found: Evidence, arms: Iterable[str], *, size: str, lrs: Sequence[float]) -> list[Panel]:
    """Training loss by step: a panel per learning rate, a line per arm with the range over seeds."""
    return [
        Panel(f"learning rate {lr:g}", [loss_line(arm, runs) for arm in arms if (runs := found.runs(arm, size, lr))])
        for lr in lrs
    ]


def loss_line(name: str, runs: Sequence[Result]) -> Line:
    planned = max(run.planned or run.steps for run in runs)
    by_seed = [_parts(run.losses, planned) for run in runs]
    means = [[values[i] for values in by_seed if math.isfinite(values[i])] for i in range(PARTS)]
    steps = [round((i + 0.5) * planned / PARTS) for i in range(PARTS)]
    return Line(
        name,
        steps,
        [fmean(values) if values else None for values in means],
        [min(values, default=None) for values in means],
        [max(values, default=None) for values in means],
    )


def _parts(losses: Points, planned: int) -> list[float]:
    """Mean loss of each part; NaN where there is none."""
    found: list[list[float]] = [[] for _ in range(PARTS)]
    for step, loss in losses:
        if math.isfinite(loss) and step:
            found[min((step - 1) * PARTS // max(planned, 1), PARTS - 1)].append(loss)
    return [fmean(values) if values else math.nan for values in found]
