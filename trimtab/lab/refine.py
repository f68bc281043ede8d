"""More runs where they matter: around the edge of stability of every arm and size.

    1   one seed at every learning rate of the grid
    2   the learning rate between the last that holds and the first that fails, while they are more than NARROW apart
    3   SEEDS seeds at the two learning rates on either side of the edge

Each step follows from the results so far, so a study that was stopped continues with the same runs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trimtab.analysis.findings import Curve
from trimtab.lab.study import Extra, Study

NARROW = 0.3  # powers of ten: half decades are halved once
SEEDS = 3
ROUNDS = 4  # in which runs are added; a mean over more seeds may move the edge


def refine(study: Study, curves: Sequence[Curve]) -> Study:
    """The study with the runs of the next step; the same study if there are none."""
    there = {Extra(cell.size, cell.arm, cell.lr, cell.seed) for cell in study.cells()}
    added = [x for curve in curves if curve.study == study.name for x in _next(curve) if x not in there]
    return replace(study, extra=(*study.extra, *dict.fromkeys(added))) if added else study


def _next(curve: Curve) -> Iterator[Extra]:
    if curve.edge is None or curve.failing_lr is None:
        return
    fails = curve.failing_lr
    holds = max((lr for lr in curve.lrs if curve.best_lr <= lr < fails), default=None)
    if holds is not None and math.log10(fails / holds) > NARROW:
        yield Extra(curve.size, curve.arm, float(f"{math.sqrt(holds * fails):.2g}"), 0)
        return
    for lr in (holds, fails):
        if lr is not None:
            yield from (Extra(curve.size, curve.arm, lr, seed) for seed in range(SEEDS))
