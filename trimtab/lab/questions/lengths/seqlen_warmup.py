"""Does sequence length warmup stabilise training, and more than batch-size warmup or clipping do? Li et al. 2022,
section 4: it allows 8 times the batch and 4 times the learning rate; batch-size warmup stabilises less, and so does
clipping, which costs quality too. (That the learning rate must decay by tokens is part of `headline`.)

Here 4x32, 128 rows of 128 tokens (large.py), at learning rates 0.1 and 0.3, all arms on the same tokens. Lengths grow
from 8 to 128 over 60 % of the steps, the batch over 32 % of the rows, which are as many tokens. Loss is at full length,
seconds are those of the training steps. This is the second design: in the first (docs/log.md) the short sequences of
smaller batches were noise. Tried before with seed 100 at 0.3: a highest loss ratio of 2.0 at full length and 1.3 with
warmup, and a loss of 2.93 and 2.92. The limit of 1 % unstable steps was added after the runs: full length has less than
half of it, half a step per run, which shows nothing.

After the runs: by the limit of the lab all arms fail at 0.3; few of their steps are unstable by the loss ratio. Losses
are means over both learning rates. Sequence length warmup takes 30 % more steps for the same tokens, which may be why
its loss is lower. Whether it takes less time differs between machines: 35 s instead of 39 on one, as long on another.
"""

from collections.abc import Callable, Iterable

from trimtab.analysis.answers import Figure, Panel, Table
from trimtab.analysis.findings import Result, Status
from trimtab.analysis.one_run import Analysis
from trimtab.lab.questions.lengths.large import ALWAYS, BATCH_WARMUP, FIELDS, SIZE, STEPS, WARMUP
from trimtab.lab.questions.lengths.unstable import (
    SOME,
    Number,
    above_noise,
    average,
    early_variance,
    over_floor,
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
    WARM: (WARMUP,),
    BATCH: (BATCH_WARMUP,),
    **{clip: (clip.replace(" ", "="),) for clip in CLIPS},
}
LRS = (0.1, 0.3)


def check(found: Evidence) -> Checks:
    pair = (FULL, WARM)
    shares, steps = _over_floor(found, (FULL, WARM, BATCH), unstable), "% of the steps"
    claim = f"full length has at least {SOME:g}% unstable steps, and sequence length warmup fewer"
    yield judge(claim, {arm: shares[arm] for arm in pair}, _fewer, note=steps)
    short = "with sequence length warmup"
    yield judge(
        f"{short} the largest loss ratio over the noise is smaller", _over_floor(found, pair, above_noise), falls
    )
    claim = f"{short} the largest √v in the first tenth of the run is smaller"
    yield judge(claim, _means(found, pair, early_variance), falls)
    yield judge(f"{short} the final loss is not higher", _losses(found, pair), at_most(1))
    seconds = {arm: mean(run.seconds for run in _runs(found, arm) if run.status == Status.DONE) for arm in pair}
    note = "seconds of the runs that did not stop early"
    yield judge(f"{short} training takes less time", seconds, falls, note=note)
    claim = f"batch-size warmup has at least {SOME:g}% unstable steps, and sequence length warmup fewer"
    yield judge(claim, {arm: shares[arm] for arm in (BATCH, WARM)}, _fewer, note=steps)
    clips = {f"ratio, {arm}": x for arm, x in _over_floor(found, (*CLIPS, WARM), above_noise).items()}
    clips |= {f"loss, {arm}": x for arm, x in _losses(found, (*CLIPS, WARM)).items()}
    claim = "each lower clipping is less stable (largest loss ratio over the noise) or ends with a higher loss"
    yield judge(claim, clips, lambda r1, r2, r, l1, l2, loss: all((r1 > r or l1 > loss, r2 > r or l2 > loss)))


def _fewer(share: float, with_warmup: float) -> bool:
    return share >= SOME and with_warmup < share


def _runs(found: Evidence, arm: str) -> list[Result]:
    return found.runs(arm, SIZE) if found.curve(arm, SIZE) else []


def _means(found: Evidence, arms: Iterable[str], number: Number) -> Values:
    """Over both learning rates."""
    return {arm: _mean([average(found, arm, number, lr, SIZE) for lr in LRS]) for arm in arms}


def _over_floor(found: Evidence, arms: Iterable[str], number: Callable[[Analysis, float], float]) -> Values:
    """Over both learning rates."""
    return {arm: _mean([over_floor(found, arm, number, lr, LRS[0], SIZE) for lr in LRS]) for arm in arms}


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else mean(x for x in values if x is not None)


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
    yield ratio_table(found, [(arm, lr) for arm in ARMS for lr in LRS], SIZE)


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
    measured=9.0,
    second=True,
)
