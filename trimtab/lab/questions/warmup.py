"""Does a longer warm-up make a recipe less sensitive? Figure 5 of Wortsman et al. 2023b."""

from itertools import pairwise

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import STEADIED, Check, M, Seen, ask, judge
from trimtab.lab.study import Study

NAME = "warmup"
ARMS = {f"warm-up {share:g}": (f"warmup={share:g}",) for share in (0.01, 0.05, 0.25)}


def study() -> Study:
    """About 8 minutes on two cores."""
    return ask(NAME, "Does a longer warm-up lower the sensitivity?", arms=ARMS, always=STEADIED)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    sensitivities = {arm: seen.sensitivity(arm) for arm in ARMS}
    losses = {arm: seen.best(arm) for arm in ARMS}
    return [
        judge(f"at {M} sensitivity falls as the warm-up grows", sensitivities, _falls),
        judge("the longest warm-up costs no loss at the best rate (2%)", losses, lambda *x: x[-1] <= 1.02 * x[1]),
    ]


def _falls(*values: float) -> bool:
    return all(a > b for a, b in pairwise(values))
