"""The search for a sequence length warmup, independent of models: which trials to run, and their largest cost.

    find_warmup(starts, durations, first, trial)         trial(start, steps) -> (steady at the beginning, steady)

The smallest start that is steady at the beginning is kept. Then bisection finds the longest steady duration; it assumes
that a steady duration stays steady when it is made shorter.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """The result of a search; None if there is no such start or duration."""

    start: int | None
    steps: int | None


def find_warmup(
    starts: Sequence[int], durations: Sequence[int], first: int, trial: Callable[[int, int], tuple[bool, bool]]
) -> Found:
    """`trial(start, steps)` returns whether it is steady at the beginning, and in the whole window."""
    for start in starts:
        begins, steady = trial(start, first)
        if begins:
            rest = [steps for steps in durations if (steps > first if steady else steps < first)]
            longest = find_longest(rest, lambda steps, start=start: trial(start, steps)[1])  # type: ignore[misc]
            return Found(start, longest or (first if steady else None))
    return Found(None, None)


def find_longest(durations: Sequence[int], steady: Callable[[int], bool]) -> int | None:
    """The last of these rising numbers that is steady, by bisection; None if the first is not."""
    low, high = -1, len(durations)  # the one at `low` is steady, the one at `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        if steady(durations[middle]):
            low = middle
        else:
            high = middle
    return None if low < 0 else durations[low]


def max_trials(starts: Sequence[int], durations: Sequence[int], first: int) -> int:
    """The largest number of trials of `find_warmup`."""
    longer, shorter = sum(steps > first for steps in durations), sum(steps < first for steps in durations)
    return len(starts) + math.ceil(math.log2(max(longer, shorter) + 1))


def max_cost(durations: Sequence[int], cost: Callable[[int], int]) -> int:
    """The largest total cost of `find_longest`."""
    if not durations:
        return 0
    middle = (len(durations) - 1) // 2
    rest = max(max_cost(durations[:middle], cost), max_cost(durations[middle + 1 :], cost))
    return cost(durations[middle]) + rest


def find_fluctuation(losses: Iterable[tuple[int, float]], limit: float) -> tuple[int | None, float]:
    """The first step whose perplexity is above `limit` times the best before it, and the largest such ratio."""
    best, worst, at = math.inf, 1.0, None
    for step, loss in losses:
        ratio = math.exp(min(loss - best, 700.0)) if math.isfinite(loss) else math.inf
        if ratio > limit and at is None:
            at = step
        worst, best = max(worst, ratio), min(best, loss if math.isfinite(loss) else math.inf)
    return at, worst
