"""Are long sequences a cause of the instability? Li et al. 2022, section 3: with short sequences throughout, the same
learning rate and batch are stable, but the model is poor at full length.

Here 4x32, 128 rows of 8, 16, 32 and 128 tokens in the whole training (large.py), for the same number of tokens: a
shorter row means more steps, so unstable steps are a share. All are evaluated at 128 tokens. The learning rates are 0.3
and 0.03; the noise of each length is that at 0.03, where all of them train. This is the second design: in the first
(docs/log.md) no length trained, and the noise of a run was read from the run itself.

After the runs: at 0.3 the loss of full length is clearly higher than at 0.03, but hardly a step has a loss ratio above
1.2 times the noise. Short rows are unstable. A step of them has fewer tokens, so its gradient is noisier; that this is
the cause was not tested. Positions beyond the row are never trained, which alone makes the loss of short rows worse at
full length.
"""

from collections.abc import Iterable

from trimtab.analysis.answers import Table
from trimtab.lab.questions.lengths.large import ALWAYS, FIELDS, SIZE, STEPS
from trimtab.lab.questions.lengths.unstable import SOME, above_noise, over_floor, ratio_table, unstable
from trimtab.lab.questions.question import Checks, Evidence, Question, judge, mean

ARMS = {f"length {n}": (f"length={n}",) for n in (8, 16, 32)} | {"length 128": ()}
LRS = (0.03, 0.3)
LOW, HIGH = LRS


def check(found: Evidence) -> Checks:
    share = {arm: over_floor(found, arm, unstable, HIGH, LOW, SIZE) for arm in ARMS}
    claim = f"at {HIGH:g}, the share of unstable steps is highest at full length, and at least {SOME:g}% there"
    yield judge(claim, share, lambda *x: _last_is_highest(*x) and x[-1] >= SOME, note="% of the steps")
    ratio = {arm: over_floor(found, arm, above_noise, HIGH, LOW, SIZE) for arm in ARMS}
    claim = f"at {HIGH:g}, the largest loss ratio over the noise is highest at full length"
    yield judge(claim, ratio, _last_is_highest)
    losses = {arm: mean(run.score for run in found.runs(arm, SIZE, LOW)) for arm in ARMS}
    claim = f"trained on the shortest only, the loss at full length is the worst, at {LOW:g}"
    yield judge(claim, losses, lambda first, *others: first > max(others))


def _last_is_highest(*values: float) -> bool:
    return values[-1] > max(values[:-1])


def tables(found: Evidence) -> Iterable[Table]:
    yield ratio_table(found, [(arm, lr) for arm in ARMS for lr in LRS], SIZE)


QUESTION = Question(
    "length",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=LRS,
    steps=STEPS,
    paper="P4",
    always=ALWAYS,
    fields=FIELDS,
    tables=tables,
    second=True,
)
