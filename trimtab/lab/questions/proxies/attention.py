"""Do attention logits also grow without a softmax? Figure E.11 of Wortsman et al. 2023b.

Squared ReLU in place of softmax cannot saturate; in the paper the logits grow nevertheless.
"""

from collections.abc import Iterator

from trimtab.analysis.answers import Figure
from trimtab.lab.questions.proxies.figures import logits_over_time, losses_over_time
from trimtab.lab.questions.question import Checks, Evidence, M, Question, growth, judge, mean

ARMS = {"softmax": (), "squared relu": ("attention=squared-relu",)}
LRS = (0.01, 0.1, 0.3)


def check(found: Evidence) -> Checks:
    for arm in reversed(ARMS):
        factors = {f"{lr:g}": mean(growth(run.logits) for run in found.runs(arm, M, lr)) for lr in LRS[1:]}
        claim = f"with {arm} the largest logit grows tenfold at high learning rates"
        yield judge(claim, factors, lambda *x: min(x) >= 10, note="growth factor by learning rate")


def figures(found: Evidence) -> Iterator[Figure]:
    places = [(M, lr) for lr in LRS]
    yield logits_over_time(found, places, [*ARMS])
    yield losses_over_time(found, places, [*ARMS])


QUESTION = Question("attention", __doc__, ARMS, check, lrs=LRS, always=("z-loss",), figures=figures)
