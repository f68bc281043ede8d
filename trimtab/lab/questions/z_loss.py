"""Do output logits drift, and does z-loss prevent it? Figures 3 and 4 of Wortsman et al. 2023b; no weight decay.

In 32 bits a common shift of all logits does not change the loss, so the drift is harmless; in 16 bits it should not be.
"""

from trimtab.lab.questions.question import Checks, Evidence, Question, S, falls, judge, mean

LRS = (0.03, 0.1, 0.3)
ARMS = {"free": (), "z-loss": ("z-loss",), "free, 16 bits": ("bfloat16",), "z-loss, 16 bits": ("z-loss", "bfloat16")}


def check(found: Evidence) -> Checks:
    drifts = {f"{lr:g}": _drift(found, lr) for lr in LRS}
    claim = "without z-loss log Z drifts by more than 5 at the highest learning rate"
    yield judge(claim, drifts, lambda *x: x[-1] > 5, note="nats by learning rate")
    ends = {f"{lr:g}": _end(found, lr) for lr in LRS}
    yield judge("with z-loss it ends within 1 of zero", ends, lambda *x: max(x) < 1, note="by learning rate")
    for lr in LRS:
        arms = ("free, 16 bits", "z-loss, 16 bits")
        losses = {arm: mean(run.score for run in found.runs(arm, S, lr)) for arm in arms}
        yield judge(f"in 16 bits at learning rate {lr:g} the loss is higher without z-loss", losses, falls)


def _drift(found: Evidence, lr: float) -> float | None:
    curves = [run.logz for run in found.runs("free", S, lr) if run.logz]
    return mean(max(abs(value - points[0][1]) for _, value in points) for points in curves)


def _end(found: Evidence, lr: float) -> float | None:
    return mean(abs(run.logz[-1][1]) for run in found.runs("z-loss", S, lr) if run.logz)


QUESTION = Question(
    "z-loss", __doc__, ARMS, check, sizes=(S,), lrs=LRS, steps=4000, always=("qk-norm", "weight-decay=0")
)
