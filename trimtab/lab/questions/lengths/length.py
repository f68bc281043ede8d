"""Are long sequences a cause of the instability? Li et al. 2022, section 3: with short sequences throughout, the same
learning rate and batch are stable, but the model is poor at full length.

Here 8x32 at learning rate 1.0, rows of 8, 16, 32 and 64 tokens in the whole training, for the same number of tokens: a
shorter row means more steps, so unstable steps are a share. All are evaluated at 64 tokens.
"""

from collections.abc import Iterable

from trimtab.analysis.answers import Table
from trimtab.lab.questions.lengths.unstable import (
    ALWAYS,
    FIELDS,
    LR,
    SIZE,
    STEPS,
    above_noise,
    average,
    ratio_table,
    unstable,
)
from trimtab.lab.questions.question import Checks, Evidence, Question, judge

ARMS = {f"length {n}": (f"length={n}",) for n in (8, 16, 32)} | {"length 64": ()}


def check(found: Evidence) -> Checks:
    share = {arm: average(found, arm, unstable) for arm in ARMS}
    yield judge("the share of unstable steps is higher at full length than at the shortest", share, _grows)
    ratio = {arm: average(found, arm, above_noise) for arm in ARMS}
    yield judge("so is the largest loss ratio over the noise", ratio, _grows)
    claim = "trained on the shortest only, the loss at full length is the worst"
    yield judge(claim, found.best(*ARMS, size=SIZE), lambda first, *others: first > max(others))


def _grows(first: float, *others: float) -> bool:
    return others[-1] > first


def tables(found: Evidence) -> Iterable[Table]:
    yield ratio_table(found, [(arm, LR) for arm in ARMS])


QUESTION = Question(
    "length",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=(LR,),
    steps=STEPS,
    paper="P4",
    always=ALWAYS,
    fields=FIELDS,
    tables=tables,
)
