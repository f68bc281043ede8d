"""The design that the questions about the stability-efficiency dilemma share, and how they measure instability.

The model is GPT-2's: learned positions, no qk-norm, β₂ 0.95, gradients clipped to norm 1, 50 steps of learning-rate
warmup, a cosine. Runs on other seeds (100, 101) decided the rest. Four layers of 64 with 16 rows had few steps with a
loss ratio above 1.2, and sampling noise of 20 % hid them; so there are 8 layers of 32 and 64 rows. At learning rate 0.3
two to seven of 250 steps are above 1.2, at 1.0 about eighty: that is the unstable cell. Without learning-rate warmup
the first steps explode in every arm, which is another effect.

    loss ratio        loss over the best loss before it                          Li et al. 2022
    noise             95th percentile of the loss ratio in the last fifth of a run, over the lowest one there: a run
                      that never recovers has a high ratio in all of it, which is no noise
    unstable steps    share of the steps with a loss ratio above 1.2 times the noise, in percent; less than 1 % is no
                      instability that anything could prevent

The noise of an arm is that of its runs at the lowest learning rate: at a high one it is a part of the failure.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from trimtab.analysis.answers import Line, Table
from trimtab.analysis.one_run import Analysis
from trimtab.lab.questions.question import Evidence, mean

SIZE, STEPS = "8x32", 250
STEEP, LR = 0.3, 1.0  # a few unstable steps, and many
LIMIT = 1.2  # of the loss ratio, as in the paper
SOME = 1.0  # percent of unstable steps
MOST = 100.0  # what counts for the ratio of a loss that is not finite
FIELDS = {
    "model.positions": "learned",
    "model.context": 64,
    "batch": 64,
    "optim.weight_decay": 0.01,
    "optim.independent_decay": False,
    "schedule.lr.floor": STEEP / 15,
    "eval_batches": 8,
    "watch.every": 2,
}
ALWAYS = ("warmup=0.2",)  # of the learning rate: 50 steps
Number = Callable[[Analysis], float]


def average(found: Evidence, arm: str, number: Number, lr: float = LR, size: str = SIZE) -> float | None:
    """Mean over the seeds; None if runs are missing."""
    return mean(number(run) for run in found.analyses(arm, size, lr)) if found.curve(arm, size) else None


def floor(found: Evidence, arm: str, lr: float, size: str = SIZE) -> float | None:
    """The noise of an arm, from a learning rate at which it trains."""
    return average(found, arm, noise, lr, size)


def unstable(run: Analysis, floor: float) -> float:
    """Percent of the steps."""
    return 100 * run.ratios.above(LIMIT * floor) / max(len(run.ratios.ratios), 1)


def noise(run: Analysis) -> float:
    ratios = run.ratios.ratios
    tail = ratios[len(ratios) - len(ratios) // 5 :]
    tail = tail[np.isfinite(tail)]
    return float(np.quantile(tail, 0.95) / max(tail.min(), 1.0)) if len(tail) else 1.0


def highest(run: Analysis) -> float:
    """The largest loss ratio."""
    return min(run.ratios.highest, MOST)


def above_noise(run: Analysis, floor: float) -> float:
    """The largest loss ratio over the noise."""
    return highest(run) / floor


def over_floor(
    found: Evidence, arm: str, number: Callable[[Analysis, float], float], lr: float, quiet: float, size: str = SIZE
) -> float | None:
    """Mean over the seeds of a number that needs the noise of the arm; `quiet` is the learning rate that has it."""
    least = floor(found, arm, quiet, size)
    return None if least is None else average(found, arm, lambda run: number(run, least), lr, size)


def early_variance(run: Analysis) -> float:
    """The largest √v in the first tenth of the run."""
    return run.variance["var_max"].highest(0.1) if "var_max" in run.variance else math.nan


def ratio_line(name: str, run: Analysis) -> Line:
    """The loss ratio over the run: the largest of every hundredth part, so that no spike is left out."""
    parts = np.array_split(np.minimum(run.ratios.ratios, MOST), min(100, max(len(run.ratios.ratios), 1)))
    ends = np.cumsum([len(part) for part in parts])
    return Line(name, [int(x) for x in ends], [float(part.max()) for part in parts if len(part)])


def ratio_table(found: Evidence, arms: Sequence[tuple[str, float]], size: str = SIZE) -> Table:
    """The paper's counts, with the noise beside them; means over the seeds."""
    limits = (1.1, 1.2, 1.5)
    columns = ("arm", "lr", "steps", *(f"above {x}" for x in limits), "largest", "noise", "√v max, first tenth")
    numbers: list[Number] = [
        lambda run: len(run.ratios.ratios),
        *(partial(_above, limit) for limit in limits),
        highest,
        noise,
        early_variance,
    ]
    rows = [(arm, lr, *(average(found, arm, number, lr, size) for number in numbers)) for arm, lr in arms]
    return Table("Loss ratios", columns, rows)


def _above(limit: float, run: Analysis) -> float:
    return run.ratios.above(limit)
