"""Does sequence length warmup stabilise a run, and more than batch-size warmup does? Li et al. 2022.

All arms train on the same number of tokens. The model has no other intervention.
"""

from trimtab.lab.questions.question import Checks, Evidence, M, Question, at_most, falls, judge, mean

ARMS = {"full length": (), "sequence length": ("seqlen-warmup=0.3",), "batch": ("batch-warmup=0.3",)}
HIGH = (0.03, 0.1, 0.3)


def check(found: Evidence) -> Checks:
    pair = ("full length", "sequence length")
    claim = "at high learning rates the loss rises less with sequence length warmup"
    yield judge(claim, {arm: _rise(found, arm) for arm in pair}, falls, note="highest loss / best before it, mean")
    yield judge(f"at {M} it is less sensitive", found.sensitivity(*pair), falls)
    yield judge("its best loss is at most 1% higher", found.best(*pair), at_most(1.01))
    claim = "it is not more sensitive than batch-size warmup"
    yield judge(claim, found.sensitivity("batch", "sequence length"), at_most(1))


def _rise(found: Evidence, arm: str) -> float | None:
    runs = [run for lr in HIGH for run in found.runs(arm, M, lr)]
    return mean(run.loss_ratio for run in runs) if found.curve(arm) else None


QUESTION = Question("seqlen-warmup", __doc__, ARMS, check, paper="P4")
