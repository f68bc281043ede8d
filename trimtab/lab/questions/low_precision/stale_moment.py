"""Does StableAdamW help where the second moment is out of date? Wortsman et al. 2023a, section 3.

The paper: when the learning signal changes, the second moment is too small for the gradients, steps get too long, and
the loss spikes. StableAdamW divides the step of each tensor by RMS_t, prevents this, and is better than gradient
clipping and a lower beta2.

Here this mechanism alone: the gradients of a GPT on bytes are 16 times larger in 40 of every 200 steps
(trimtab/lab/changing.py), and its loss is the same function as before. Losses of these steps are means over both
learning rates. Tried before the rules, single runs with seed 100 at 0.01: 2.35 with AdamW, 2.24 with StableAdamW, 2.22
with clipping and 2.17 with beta2 0.9. The question stable-adamw has a CLIP, where the paper saw the spikes.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from trimtab.analysis.answers import Figure, Line, Panel, Table
from trimtab.analysis.findings import Status
from trimtab.analysis.one_run import losses_of, rms_of
from trimtab.analysis.spike_counts import RULES
from trimtab.lab.changing import LENGTH, ROWS, is_changed
from trimtab.lab.questions.low_precision.spikes import STEPS
from trimtab.lab.questions.low_precision.stable_adamw import ARMS as COMPARED
from trimtab.lab.questions.low_precision.stable_adamw import CHANGING
from trimtab.lab.questions.proxies.figures import smooth
from trimtab.lab.questions.question import Checks, Evidence, Question, Values, falls, judge, mean
from trimtab.runs.reader import Run

SIZE = "2x64"
SLOW = {"AdamW, beta2 0.999": ("beta2=0.999",), "StableAdamW, beta2 0.999": ("beta2=0.999", "stable-adamw")}
ARMS = COMPARED | SLOW
PLAIN, CLIPPING, LOWER, STABLE, SLOW_PLAIN, SLOW_STABLE = ARMS
LRS = (3e-3, 1e-2)
LEAD = 8  # steps after a change in which the second moment is out of date, as the paper counts
CHANGED = [step for step in range(1, STEPS + 1) if is_changed(step)]
BEGUN = [step for before, step in pairwise([0, *CHANGED]) if step > before + 1]


def check(found: Evidence) -> Checks:
    losses = {arm: changed_loss(found, arm) for arm in ARMS}
    for plain, stable in ((PLAIN, STABLE), (SLOW_PLAIN, SLOW_STABLE)):
        claim = f"where gradients are larger the loss of {stable} is lower than that of {plain}"
        yield judge(claim, {arm: losses[arm] for arm in (plain, stable)}, falls)
    gains: Values = {}
    for name, plain, stable in (("beta2 0.99", PLAIN, STABLE), ("beta2 0.999", SLOW_PLAIN, SLOW_STABLE)):
        a, b = losses[plain], losses[stable]
        gains[name] = None if a is None or b is None else a - b
    claim = "StableAdamW gains more with beta2 0.999, whose second moment is out of date for longer"
    yield judge(claim, gains, lambda short, long: long > short, note="nats")
    for arm in (CLIPPING, LOWER):
        claim = f"where gradients are larger the loss of StableAdamW is lower than that of {arm}"
        yield judge(claim, {name: losses[name] for name in (arm, STABLE)}, falls)
    ends = found.best(*ARMS, size=SIZE)
    claim = "the validation loss of StableAdamW is not higher than that of AdamW, with either beta2"
    values = {arm: ends[arm] for arm in (PLAIN, STABLE, SLOW_PLAIN, SLOW_STABLE)}
    yield judge(claim, values, lambda a, b, c, d: b <= a and d <= c)
    claim = f"RMS_t of half of the tensors is above {RULES.rms} within {LEAD} steps of the change, and not before it"
    yield judge(
        claim, _staleness(found), lambda before, after: before < RULES.rms <= after, note="AdamW, median tensor"
    )


def changed_loss(found: Evidence, arm: str, lrs: Sequence[float] = LRS) -> float | None:
    """Mean training loss of the steps with larger gradients, over seeds and learning rates. A run that stopped has the
    loss before training."""
    losses = []
    for lr in lrs:
        runs = found.runs(arm, SIZE, lr)
        if not runs:
            return None
        for run, log in zip(runs, found.logs(arm, SIZE, lr), strict=True):
            steps, values = losses_of(log)
            changed = values[np.isin(steps, CHANGED)]
            losses.append(run.first if run.status == Status.STOPPED or not len(changed) else float(changed.mean()))
    return fmean(losses)


def _staleness(found: Evidence) -> Values:
    runs = [run for lr in LRS for run in found.logs(PLAIN, SIZE, lr)]
    before, after = (list(_medians(runs, shift)) for shift in (-LEAD, 0))
    return {"before": fmean(before) if before else None, "after": fmean(after) if after else None}


def _medians(runs: Iterable[Run], shift: int) -> Iterator[float]:
    """The highest RMS_t of the median tensor within LEAD steps, of each change in each run."""
    for run in runs:
        steps, by_tensor = rms_of(run)
        for begin in BEGUN:
            near = (steps >= begin + shift) & (steps < begin + shift + LEAD)
            if near.any() and by_tensor:
                yield median(float(np.nanmax(values[near])) for values in by_tensor.values())


def tables(found: Evidence) -> Iterable[Table]:
    rows = []
    for lr in LRS:
        for arm in ARMS:
            ends = mean(run.score for run in found.runs(arm, SIZE, lr))
            rows.append((f"{lr:g}", arm, changed_loss(found, arm, [lr]), ends))
    columns = ("learning rate", "arm", "training loss where gradients are larger", "validation loss")
    yield Table("Means over seeds", columns, rows)


def figures(found: Evidence) -> Iterable[Figure]:
    panels = []
    for lr in LRS:
        plain = _mean_losses(found, PLAIN, lr)
        lines = []
        for arm in ARMS:
            losses = _mean_losses(found, arm, lr)
            if arm != PLAIN and plain and losses:
                steps = sorted(plain.keys() & losses.keys())
                differences = tuple((step, losses[step] - plain[step]) for step in steps)
                lines.append(Line(arm, steps, [value for _, value in smooth(differences, LEAD)]))
        panels.append(Panel(f"learning rate {lr:g}", lines))
    phases = " and ".join(f"{begin} to {begin + LENGTH - 1}" for begin in BEGUN)
    title = f"Training loss minus that of {PLAIN}; gradients are larger in steps {phases}"
    yield Figure(
        name="differences", title=title, x="step", y=f"nats, means of seeds and of {LEAD} steps", panels=panels
    )


def _mean_losses(found: Evidence, arm: str, lr: float) -> dict[int, float]:
    """By step, of the seeds, which see the same batches in every arm; only steps that all of them have."""
    runs = [dict(zip(*(x.tolist() for x in losses_of(run)), strict=True)) for run in found.logs(arm, SIZE, lr)]
    steps = set.intersection(*(set(run) for run in runs)) if runs else set()
    return {step: fmean(run[step] for run in runs) for step in steps}


QUESTION = Question(
    "stale-moment",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=LRS,
    seeds=4,
    steps=STEPS,
    paper="P1",
    subject="trimtab.lab.changing:gpt",
    fields={**CHANGING, "batch": ROWS, "eval_batches": 64},
    figures=figures,
    tables=tables,
    measured=5.0,
)
