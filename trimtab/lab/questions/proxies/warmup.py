"""Does a longer warmup lower the sensitivity? Figure 5 of Wortsman et al. 2023b.

In the paper it does, most of all for large models, which fail at high learning rates without it. The grid begins at
0.03, the best learning rate of gpt-lab: below, these short runs are too slow, which a longer warmup makes worse, and
which is no instability.

After the runs three claims were made stricter: that the first failing learning rate does not fall was true of three
equal ones, 0.3 for every size and warmup. Now the edge of stability, which lies between the learning rates of the grid,
has to rise; at 2x32 it falls. A longer warmup lowers the loss above the edge.
"""

from collections.abc import Iterator

from trimtab.analysis.answers import Figure
from trimtab.lab.questions.proxies.figures import losses_over_time, sensitivity_figure
from trimtab.lab.questions.question import STEADIED, XS, Checks, Evidence, M, Question, S, Values, falls, judge, known

ARMS = {f"warmup {share:g}": (f"warmup={share:g}",) for share in (0.01, 0.05, 0.25)}
SIZES = (XS, S, M)
LRS = (0.03, 0.1, 0.3, 1.0)


def check(found: Evidence) -> Checks:
    shortest, usual, longest = ARMS
    for size in reversed(SIZES):
        claim = f"at {size} sensitivity falls as the warmup gets longer"
        yield judge(claim, found.sensitivity(*ARMS, size=size), falls)
    for size in reversed(SIZES):
        claim = f"at {size} the longest warmup has the edge of stability at a higher learning rate than the shortest"
        yield judge(claim, {arm: _edge(found, arm, size) for arm in (shortest, longest)}, lambda a, b: b > a)
    claim = f"the longest warmup lowers the sensitivity more at {M} than at {XS}"
    gains: Values = {}
    for size in (XS, M):
        before, after = found.sensitivity(shortest, longest, size=size).values()
        gains[size] = None if before is None or after is None else before - after
    yield judge(claim, gains, lambda small, large: large > small, note="nats")
    claim = f"at {M} and the highest learning rate the loss falls as the warmup gets longer"
    yield judge(claim, {arm: _top(found, arm) for arm in ARMS}, falls)
    claim = f"at {M} the best loss with the longest warmup is at most 2% above that with {usual}"
    yield judge(claim, found.best(*ARMS), lambda _, usual, longest: longest <= 1.02 * usual)


def _edge(found: Evidence, arm: str, size: str) -> float | None:
    """An arm without a failure has its edge above the grid."""
    curve = found.curve(arm, size)
    return None if curve is None else curve.edge or 2 * max(curve.lrs)


def _top(found: Evidence, arm: str) -> float | None:
    curve = found.curve(arm)
    return known(curve.loss[-1]) if curve else None


def figures(found: Evidence) -> Iterator[Figure]:
    yield sensitivity_figure(found, [*ARMS], SIZES)
    yield losses_over_time(found, [(size, LRS[-1]) for size in SIZES], [*ARMS])


QUESTION = Question("warmup", __doc__, ARMS, check, sizes=SIZES, lrs=LRS, always=STEADIED, figures=figures)
