"""Does sequence length warmup reach the baseline's loss with fewer tokens and in less time? Li et al. 2022,
abstract: GPT-2 with 8 times the batch and 4 times the learning rate needs up to 2.2 times fewer tokens and 3.7 times
less time for the same or better zero-shot results, if the learning rate decays by tokens; GPT-3 125M keeps 99 % of
its zero-shot accuracy with 10 times less data.

Here 4x32, 128 rows of 128 tokens, 2 million tokens, lengths that grow from 8 to 128 over 60 % of the steps. Full length
at its best learning rate is compared with sequence length warmup at the next higher one: tokens and seconds of training
steps until the baseline's final loss (that of its worst seed, so that all seeds reach it), median of the seeds; a run
that does not reach it counts as infinite. Both have the same batch, so warmup has more steps
for its tokens; two controls have more steps too: a batch that grows from 16 to 128 rows, with as many tokens per step,
and a quarter of the batch. The paper also says that a lower learning rate or a longer learning-rate warmup takes longer
than short sequences do; both are tried at full length. The zero-shot task is the last word of a passage, the right one
among four.

This is the second design, with large batches: in the first, 64 rows of 64 tokens (docs/log.md), the noise of short rows
cost what they saved. Tried before with seed 100: at 0.015 the loss was 2.50 at full length and 2.38 with warmup, at
0.03 it was 2.58 and 2.42. The batch that grows and the longer learning-rate warmup were added after the other arms had
run.

After the runs: the gain is that of more updates for the same tokens. Both controls need fewer tokens than sequence
length warmup. The accuracy is that of 256 passages per run, whose standard error is 3 points, so it says that nothing
large is lost.
"""

import math
from collections.abc import Iterable
from statistics import fmean, median

from trimtab.analysis.answers import Figure, Line, Panel, Table
from trimtab.analysis.one_run import Evaluation
from trimtab.lab.questions.lengths.large import ALWAYS, BATCH_WARMUP, FIELDS, SIZE, STEPS, WARMUP
from trimtab.lab.questions.question import Checks, Evidence, Question, Values, falls, judge, mean
from trimtab.train.last_word import CHOICES

FULL, WARM = "full length", "sequence length"
BY_STEPS, BATCH, QUARTER = "sequence length, decay by steps", "batch-size warmup", "full length, batch 32"
GENTLE = "full length, longer warmup"  # of the learning rate
ARMS = {
    FULL: (),
    WARM: (WARMUP,),
    BY_STEPS: (WARMUP, "decay-by-steps"),
    BATCH: (BATCH_WARMUP,),
    QUARTER: ("batch=32",),
    GENTLE: ("warmup=0.25",),
}
LRS = (0.0075, 0.015, 0.03)
KEPT = 0.99  # of the baseline's accuracy


def check(found: Evidence) -> Checks:
    curve = found.curve(FULL, SIZE) if found.curve(WARM, SIZE) else None
    safe = curve.best_lr if curve else None
    higher = next((lr for lr in curve.lrs if lr > curve.best_lr * 1.01), None) if curve else None
    lower = max((lr for lr in curve.lrs if lr < curve.best_lr * 0.99), default=None) if curve else None
    cost = {lr: {arm: _cost(found, arm, lr, safe) for arm in ARMS} for lr in (lower, safe, higher)}
    baseline = cost[safe][FULL]
    note = f"full length at {safe:g}, sequence length at {higher:g}" if safe and higher else ""
    for part, goal in (("tokens", "with fewer tokens"), ("seconds", "in less time")):
        values: Values = {FULL: baseline[part], WARM: cost[higher][WARM][part]}
        claim = f"at the next higher learning rate, sequence length warmup reaches the loss of the baseline {goal}"
        yield judge(claim, values, falls, note=_factor(note, values))
    values = {FULL: baseline["tokens"], WARM: cost[safe][WARM]["tokens"]}
    claim = "at the learning rate of the baseline, too, sequence length warmup needs fewer tokens"
    yield judge(claim, values, falls, note=_factor("", values))
    slower = {"lower learning rate": cost[lower][FULL]["tokens"], "longer warmup": cost[safe][GENTLE]["tokens"]}
    claim = "a lower learning rate, or a longer warmup of it, at full length needs more tokens than short sequences"
    yield judge(claim, slower | {WARM: values[WARM]}, lambda low, long, warm: min(low, long) > warm)
    right = {FULL: _accuracy(found, FULL, safe), WARM: _accuracy(found, WARM, higher)}
    claim = f"on all tokens, sequence length warmup keeps {KEPT:.0%} of the zero-shot accuracy, one word of four"
    yield judge(claim, right, lambda a, b: b >= KEPT * a, note=note)
    ends = {arm: None if safe is None else mean(run.score for run in found.runs(arm, SIZE, safe)) for arm in ARMS}
    claim = "at the learning rate of the baseline, decay by steps ends with a higher loss than decay by tokens"
    yield judge(claim, {arm: ends[arm] for arm in (BY_STEPS, WARM)}, falls)
    for control, name in ((BATCH, "a warmup of the batch size"), (QUARTER, "full length with a quarter of the batch")):
        best = found.best_lr(control, SIZE)
        values = {control: _cost(found, control, best, safe)["tokens"], WARM: cost[safe][WARM]["tokens"]}
        note = f"{control} at {best:g}, its best learning rate" if best else ""
        yield judge(f"sequence length warmup needs fewer tokens than {name}", values, falls, note=_factor(note, values))


def _factor(note: str, values: Values) -> str:
    before, after = values.values()
    if not before or not after or not math.isfinite(after):
        text = ""
    else:
        text = f"a factor of {max(before, after) / min(before, after):.2f}"
    return "; ".join(filter(None, (note, text)))


def _cost(found: Evidence, arm: str, lr: float | None, safe: float | None) -> Values:
    """Median tokens and seconds until the baseline's final loss."""
    runs = [] if lr is None else [run for run in found.analyses(arm, SIZE, lr) if run.evaluations]
    goal = None if safe is None else max((run.score for run in found.runs(FULL, SIZE, safe)), default=None)
    if goal is None or not runs:
        return {"tokens": None, "seconds": None}
    reached = [run.reaches(goal) or Evaluation(math.inf, math.inf, math.inf) for run in runs]
    return {"tokens": median(x.tokens for x in reached), "seconds": median(x.seconds for x in reached)}


def _accuracy(found: Evidence, arm: str, lr: float | None) -> float | None:
    """A run that stopped answers by chance."""
    if lr is None or not (runs := found.runs(arm, SIZE, lr)):
        return None
    known = [x.choice for x in found.last_words(arm, SIZE, lr)]
    return fmean([*known, *[1 / CHOICES] * (len(runs) - len(known))])


def figures(found: Evidence) -> Iterable[Figure]:
    for part in ("tokens", "seconds"):
        yield Figure(
            name=part,
            title=f"Validation loss against {part}, first seed",
            x=part,
            y="validation loss",
            panels=[
                Panel(
                    arm,
                    [
                        _line(f"lr {lr:g}", run.evaluations, part)
                        for lr in LRS
                        for run in found.analyses(arm, SIZE, lr)[:1]
                    ],
                )
                for arm in ARMS
            ],
        )


def _line(name: str, points: list[Evaluation], part: str) -> Line:
    return Line(name, [getattr(x, part) for x in points], [x.loss if math.isfinite(x.loss) else None for x in points])


def tables(found: Evidence) -> Iterable[Table]:
    rows = []
    for arm in ARMS:
        for lr in LRS:
            words = found.last_words(arm, SIZE, lr)
            numbers = (mean(getattr(x, key) for x in words) for key in ("choice", "exact", "bits"))
            rows.append((arm, lr, mean(run.score for run in found.runs(arm, SIZE, lr)), *numbers))
    columns = ("arm", "lr", "validation loss", "last word of four", "last word exact", "bits of the last word")
    yield Table("Zero-shot: the last word of a passage", columns, rows)


QUESTION = Question(
    "headline",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=LRS,
    steps=STEPS,
    paper="P4",
    always=ALWAYS,
    # Often evaluated: the loss is reached between two evaluations.
    fields=FIELDS | {"schedule.lr.floor": LRS[0] / 15, "eval_every": 5},
    figures=figures,
    tables=tables,
    measured=11.0,
    second=True,
)
