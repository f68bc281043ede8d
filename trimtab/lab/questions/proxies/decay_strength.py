"""Does more weight decay move the best learning rate up? Figure E.10 of Wortsman et al. 2023b.

In the paper it does, slightly. The decay is independent of the learning rate; a tenth and ten times of the usual one.
The best learning rate is also read between the points of the grid, from the parabola through the best three.

After a first run: with a tenth of the decay the best learning rate was 0.01, then the end of the grid, which now begins
at 0.003.
"""

from math import log10

import numpy as np

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, S, judge

ARMS = {"a tenth": ("weight-decay=0.1x",), "usual": (), "ten times": ("weight-decay=10x",)}
LRS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def check(found: Evidence) -> Checks:
    best = {arm: found.best_lr(arm, S) for arm in ARMS}
    yield judge("more decay does not lower the best learning rate", best, lambda *x: list(x) == sorted(x))
    between = {arm: _between(found, arm) for arm in ARMS}
    claim = (
        "between the points of the grid, the best learning rate is higher with ten times the decay than with a tenth"
    )
    yield judge(claim, between, lambda least, _, most: most > least)


def _between(found: Evidence, arm: str) -> float | None:
    """The lowest point of a parabola of the loss over the logarithm of the learning rate; at an end, the end."""
    curve = found.curve(arm, S)
    if curve is None:
        return None
    at = curve.lrs.index(curve.best_lr)
    if at in (0, len(curve.lrs) - 1):
        return curve.best_lr
    x = [log10(lr) for lr in curve.lrs[at - 1 : at + 2]]
    a, b, _ = np.polyfit(x, curve.loss[at - 1 : at + 2], 2)
    return float(10 ** (-b / (2 * a))) if a > 0 else curve.best_lr


QUESTION = Question("decay-strength", __doc__, ARMS, check, sizes=(S,), lrs=LRS, always=STEADIED)
