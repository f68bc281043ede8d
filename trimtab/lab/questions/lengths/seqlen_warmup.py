"""Does sequence length warmup stabilise training, and more than batch-size warmup or clipping do? Li et al. 2022,
section 4: it allows 8 times the batch and 4 times the learning rate; batch-size warmup stabilises less, and so does
clipping, which costs quality too. (That the learning rate must decay by tokens is part of `headline`.)

Here 8x32 at learning rates 0.3 and 1.0, where training is unstable (unstable.py), all arms on the same tokens. Lengths
grow from 8 to 64 over 30 % of the steps, the batch over 17 % of the rows, which are as many tokens. Loss is at full
length, seconds are those of the training steps.
"""

from collections.abc import Iterable

from trimtab.analysis.answers import Figure, Panel, Table
from trimtab.analysis.findings import Result, Status
from trimtab.lab.questions.lengths.unstable import (
    ALWAYS,
    FIELDS,
    LR,
    SIZE,
    STEEP,
    STEPS,
    Number,
    above_noise,
    average,
    early_variance,
    ratio_line,
    ratio_table,
    unstable,
)
from trimtab.lab.questions.question import Checks, Evidence, Question, Values, at_most, falls, judge, mean

FULL, WARM, BATCH = "full length", "sequence length", "batch"
SHOWN = (FULL, WARM, BATCH)
CLIPS = ("clip 0.5", "clip 0.25")
ARMS = {
    FULL: (),
    WARM: ("seqlen-warmup=0.3",),
    BATCH: ("batch-warmup=0.17",),
    **{clip: (clip.replace(" ", "="),) for clip in CLIPS},
}
LRS = (STEEP, LR)


def check(found: Evidence) -> Checks:
    pair = (FULL, WARM)
    yield judge("sequence length warmup has a smaller share of unstable steps", _means(found, pair, unstable), falls)
    yield judge("its largest loss ratio over the noise is smaller", _means(found, pair, above_noise), falls)
    yield judge("its largest √v in the first tenth of the run is smaller", _means(found, pair, early_variance), falls)
    yield judge("its final loss is not higher", _losses(found, pair), at_most(1))
    seconds = {arm: mean(run.seconds for run in _runs(found, arm) if run.status == Status.DONE) for arm in pair}
    yield judge("it takes less time", seconds, falls, note="runs that did not stop early")
    yield judge("it is more stable than batch-size warmup", _means(found, (BATCH, WARM), unstable), falls)
    clips = {f"ratio, {arm}": x for arm, x in _means(found, (*CLIPS, WARM), above_noise).items()}
    clips |= {f"loss, {arm}": x for arm, x in _losses(found, (*CLIPS, WARM)).items()}
    claim = "each lower clipping is less stable (largest loss ratio over the noise) or ends with a higher loss"
    yield judge(claim, clips, lambda r1, r2, r, l1, l2, loss: all((r1 > r or l1 > loss, r2 > r or l2 > loss)))


def _runs(found: Evidence, arm: str) -> list[Result]:
    return found.runs(arm, SIZE) if found.curve(arm, SIZE) else []


def _means(found: Evidence, arms: Iterable[str], number: Number) -> Values:
    """Over both learning rates."""
    by_rate = {arm: [average(found, arm, number, lr) for lr in LRS] for arm in arms}
    return {
        arm: None if None in values else mean(x for x in values if x is not None) for arm, values in by_rate.items()
    }


def _losses(found: Evidence, arms: Iterable[str]) -> Values:
    """A run that diverged has the loss before training."""
    return {arm: mean(run.score for run in _runs(found, arm)) for arm in arms}


def figures(found: Evidence) -> Iterable[Figure]:
    yield Figure(
        name="ratio",
        title="Loss ratio, first seed",
        x="step",
        y="loss / best loss before",
        panels=[
            Panel(
                f"lr {lr:g}",
                [ratio_line(arm, run) for arm in (FULL, WARM, BATCH) for run in found.analyses(arm, SIZE, lr)[:1]],
            )
            for lr in LRS
        ],
        log_y=True,
    )


def tables(found: Evidence) -> Iterable[Table]:
    yield ratio_table(found, [(arm, lr) for arm in ARMS for lr in LRS])


QUESTION = Question(
    "seqlen-warmup",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=LRS,
    steps=STEPS,
    paper="P4",
    always=ALWAYS,
    fields=FIELDS,
    figures=figures,
    tables=tables,
)
