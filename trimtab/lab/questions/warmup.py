"""Does a longer warmup lower the sensitivity? Figure 5 of Wortsman et al. 2023b."""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, M, Question, S, falls, judge

ARMS = {f"warmup {share:g}": (f"warmup={share:g}",) for share in (0.01, 0.05, 0.25)}
SIZES = (S, M, "3x96")


def check(found: Evidence) -> Checks:
    for size in reversed(SIZES):
        claim = f"at {size} sensitivity falls as the warmup gets longer"
        yield judge(claim, found.sensitivity(*ARMS, size=size), falls)
    for size in SIZES:
        claim = f"at {size} the first failing learning rate does not fall as the warmup gets longer"
        yield judge(claim, {arm: _failing(found, arm, size) for arm in ARMS}, lambda *x: list(x) == sorted(x))
    claim = f"at {M} the best loss with the longest warmup is at most 2% higher"
    yield judge(claim, found.best(*ARMS), lambda *x: x[-1] <= 1.02 * x[1])


def _failing(found: Evidence, arm: str, size: str) -> float | None:
    """An arm without a failure counts as failing above the grid."""
    curve = found.curve(arm, size)
    return None if curve is None else curve.failing_lr or 2 * max(curve.lrs)


QUESTION = Question("warmup", __doc__, ARMS, check, sizes=SIZES, always=STEADIED)
