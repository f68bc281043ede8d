"""Which parametrisation keeps the best learning rate constant as the width grows? Figures 8, E.5 and E.14, same paper.

(Wortsman et al. 2023b.) Two layers, base width 16, qk-norm on. In the paper muParam does, and lowers neither loss nor
sensitivity; its full form trains at learning rate 1 without a gain at the best one. Steps relative to the size of each
tensor (RMS-scaled) do too; their learning rate has another meaning, so their sensitivity is not compared.

After the runs: a move by one point of this coarse grid is "moved" in the second claim and "constant" in the last, so
the runs do not show that RMS-scaled steps are better than the standard parametrisation. At 2x16 the losses at 0.03 and
0.1 are equal, so the moves are one point or none; at 2x96 they differ by more than the seeds do. That full muParam
trains at 1 means that it learns at least half of what it learns at its best. By this rule every arm trains there, and
by the limit of the lab none does.
"""

from math import nan

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, judge

SIZES = ("2x16", "2x96")
ARMS = {
    "standard": (),
    "muParam": ("mup=simple",),
    "full muParam": ("mup=full",),
    "RMS-scaled": ("rms-scaled",),
}
LRS = (1e-2, 3e-2, 1e-1, 3e-1, 1.0)
NOISE = 0.01  # relative difference between the losses of seeds


def check(found: Evidence) -> Checks:
    claim = "with muParam the best learning rate moves by at most one point of the grid"
    yield judge(claim, _moved(found, "muParam"), lambda x: abs(x) <= 1)
    yield judge("without muParam it moves down by at least one", _moved(found, "standard"), lambda x: x <= -1)
    sensitivities = found.sensitivity("standard", "muParam", size=SIZES[-1])
    yield judge("muParam does not lower the sensitivity by more than 10%", sensitivities, lambda a, b: b >= 0.9 * a)
    losses = found.best("standard", "muParam", size=SIZES[-1])
    yield judge("muParam does not lower the best loss", losses, lambda a, b: b >= (1 - NOISE) * a)
    last = found.runs("full muParam", SIZES[-1], 1.0)
    best = found.best("full muParam", size=SIZES[-1])["full muParam"]
    # It has learned at least half of what it learns at its best learning rate.
    trains = sum(run.score < (run.first + best) / 2 for run in last) / len(last) if last and best else None
    yield judge("full muParam with qk-norm trains at learning rate 1", {"share of runs": trains}, lambda x: x == 1)
    gains = found.best("muParam", "full muParam", size=SIZES[-1])
    yield judge("full muParam does not lower the best loss further", gains, lambda a, b: b >= (1 - NOISE) * a)
    claim = "with RMS-scaled steps the best learning rate moves by at most one point of the grid"
    yield judge(claim, _moved(found, "RMS-scaled"), lambda x: abs(x) <= 1)


def _moved(found: Evidence, arm: str) -> dict[str, float | None]:
    first, last = (found.best_lr(arm, size) for size in (SIZES[0], SIZES[-1]))
    if first is None or last is None:
        return {"points up": None}
    if first == last and first in (LRS[0], LRS[-1]):  # both may be outside: nothing is known of their distance
        return {"points up": nan}
    grid = sorted({*LRS, first, last})
    return {"points up": float(grid.index(last) - grid.index(first))}


QUESTION = Question("mup", __doc__, ARMS, check, sizes=SIZES, lrs=LRS, always=STEADIED)
