"""Does muParam, or a smaller attention factor, replace qk-norm? Figures E.4 and E.6 of Wortsman et al. 2023b.

In the paper neither does: attention logits still grow. The factor is 1 / head width in place of 1 / √(head width). All
arms have z-loss; the base width of muParam is 16.

After a first run: at learning rate 1 the logits grow with qk-norm too, if from much lower values, so their size is now
compared with that of qk-norm. The first rule was that they grow tenfold, which holds for every arm.
"""

from collections.abc import Iterator

from trimtab.analysis.answers import Figure
from trimtab.lab.questions.proxies.figures import logits_over_time
from trimtab.lab.questions.question import Checks, Evidence, M, Question, falls, judge, largest, mean

ARMS = {
    "plain": (),
    "qk-norm": ("qk-norm",),
    "muParam": ("mup=simple:16",),
    "1 / head width": ("attention-scale=linear",),
}
OTHERS = ("muParam", "1 / head width")
LRS = (0.03, 0.3, 1.0)


def check(found: Evidence) -> Checks:
    for arm in OTHERS:
        claim = f"at {M} {arm} without qk-norm is more sensitive than qk-norm"
        yield judge(claim, found.sensitivity(arm, "qk-norm"), falls)
    for arm in OTHERS:
        logits = {name: mean(largest(run.logits) for run in found.runs(name, M, LRS[-1])) for name in (arm, "qk-norm")}
        claim = f"with {arm} the largest attention logit is at least ten times that with qk-norm, at {LRS[-1]:g}"
        yield judge(claim, logits, lambda x, norm: x >= 10 * norm)
    losses = found.best("plain", "1 / head width")
    yield judge("the smaller factor changes the best loss by at most 2%", losses, lambda a, b: abs(b / a - 1) <= 0.02)


def figures(found: Evidence) -> Iterator[Figure]:
    yield logits_over_time(found, [(M, lr) for lr in LRS], [*ARMS])


QUESTION = Question("substitutes", __doc__, ARMS, check, lrs=LRS, always=("z-loss",), figures=figures)
