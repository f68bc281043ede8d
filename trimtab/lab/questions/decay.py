"""Is weight decay that is independent of the learning rate less sensitive? Figures 6 and E.10 of Wortsman et al. 2023b.

Both kinds are equal at the learning rate of gpt-lab, in the middle of the grid; at the end of the grid coupled decay is
still below 1 per step. The sensitivity is that of the best window of three decades.
"""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, M, Question, falls, judge
from trimtab.lab.study import LRS, half_decades

ARMS = {
    "independent": (),
    "coupled": ("coupled-decay",),
    "a tenth": ("weight-decay=0.1x",),
    "ten times": ("weight-decay=10x",),
}
# One more learning rate below: a lower best learning rate must not count as a higher sensitivity.
LOWER = half_decades(LRS[0], -1, -1)


def check(found: Evidence) -> Checks:
    kinds = found.sensitivity("coupled", "independent")
    yield judge(f"at {M} independent decay is less sensitive than coupled decay", kinds, falls)
    best = {arm: found.best_lr(arm) for arm in ("a tenth", "independent", "ten times")}
    yield judge("more decay does not lower the best learning rate", best, lambda *x: list(x) == sorted(x))


QUESTION = Question("decay", __doc__, ARMS, check, lrs=(*LOWER, *LRS), always=STEADIED)
