"""Does a larger batch on the same data change the sensitivity? Figure E.9 of Wortsman et al. 2023b."""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import STEADIED, Check, S, Seen, ask, judge, within
from trimtab.lab.study import Study

NAME = "batch"
ARMS = {f"batch {batch}": (f"batch={batch}",) for batch in (16, 32, 64)}


def study() -> Study:
    """About 6 minutes on two cores."""
    question = "Does the batch change the sensitivity?"
    return ask(NAME, question, arms=ARMS, sizes=(S,), steps=1000, always=STEADIED)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    sensitivities = {arm: seen.sensitivity(arm, S) for arm in ARMS}
    return [judge("sensitivity stays within 25% from batch 16 to 64", sensitivities, within(0.25))]
