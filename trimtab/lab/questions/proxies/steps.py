"""Does the length of the run change the sensitivity? Figure E.7 of Wortsman et al. 2023b; decay times steps is kept.

In the paper the curve over the learning rate keeps its shape. The grid begins at 0.01: below, the shorter runs are too
slow. The part of the sensitivity above the best learning rate is compared too.

After the runs: with 2000 steps the best learning rate is at the end of the grid, equal to the next one within the
seeds, so its part above the best one is all of the sensitivity.
"""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, S, Values, judge, known, within

ARMS = {f"{steps} steps": (f"steps={steps}",) for steps in (500, 1000, 2000)}
LRS = (0.01, 0.03, 0.1, 0.3, 1.0)


def check(found: Evidence) -> Checks:
    claim = "sensitivity differs by at most 25% from 500 to 2000 steps"
    yield judge(claim, found.sensitivity(*ARMS, size=S), within(0.25))
    best = {arm: found.best_lr(arm, S) for arm in ARMS}
    yield judge("the best learning rate moves by at most one point of the grid", best, _neighbours)
    claim = "the part of the sensitivity above the best learning rate differs by at most 25%"
    yield judge(claim, _unstable(found), within(0.25))


def _neighbours(*rates: float) -> bool:
    places = [LRS.index(rate) for rate in rates]
    return max(places) - min(places) <= 1


def _unstable(found: Evidence) -> Values:
    curves = {arm: found.curve(arm, S) for arm in ARMS}
    return {arm: known(curve.unstable) if curve else None for arm, curve in curves.items()}


QUESTION = Question("steps", __doc__, ARMS, check, sizes=(S,), lrs=LRS, always=STEADIED)
