"""Does the batch size change the sensitivity, on the same data? Figure E.9 of Wortsman et al. 2023b."""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, S, judge, within

ARMS = {f"batch {batch}": (f"batch={batch}",) for batch in (16, 32, 64)}


def check(found: Evidence) -> Checks:
    yield judge("sensitivity within 25% from batch 16 to 64", found.sensitivity(*ARMS, size=S), within(0.25))


QUESTION = Question("batch", __doc__, ARMS, check, sizes=(S,), steps=1000, always=STEADIED)
