"""Do output logits drift, and does z-loss prevent it? Figures 3 and 4 of Wortsman et al. 2023b; no weight decay.

In 32 bits a common shift of all logits does not change the loss, so the drift is harmless; in 16 bits it should not be.
"""

from trimtab.lab.questions.question import Checks, Evidence, Question, S, falls, judge, mean

LR = 0.1
ARMS = {"free": (), "z-loss": ("z-loss",), "free, 16 bits": ("bfloat16",), "z-loss, 16 bits": ("z-loss", "bfloat16")}


def check(found: Evidence) -> Checks:
    free, held = ([run.logz for run in found.runs(arm, S, LR) if run.logz] for arm in ("free", "z-loss"))
    drift = mean(max(abs(value - points[0][1]) for _, value in points) for points in free)
    end = mean(abs(points[-1][1]) for points in held)
    yield judge("without z-loss log Z drifts by more than 5", {"nats": drift}, lambda x: x > 5)
    yield judge("with z-loss it ends within 1 of zero", {"|log Z|": end}, lambda x: x < 1)
    losses = {arm: mean(run.score for run in found.runs(arm, S, LR)) for arm in ("free, 16 bits", "z-loss, 16 bits")}
    yield judge("in 16 bits the loss is higher without z-loss", losses, falls)


QUESTION = Question(
    "z-loss", __doc__, ARMS, check, sizes=(S,), lrs=(LR,), steps=4000, always=("qk-norm", "weight-decay=0")
)
