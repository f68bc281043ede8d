"""Do attention logits also grow without a softmax? Figure E.11 of Wortsman et al. 2023b.

Squared ReLU in place of softmax cannot saturate; in the paper the logits grow nevertheless.
"""

from trimtab.lab.questions.question import Checks, Evidence, M, Question, growth, judge, mean

ARMS = {"softmax": (), "squared relu": ("attention=squared-relu",)}
LRS = (0.01, 0.1, 0.3)


def check(found: Evidence) -> Checks:
    for arm in ARMS:
        factors = {f"{lr:g}": mean(growth(run.logits) for run in found.runs(arm, M, lr)) for lr in LRS[1:]}
        claim = f"with {arm} the largest logit grows tenfold at high learning rates"
        yield judge(claim, factors, lambda *x: max(x) >= 10, note="growth factor by learning rate")


QUESTION = Question("attention", __doc__, ARMS, check, lrs=LRS)
