"""Does muParam keep the best learning rate in place when a model grows wider? Figures 8 and E.5 of the same paper.

Two layers, base width 16, qk-norm on. The paper: it does, and lowers neither loss nor sensitivity.
"""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import STEADIED, Check, Seen, ask, grid_steps, judge
from trimtab.lab.study import HALF_DECADES, Study

NAME = "mup"
SIZES = ("2x16", "2x32", "2x64", "2x128")
ARMS = {"standard": (), "muParam": ("mup=simple",), "full muParam": ("mup=full",)}
RATES = HALF_DECADES[1:9]  # up to 1: the best rate moves over much of it


def study() -> Study:
    """About 24 minutes on two cores."""
    return ask(NAME, "Does muParam keep the best rate in place?", arms=ARMS, sizes=SIZES, lrs=RATES, always=STEADIED)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    moved = {arm: _moved(seen, arm) for arm in ("standard", "muParam")}
    sensitivities = {arm: seen.sensitivity(arm, SIZES[-1]) for arm in moved}
    last = seen.runs("full muParam", SIZES[-1], 1.0)
    finite = sum(run.status == "done" for run in last) / len(last) if last else None
    return [
        judge(
            "with muParam the best rate moves by one point of the grid at most",
            {"points to the right": moved["muParam"]},
            lambda x: abs(x) <= 1,
        ),
        judge(
            "without it it moves to the left by one at least",
            {"points to the right": moved["standard"]},
            lambda x: x <= -1,
        ),
        judge("muParam does not lower the sensitivity by more than a tenth", sensitivities, lambda a, b: b >= 0.9 * a),
        judge("full muParam with qk-norm trains at a rate of 1", {"share of runs": finite}, lambda x: x == 1),
    ]


def _moved(seen: Seen, arm: str) -> float | None:
    first, last = (seen.best_lr(arm, size) for size in (SIZES[0], SIZES[-1]))
    return None if first is None or last is None else float(grid_steps(first, last, RATES))
