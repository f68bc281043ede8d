"""Do output logits drift, and does z-loss prevent it? Figures 3 and 4 of Wortsman et al. 2023b; no weight decay.

In 32 bits a common shift of all logits does not change the loss, so the drift is harmless; in 16 bits it should not be.
The paper sees the drift late in 100 thousand steps. Trials with other seeds showed less than 2 nats at batch 16 and
about 3 at batch 1, where most bytes are rare in a batch, so a small batch with eight times the steps is a second
design. The weight of z-loss is 0.01, so that weight times steps is as in the paper: with 1e-4 it hardly moved log Z in
a short run.

After the runs: the drift is now measured from a tenth of the run on, because log Z moves by more than a nat in the
first steps. The differences of the last claim are smaller than those between seeds: on another processor it held. 16
bits do no harm without z-loss either.
"""

import math
from collections.abc import Iterator

from trimtab.analysis.answers import Figure
from trimtab.analysis.findings import Result
from trimtab.lab.questions.proxies.figures import over_time
from trimtab.lab.questions.question import Checks, Evidence, Question, S, Values, judge, known, mean

LRS = (0.03, 0.1, 0.3)
STEPS = 1000
Z_LOSS = 1e-4 * 100_000 / STEPS  # the paper's weight in its number of steps
WITH, NONE = f"z-loss={Z_LOSS:g}", "weight-decay=0"
ARMS = {
    "free": (NONE,),
    "free, batch 2": (NONE, "batch=2"),
    "z-loss": (NONE, WITH),
    "decay": (),
    "free, 16 bits": (NONE, "bfloat16"),
    "z-loss, 16 bits": (NONE, WITH, "bfloat16"),
}
FREE = ("free", "free, batch 2")
SETTLED = 0.1  # of the run: what log Z does before is no drift


def check(found: Evidence) -> Checks:
    drifts = {f"{arm}, {lr:g}": _drift(found, arm, lr) for arm in FREE for lr in LRS}
    claim = "without z-loss log Z drifts by more than 5"
    yield judge(claim, drifts, lambda *x: max(x) > 5, note="nats by batch and learning rate")
    ends = {f"{lr:g}": _end(found, "z-loss", lr) for lr in LRS}
    yield judge("with z-loss log Z ends within 1 of zero", ends, lambda *x: max(x) < 1, note="by learning rate")
    decayed = {arm: _drift(found, arm, LRS[-1]) for arm in ("free", "decay")}
    yield judge("at the highest learning rate weight decay lowers the drift", decayed, lambda free, held: held < free)
    claim = "z-loss raises the loss less, or lowers it more, in 16 bits than in 32 bits, at every learning rate"
    yield judge(claim, _harm(found), _all_positive, note="nats")


def _drift(found: Evidence, arm: str, lr: float) -> float | None:
    return mean(_largest_move(run) for run in found.runs(arm, S, lr))


def _largest_move(run: Result) -> float:
    values = [value for step, value in run.logz if step >= SETTLED * (run.planned or run.steps)]
    return max((abs(value - values[0]) for value in values), default=math.nan)


def _end(found: Evidence, arm: str, lr: float) -> float | None:
    return mean(abs(run.logz[-1][1]) for run in found.runs(arm, S, lr) if run.logz)


def _harm(found: Evidence) -> Values:
    """The loss without z-loss minus that with it, in 16 bits, minus the same in 32 bits."""
    harm: Values = {}
    for lr in LRS:
        arms = ("free, 16 bits", "z-loss, 16 bits", "free", "z-loss")
        losses = [mean(run.score for run in found.runs(arm, S, lr)) for arm in arms]
        free, held, exact, exact_held = (math.nan if x is None else x for x in losses)
        harm[f"{lr:g}"] = known((free - held) - (exact - exact_held))
    return harm


def _all_positive(*values: float) -> bool:
    return min(values) > 0


def figures(found: Evidence) -> Iterator[Figure]:
    arms = ("free", "z-loss", "decay", "free, 16 bits")
    title = "log Z of the output logits (z-loss on or off)"
    yield over_time(found, lambda run: run.logz, [(S, lr) for lr in LRS], arms, name="logz", title=title, y="nats")


QUESTION = Question(
    "z-loss", __doc__, ARMS, check, sizes=(S,), lrs=LRS, steps=STEPS, always=("qk-norm",), figures=figures, second=True
)
