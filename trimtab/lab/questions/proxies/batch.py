"""Does the batch size change the sensitivity, on the same data? Figure E.9 of Wortsman et al. 2023b.

In the paper it does not. This is the second design: in the first (docs/log.md) a run of batch 64 had 250 steps; here it
has 600. The grid begins at 0.01: in a first run of this design it began at 0.03, which was the best learning rate of
all arms, so the two claims after the first said nothing.

After the runs: in both designs the sensitivity falls as the batch grows. In the paper the smallest batch has 131
thousand tokens; here it has one thousand, whose gradients are noisier.
"""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, S, Values, judge, within

ARMS = {f"batch {batch}": (f"batch={batch}",) for batch in (16, 32, 64)}
LRS = (0.01, 0.03, 0.1, 0.3, 1.0)


def check(found: Evidence) -> Checks:
    yield judge("sensitivity within 25% from batch 16 to 64", found.sensitivity(*ARMS, size=S), within(0.25))
    curves = {arm: found.curve(arm, S) for arm in ARMS}
    unstable: Values = {arm: curve.unstable if curve else None for arm, curve in curves.items()}
    yield judge("the part of the sensitivity above the best learning rate is within 25%, too", unstable, within(0.25))
    places: Values = {arm: float(LRS.index(curve.best_lr)) if curve else None for arm, curve in curves.items()}
    claim = "the best learning rate moves by at most one point of the grid"
    yield judge(claim, places, lambda *x: max(x) - min(x) <= 1, note="place in the grid")


QUESTION = Question(
    "batch", __doc__, ARMS, check, sizes=(S,), lrs=LRS, steps=2400, always=STEADIED, second=True, measured=8.0
)
