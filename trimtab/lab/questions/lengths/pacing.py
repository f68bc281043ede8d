"""Which pacing of the lengths is best? Li et al. 2022, section 4: a root in place of linear growth is no better and has
one more parameter, and two stages, as in Shortformer (Press et al. 2021), risk divergence at the switch.

Here 8x32 at learning rate 0.3, from 8 to 64 tokens within 30 % of the steps: linear, root, two stages, discrete (each
length twice the last) and mixed (a random length at each step). A spike is a loss ratio above 1.2 times the mean of the
10 steps before the switch, in the 10 after it.

After the runs: the seeds of one arm differ by more than the 2 % of these claims, 3 % with linear growth and 8 % with
mixed, so the runs only show that no pacing is much better.
"""

from collections.abc import Iterable

import numpy as np

from trimtab.analysis.answers import Figure, Panel, Table
from trimtab.analysis.one_run import Analysis
from trimtab.lab.questions.lengths.unstable import (
    ALWAYS,
    FIELDS,
    LIMIT,
    MOST,
    SIZE,
    STEEP,
    STEPS,
    average,
    ratio_line,
    ratio_table,
)
from trimtab.lab.questions.question import Checks, Evidence, Question, judge, within

KINDS = ("linear", "root", "two-stage", "discrete", "mixed")
ARMS = {kind: (f"seqlen-warmup=0.3:{kind}",) for kind in KINDS}
SWITCH = round(0.3 * STEPS)  # the last step of the first stage
AROUND = 10


def check(found: Evidence) -> Checks:
    losses = found.best(*KINDS, size=SIZE)
    yield judge(
        "linear and root differ by at most 2%", {kind: losses[kind] for kind in ("linear", "root")}, within(0.02)
    )
    jumps = {kind: average(found, kind, jump, STEEP) for kind in ("linear", "two-stage")}
    claim = f"two stages have a spike at the switch, and linear growth does not (limit {LIMIT})"
    yield judge(claim, jumps, lambda linear, stages: stages > LIMIT >= linear)
    claim = "no pacing is more than 2% better than linear"
    yield judge(claim, losses, lambda linear, *others: linear <= 1.02 * min(others))


def jump(run: Analysis) -> float:
    """The highest loss after the switch over the mean before it."""
    ratios = np.minimum(run.ratios.ratios, MOST)
    before, after = ratios[max(SWITCH - AROUND, 0) : SWITCH], ratios[SWITCH : SWITCH + AROUND]
    return float(after.max() / before.mean()) if len(before) and len(after) else float("nan")


def figures(found: Evidence) -> Iterable[Figure]:
    lines = [ratio_line(kind, run) for kind in KINDS for run in found.analyses(kind, SIZE, STEEP)[:1]]
    yield Figure(
        name="ratio",
        title="Loss ratio, first seed",
        x="step",
        y="loss / best loss before",
        panels=[Panel(f"lr {STEEP:g}", lines)],
        log_y=True,
    )


def tables(found: Evidence) -> Iterable[Table]:
    yield ratio_table(found, [(kind, STEEP) for kind in KINDS])


QUESTION = Question(
    "pacing",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=(STEEP,),
    steps=STEPS,
    paper="P4",
    always=ALWAYS,
    fields=FIELDS,
    figures=figures,
    tables=tables,
)
