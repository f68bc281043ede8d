"""The search for a warm-up, without a model: which questions to ask, in which order, and what the answers say.

    find_warmup(starts, durations, first, ask)         ask(start, steps) -> (begins well, steady in the whole window)

The smallest start that begins well is kept; then the longest duration that is steady is found by halving, which
supposes that what is steady stays steady when it is made shorter.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    start: int | None
    steps: int | None


def find_warmup(
    starts: Sequence[int], durations: Sequence[int], first: int, ask: Callable[[int, int], tuple[bool, bool]]
) -> Found:
    """`ask(start, steps)` says whether it is steady at the very beginning, and in the whole window."""
    for start in starts:
        begins, steady = ask(start, first)
        if begins:
            rest = [steps for steps in durations if (steps > first if steady else steps < first)]
            longest = find_longest(rest, lambda steps, start=start: ask(start, steps)[1])  # type: ignore[misc]
            return Found(start, longest or (first if steady else None))
    return Found(None, None)


def find_longest(durations: Sequence[int], steady: Callable[[int], bool]) -> int | None:
    """The last of these rising numbers that is steady, by halving; None if the first is not."""
    low, high = -1, len(durations)  # the one at `low` is steady, the one at `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        if steady(durations[middle]):
            low = middle
        else:
            high = middle
    return None if low < 0 else durations[low]


def most_trials(starts: Sequence[int], durations: Sequence[int], first: int) -> int:
    """How many questions `find_warmup` asks, at most."""
    longer = sum(steps > first for steps in durations)
    shorter = sum(steps < first for steps in durations)
    return len(starts) + math.ceil(math.log2(max(longer, shorter) + 1))


def dearest(durations: Sequence[int], cost: Callable[[int], int]) -> int:
    """What `find_longest` costs, at most."""
    if not durations:
        return 0
    middle = (len(durations) - 1) // 2
    rest = max(dearest(durations[:middle], cost), dearest(durations[middle + 1 :], cost))
    return cost(durations[middle]) + rest


def watch_perplexity(losses: Iterable[tuple[int, float]], limit: float) -> tuple[int | None, float]:
    """The first step whose perplexity is above `limit` times the best before it, and the largest such ratio."""
    best, worst, at = math.inf, 1.0, None
    for step, loss in losses:
        ratio = math.exp(min(loss - best, 700.0)) if math.isfinite(loss) else math.inf
        if ratio > limit and at is None:
            at = step
        worst, best = max(worst, ratio), min(best, loss if math.isfinite(loss) else math.inf)
    return at, worst
