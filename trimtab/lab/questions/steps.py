"""Is what short runs say true of longer ones? Figure E.7 of Wortsman et al. 2023b, with decay times steps kept."""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import STEADIED, Check, S, Seen, ask, judge, within
from trimtab.lab.study import Study

NAME = "steps"
ARMS = {f"{steps} steps": (f"steps={steps}",) for steps in (500, 1000, 2000)}


def study() -> Study:
    """About 7 minutes on two cores."""
    question = "Does the length of the run change the sensitivity?"
    return ask(NAME, question, arms=ARMS, sizes=(S,), always=STEADIED)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    sensitivities = {arm: seen.sensitivity(arm, S) for arm in ARMS}
    return [judge("sensitivity stays within 25% from 500 to 2000 steps", sensitivities, within(0.25))]
