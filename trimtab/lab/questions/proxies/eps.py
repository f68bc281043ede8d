"""Do gradients shrink until Adam's eps is too large? Figures 11 to 13, E.12, E.13, E.15, C.1 of Wortsman et al. 2023b.

The paper: outputs of the blocks grow with the learning rate, so gradients shrink, with the size too, to eps = 1e-8.
With r the root mean square of the gradient, an update is r / (r + eps) of its intended size. The gradients of small
models are far above 1e-8, so larger values of eps are tried. Gradients and updates are those of the first MLP matrix;
queries, keys and values are one matrix here, which stands for the projection of the keys.

After the runs: the slopes are between two learning rates, and at the higher one the loss has risen in all sizes. The
claim about outputs was made stricter: that they grow twice as fast with the learning rate as with the size held, but in
the paper they do not depend on the size, and here they do. eps 1e-6 was added.
"""

from collections.abc import Callable, Iterator
from math import log10, nan

import numpy as np

from trimtab.analysis.answers import Figure
from trimtab.analysis.findings import Result
from trimtab.lab.questions.proxies.figures import against_size
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
LRS = (0.03, 0.3)
ARMS = {f"eps {eps:g}": (f"eps={eps:g}",) for eps in EPS}
SMALLEST, DEFAULT, *_, LARGEST = ARMS
BLOCK = 1  # whose output is compared between sizes: all have it
EQUAL = 2  # times as large at one size as at another: not more
Number = Callable[[Result], float]


def check(found: Evidence) -> Checks:
    claims: dict[str, Number] = {
        "gradients": lambda run: run.grad_rms,
        "gradients of queries, keys and values": lambda run: run.qkv_grad_rms,
    }
    for name, value in claims.items():
        claim = f"{name} shrink with the size and with the learning rate"
        slopes = _slopes(found, value)
        yield judge(claim, slopes, lambda size, lr: size < 0 and lr < 0, note="decades per decade")
    for lr in LRS:
        yield judge(
            f"at {M} and learning rate {lr:g} updates shrink to r / (r + eps), within 30%",
            {f"{eps:g}": _shrinkage(found, eps, lr) for eps in EPS[1:]},
            lambda *x: all(0.7 <= ratio <= 1.3 for ratio in x),
            note="measured / expected, by eps",
        )
    yield judge("an eps above the gradients increases the loss", found.best(LARGEST, SMALLEST), falls)
    yield from _outputs(found)


def _outputs(found: Evidence) -> Checks:
    slope = {"learning rate": _slopes(found, _output)["learning rate"]}
    claim = "outputs of a block grow with the learning rate"
    yield judge(claim, slope, lambda x: x > 0, note="decades per decade")
    sizes = {size: mean(map(_output, found.runs(DEFAULT, size, LRS[0]))) for size in SIZES}
    claim = (
        f"at learning rate {LRS[0]:g} the outputs of a block differ between the sizes by at most a factor of {EQUAL}"
    )
    yield judge(claim, sizes, lambda *x: max(x) <= EQUAL * min(x))
    deep = [run for run in found.runs(DEFAULT, M, LRS[0]) if len(run.outs) > BLOCK + 1]
    last = {f"block {i}": mean(run.outs[i] for run in deep) for i in range(BLOCK + 2)}
    claim = f"at {M} and learning rate {LRS[0]:g} outputs grow from block to block"
    yield judge(claim, last, lambda *x: list(x) == sorted(x))


def _output(run: Result) -> float:
    return run.outs[BLOCK] if len(run.outs) > BLOCK else nan


def _slopes(found: Evidence, value: Number) -> Values:
    """Least squares of the logarithm over log size and log learning rate, jointly."""
    runs = [run for size in SIZES for run in found.runs(DEFAULT, size) if run.params and value(run) > 0]
    if len({run.params for run in runs}) < len(SIZES) or len({run.lr for run in runs}) < len(LRS):
        return {"size": None, "learning rate": None}
    x = np.array([(log10(run.params or 1), log10(run.lr), 1.0) for run in runs])
    slopes = np.linalg.lstsq(x, np.array([log10(value(run)) for run in runs]), rcond=None)[0]
    return {"size": known(float(slopes[0])), "learning rate": known(float(slopes[1]))}


def _shrinkage(found: Evidence, eps: float, lr: float) -> float | None:
    """Updates with this eps relative to those with the smallest, divided by the expected ratio."""
    runs = found.runs(f"eps {eps:g}", M, lr)
    r, delta = mean(run.grad_rms for run in runs), mean(run.delta_rms for run in runs)
    full = mean(run.delta_rms for run in found.runs(SMALLEST, M, lr))
    return None if not r or not full or delta is None else delta / full * (r + eps) / r


def figures(found: Evidence) -> Iterator[Figure]:
    rows: dict[str, tuple[str, Number, list[str]]] = {
        "gradients": ("Gradient of the first MLP matrix", lambda run: run.grad_rms, [DEFAULT, LARGEST]),
        "qkv-gradients": ("Gradient of queries, keys and values", lambda run: run.qkv_grad_rms, [DEFAULT]),
        "updates": ("Update of the first MLP matrix over the learning rate", lambda run: run.delta_rms, [*ARMS]),
        "outputs": ("Output of the second block", _output, [DEFAULT]),
    }
    for name, (title, value, arms) in rows.items():
        yield against_size(found, value, arms, SIZES, LRS, name=name, title=title, y="root mean square")


QUESTION = Question("eps", __doc__, ARMS, check, sizes=SIZES, lrs=LRS, always=STEADIED, figures=figures)
