"""Does a longer warmup lower the sensitivity? Figure 5 of Wortsman et al. 2023b."""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, M, Question, falls, judge

ARMS = {f"warmup {share:g}": (f"warmup={share:g}",) for share in (0.01, 0.05, 0.25)}


def check(found: Evidence) -> Checks:
    yield judge(f"at {M} sensitivity falls as the warmup gets longer", found.sensitivity(*ARMS), falls)
    claim = "the best loss with the longest warmup is at most 2% higher"
    yield judge(claim, found.best(*ARMS), lambda *x: x[-1] <= 1.02 * x[1])


QUESTION = Question("warmup", __doc__, ARMS, check, always=STEADIED)
