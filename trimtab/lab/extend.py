"""A longer grid of learning rates, if the best one is at its edge.

find_edges     arms and sizes whose best learning rate is the first or the last of the grid
extend         the grid with one half decade more on each side that is missing, at most EXTENSIONS per side
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.analysis.findings import Curve
from trimtab.lab.study import half_decades, number

EXTENSIONS = 3  # half decades per side


@dataclass(frozen=True)
class Edge:
    arm: str
    size: str
    lr: float
    above: bool  # the missing side

    def __str__(self) -> str:
        return f"{self.arm} at {self.size} ({number(self.lr)}, the {'highest' if self.above else 'lowest'})"


def find_edges(curves: Sequence[Curve], lrs: Sequence[float]) -> list[Edge]:
    """None for a single learning rate, which is no grid."""
    ends = {min(lrs): False, max(lrs): True} if len(lrs) > 1 else {}
    return [Edge(c.arm, c.size, c.best_lr, ends[c.best_lr]) for c in curves if c.best_lr in ends]


def extend(given: Sequence[float], lrs: Sequence[float], edges: Sequence[Edge]) -> tuple[float, ...] | None:
    """The next grid for these edges of `lrs`, which began as `given`; None if there is nothing to add."""
    counts = {above: _count(given, lrs, above) for above in (False, True)}
    longer = {above: min(n + any(edge.above is above for edge in edges), EXTENSIONS) for above, n in counts.items()}
    return extended(given, below=longer[False], above=longer[True]) if longer != counts else None


def extended(lrs: Sequence[float], *, below: int, above: int) -> tuple[float, ...]:
    return (*half_decades(min(lrs), -below, -1), *lrs, *half_decades(max(lrs), 1, above))


def is_extension(longer: Sequence[float], lrs: Sequence[float]) -> bool:
    """Whether a grid is `lrs` with half decades added by `extend`."""
    below, above = _count(lrs, longer, False), _count(lrs, longer, True)
    return max(below, above) <= EXTENSIONS and {*longer} == {*extended(lrs, below=below, above=above)}


def _count(given: Sequence[float], lrs: Sequence[float], above: bool) -> int:
    return sum(lr > max(given) if above else lr < min(given) for lr in lrs)
