"""Does the length of the run change the sensitivity? Figure E.7 of Wortsman et al. 2023b; decay times steps is kept."""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, S, judge, within

ARMS = {f"{steps} steps": (f"steps={steps}",) for steps in (500, 1000, 2000)}


def check(found: Evidence) -> Checks:
    claim = "sensitivity differs by at most 25% from 500 to 2000 steps"
    yield judge(claim, found.sensitivity(*ARMS, size=S), within(0.25))


QUESTION = Question("steps", __doc__, ARMS, check, sizes=(S,), always=STEADIED)
