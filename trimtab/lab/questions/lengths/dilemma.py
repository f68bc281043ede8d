"""Does training become less stable as the learning rate and the batch grow, and does Adam's variance show it? Li et al.
2022, section 3: GPT-2 117M and 1.5B on the same tokens; more steps have a loss ratio above 1.2, and the loss ratio
correlates with the sum and the maximum of √v (r about 0.2, p near 0), which are highest near the learning rate's peak.

Here 8x32 on 1.0 million tokens, the batch and the steps exchanged. Steps of one run are not independent, so p is too
small. The noise of a small batch is high: a step counts above 1.2 times the noise of its arm (unstable.py). β₂ is
0.95: it forgets within the learning-rate warmup, as 0.999 does within the paper's 3,000 steps; 0.999 is a third arm.
"""

from collections.abc import Iterable
from functools import partial
from statistics import median

from trimtab.analysis.answers import Cell, Figure, Line, Panel, Table
from trimtab.analysis.one_run import VARIANCE, Analysis
from trimtab.lab.questions.lengths.unstable import (
    ALWAYS,
    FIELDS,
    SIZE,
    SOME,
    STEPS,
    above_noise,
    average,
    floor,
    over_floor,
    ratio_line,
    ratio_table,
    unstable,
)
from trimtab.lab.questions.question import Checks, Evidence, Question, Values, judge

SMALL, LARGE, SLOW = "batch 16", "batch 64", "batch 64, beta2 0.999"
ARMS = {SMALL: ("batch=16",), LARGE: (), SLOW: ("beta2=0.999",)}
LRS = (0.03, 0.1, 0.3, 1.0)
NEAR = 0.5  # of the step at which the learning rate is highest
CERTAIN = 0.01


def check(found: Evidence) -> Checks:
    floors = {arm: floor(found, arm, LRS[0]) for arm in (SMALL, LARGE)}
    beside = "noise at the lowest rate: " + ", ".join(f"{arm} {x:.3g}" for arm, x in floors.items() if x)
    for claim, number, least in (
        ("the share of unstable steps", unstable, SOME),
        ("the largest loss ratio over the noise", above_noise, 0.0),
    ):
        by_rate = {f"{lr:g}": over_floor(found, LARGE, number, lr, LRS[0]) for lr in LRS}
        reaches = f", to at least {least:g}%" if least else ""
        yield judge(f"{claim} grows with the learning rate{reaches}", by_rate, partial(_grows, least), note=beside)
        by_batch = {arm: over_floor(found, arm, number, LRS[-1], LRS[0]) for arm in (SMALL, LARGE)}
        yield judge(f"{claim} grows with the batch, at {LRS[-1]:g}{reaches}", by_batch, partial(_grows, least))
    claim = (
        f"the loss ratio correlates with the sum or the maximum of √v (r above 0, p below {CERTAIN}; median of seeds)"
    )
    yield judge(claim, _pearson(found), lambda r1, p1, r2, p2: (r1 > 0 and p1 < CERTAIN) or (r2 > 0 and p2 < CERTAIN))
    peaks: Values = {"learning rate": average(found, LARGE, lambda run: run.lr_peak or 0, LRS[-1])}
    peaks |= {name: average(found, LARGE, partial(_peak, name), LRS[-1]) for name in VARIANCE}
    claim = f"sum and maximum of √v are highest within {NEAR:.0%} of the step at which the learning rate is"
    yield judge(claim, peaks, lambda lr, *others: all(abs(x - lr) <= NEAR * lr for x in others))


def _grows(least: float, first: float, *others: float) -> bool:
    return others[-1] > first and others[-1] >= least


def _peak(name: str, run: Analysis) -> float:
    return float(run.variance[name].peak) if name in run.variance else float("nan")


def _pearson(found: Evidence) -> Values:
    """Median r and p over the seeds, at the highest learning rate."""
    runs = found.analyses(LARGE, SIZE, LRS[-1]) if found.curve(LARGE, SIZE) else []
    known = [run.correlations for run in runs if set(VARIANCE) <= set(run.correlations)]
    values: Values = {}
    for name in VARIANCE:
        values[f"r of {name}"] = median(x[name].r for x in known) if known else None
        values[f"p of {name}"] = median(x[name].p for x in known) if known else None
    return values


def figures(found: Evidence) -> Iterable[Figure]:
    yield Figure(
        name="ratio",
        title="Loss ratio, first seed",
        x="step",
        y="loss / best loss before",
        panels=[
            Panel(arm, [ratio_line(f"lr {lr:g}", run) for lr in LRS for run in found.analyses(arm, SIZE, lr)[:1]])
            for arm in (SMALL, LARGE)
        ],
        log_y=True,
    )
    for name in VARIANCE:
        lines = [
            Line(f"lr {lr:g}", run.variance[name].steps.tolist(), run.variance[name].values.tolist())
            for lr in LRS
            for run in found.analyses(LARGE, SIZE, lr)[:1]
            if name in run.variance
        ]
        title = f"{'Sum' if name == 'var_l1' else 'Maximum'} of √v, first seed"
        yield Figure(name=name, title=title, x="step", y=name, panels=[Panel(LARGE, lines)], log_y=True)


def tables(found: Evidence) -> Iterable[Table]:
    yield ratio_table(found, [(arm, lr) for arm in ARMS for lr in LRS])
    rows: list[tuple[Cell, ...]] = [
        (arm, lr, *(x for name in VARIANCE for x in (run.correlations[name].r, run.correlations[name].p)))
        for arm in ARMS
        for lr in LRS
        for run in found.analyses(arm, SIZE, lr)
        if set(VARIANCE) <= set(run.correlations)
    ]
    columns = ("arm", "lr", *(f"{letter} of {name}" for name in VARIANCE for letter in "rp"))
    yield Table("Correlation of the loss ratio with √v, a row per run", columns, rows)


QUESTION = Question(
    "dilemma",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=LRS,
    steps=STEPS,
    paper="P4",
    always=ALWAYS,
    fields=FIELDS | {"schedule.lr.floor": LRS[0] / 15},
    figures=figures,
    tables=tables,
)
