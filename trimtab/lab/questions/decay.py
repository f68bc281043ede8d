"""Should weight decay follow the learning rate? Figures 6 and E.10 of Wortsman et al. 2023b.

The two kinds are the same at a peak of 1e-3; sensitivity is that of the best window of three decades.
"""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import STEADIED, Check, M, Seen, ask, judge
from trimtab.lab.study import HALF_DECADES, LRS, Study

NAME = "decay"
ARMS = {
    "independent": (),
    "coupled": ("coupled-decay",),
    "a tenth": ("weight-decay=0.1x",),
    "ten times": ("weight-decay=10x",),
}


def study() -> Study:
    """About 13 minutes on two cores."""
    question = "Is decay that ignores the learning rate steadier?"
    # One rate more below: a best rate that moves left should not look like a recipe that is sensitive.
    lower = HALF_DECADES[HALF_DECADES.index(LRS[0]) - 1]
    return ask(NAME, question, arms=ARMS, lrs=(lower, *LRS), always=STEADIED)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    kinds = {arm: seen.sensitivity(arm) for arm in ("independent", "coupled")}
    rates = {arm: seen.best_lr(arm) for arm in ("a tenth", "independent", "ten times")}
    return [
        judge(f"at {M} independent decay is less sensitive than coupled", kinds, lambda a, b: a < b),
        judge("more decay does not move the best rate left", rates, lambda *x: list(x) == sorted(x)),
    ]
