"""When is eps too large? Figures 11 to 13 of Wortsman et al. 2023b.

With r the root mean square of the gradient, an update is r / (r + eps) of its intended size. The gradients of small
models are far above 1e-8, so larger values of eps are tried.
"""

from math import log10

import numpy as np

from trimtab.lab.questions.question import (
    STEADIED,
    XS,
    Checks,
    Evidence,
    M,
    Question,
    S,
    Values,
    falls,
    judge,
    known,
    mean,
)

SIZES = (XS, S, M)
EPS = (1e-15, 1e-8, 1e-6, 1e-4, 1e-2)
ARMS = {f"eps {eps:g}": (f"eps={eps:g}",) for eps in EPS}
SMALLEST, DEFAULT, *_, LARGEST = ARMS


def check(found: Evidence) -> Checks:
    yield judge(
        "gradients shrink with the size and with the learning rate",
        _slopes(found),
        lambda size, lr: size < 0 and lr < 0,
        note="decades per decade",
    )
    yield judge(
        f"at {M} and learning rate 0.01 updates shrink to r / (r + eps), within 30%",
        {f"{eps:g}": _shrinkage(found, eps) for eps in EPS[1:]},
        lambda *x: all(0.7 <= ratio <= 1.3 for ratio in x),
        note="measured / expected, by eps",
    )
    yield judge("an eps above the gradients increases the loss", found.best(LARGEST, SMALLEST), falls)


def _slopes(found: Evidence) -> Values:
    """Least squares of log r over log size and log learning rate, jointly."""
    runs = [run for size in SIZES for run in found.runs(DEFAULT, size) if run.params and run.grad_rms > 0]
    if len({run.params for run in runs}) < 2 or len({run.lr for run in runs}) < 2:
        return {"size": None, "learning rate": None}
    x = np.array([(log10(run.params or 1), log10(run.lr), 1.0) for run in runs])
    slopes = np.linalg.lstsq(x, np.array([log10(run.grad_rms) for run in runs]), rcond=None)[0]
    return {"size": known(float(slopes[0])), "learning rate": known(float(slopes[1]))}


def _shrinkage(found: Evidence, eps: float) -> float | None:
    """Updates with this eps relative to those with the smallest, divided by the expected ratio."""
    runs = found.runs(f"eps {eps:g}", M, 0.01)
    r, update = mean(run.grad_rms for run in runs), mean(run.update_rms for run in runs)
    full = mean(run.update_rms for run in found.runs(SMALLEST, M, 0.01))
    return None if not r or not full or update is None else update / full * (r + eps) / r


QUESTION = Question("eps", __doc__, ARMS, check, sizes=SIZES, lrs=(3e-3, 1e-2, 3e-2, 1e-1), always=STEADIED)
