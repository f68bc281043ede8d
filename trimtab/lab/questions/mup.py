"""Does muParam keep the best learning rate constant as the width grows? Figures 8 and E.5 of Wortsman et al. 2023b.

Two layers, base width 16, qk-norm on. In the paper it does, and lowers neither loss nor sensitivity.
"""

from trimtab.analysis.findings import Status
from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, judge
from trimtab.lab.study import LRS, half_decades

SIZES = ("2x16", "2x32", "2x64", "2x128")
ARMS = {"standard": (), "muParam": ("mup=simple",), "full muParam": ("mup=full",)}
LEARNING_RATES = (*half_decades(LRS[0], -1, -1), *LRS)  # the best learning rate moves over much of it


def check(found: Evidence) -> Checks:
    claim = "with muParam the best learning rate moves by at most one point of the grid"
    yield judge(claim, _moved(found, "muParam"), lambda x: abs(x) <= 1)
    yield judge("without it, it moves down by at least one", _moved(found, "standard"), lambda x: x <= -1)
    sensitivities = found.sensitivity("standard", "muParam", size=SIZES[-1])
    yield judge("muParam lowers the sensitivity by at most 10%", sensitivities, lambda a, b: b >= 0.9 * a)
    last = found.runs("full muParam", SIZES[-1], 1.0)
    complete = sum(run.status == Status.DONE for run in last) / len(last) if last else None
    yield judge("full muParam with qk-norm trains at learning rate 1", {"share of runs": complete}, lambda x: x == 1)


def _moved(found: Evidence, arm: str) -> dict[str, float | None]:
    first, last = (found.best_lr(arm, size) for size in (SIZES[0], SIZES[-1]))
    if first is None or last is None:
        return {"points up": None}
    grid = sorted({*LEARNING_RATES, first, last})
    return {"points up": float(grid.index(last) - grid.index(first))}


QUESTION = Question("mup", __doc__, ARMS, check, sizes=SIZES, lrs=LEARNING_RATES, always=STEADIED)
