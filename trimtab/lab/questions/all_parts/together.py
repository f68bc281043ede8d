"""Do SwitchBack, 8-bit StableAdamW, qk-norm, z-loss and sequence length warmup work together? No paper has all of
them: each alone is said to cost no accuracy (SwitchBack, 8-bit state), or to move the edge of stability to higher
learning rates (the others).

Here 2x128 on the same tokens, at the learning rate that plain AdamW in float32 prefers (0.01) and at ten times that:
all parts, each alone, and all but one each. A part conflicts with the rest if the loss without it is lower by more than
2 %. Seconds are of training steps.
"""

import math
from collections.abc import Iterable
from statistics import median

from trimtab.analysis.answers import Table
from trimtab.lab.questions.question import Checks, Evidence, Question, Values, at_most, falls, judge, mean

PARTS = {
    "SwitchBack": "switchback",
    "StableAdamW": "stable-adamw",
    "8-bit state": "8-bit",
    "qk-norm": "qk-norm",
    "z-loss": "z-loss",
    "sequence length warmup": "seqlen-warmup=0.3",
}
PLAIN, ALL = "plain", "all"
ARMS = {
    PLAIN: (),
    ALL: tuple(PARTS.values()),
    **{part: (switch,) for part, switch in PARTS.items()},
    **{f"all but {part}": tuple(x for x in PARTS.values() if x != switch) for part, switch in PARTS.items()},
}
SIZE, STEPS = "2x128", 150
LR, HIGH = 0.01, 0.1
LIMIT = 1.02  # of the loss: the papers' "no loss of accuracy" at this noise
FIELDS = {"model.context": 128, "eval_every": 10, "eval_batches": 4, "watch.every": 0}


def check(found: Evidence) -> Checks:
    low, high = (losses(found, (PLAIN, ALL), lr) for lr in (LR, HIGH))
    yield judge(
        f"all together have a loss at most 2% above plain AdamW at {LR:g}, on the same tokens", low, at_most(LIMIT)
    )
    yield judge(f"at {HIGH:g} all together have the lower loss", high, falls)
    seconds = {arm: _seconds(found, arm) for arm in (PLAIN, ALL)}
    yield judge(f"all together reach the loss of plain AdamW (within 2%, {LR:g}) in less time", seconds, falls)
    alone = losses(found, (PLAIN, *PARTS), LR)
    claim = f"each part alone has a loss at most 2% above plain AdamW at {LR:g}"
    yield judge(claim, alone, lambda plain, *others: all(x <= LIMIT * plain for x in others))
    without = {arm: x for part in PARTS for arm, x in losses(found, (f"all but {part}",), LR).items()}
    claim = f"no part conflicts with the rest: all together are at most 2% above all but one, at {LR:g}"
    yield judge(claim, {ALL: low[ALL], **without}, lambda every, *others: every <= LIMIT * min(others))


def losses(found: Evidence, arms: Iterable[str], lr: float) -> Values:
    """Mean over seeds; a run that diverged has the loss before training."""
    return {
        arm: mean(run.score for run in found.runs(arm, SIZE, lr)) if found.curve(arm, SIZE) else None for arm in arms
    }


def _seconds(found: Evidence, arm: str) -> float | None:
    """Median over seeds until 1.02 times the final loss of plain AdamW; infinite if it is not reached."""
    goal = losses(found, (PLAIN,), LR)[PLAIN]
    runs = [run for run in found.analyses(arm, SIZE, LR) if run.evaluations] if goal and found.curve(arm, SIZE) else []
    reached = [run.reaches(LIMIT * (goal or 0.0)) for run in runs]
    times = [x.seconds if x else math.inf for x in reached]
    return median(times) if times else None


def tables(found: Evidence) -> Iterable[Table]:
    rows = []
    for arm in ARMS:
        both = [losses(found, (arm,), lr)[arm] for lr in (LR, HIGH)]
        whole = mean(run.seconds for run in found.runs(arm, SIZE, LR))
        rows.append((arm, *both, whole, _seconds(found, arm)))
    columns = ("arm", f"loss at {LR:g}", f"loss at {HIGH:g}", "seconds", "seconds to the loss of plain AdamW")
    yield Table("Together, alone, and without each", columns, rows)


QUESTION = Question(
    "together",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=(LR, HIGH),
    steps=STEPS,
    paper="all",
    fields=FIELDS,
    tables=tables,
)
