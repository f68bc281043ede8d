"""When do gradients become too small for Adam's eps? Figures 11 to 13 of Wortsman et al. 2023b.

An update is about r / (r + eps) of what it should be, r the root mean square of the gradient. Tiny models have
gradients far above 1e-8, so eps goes up to them here instead.
"""

from math import log10

import numpy as np

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import STEADIED, XS, Check, M, S, Seen, ask, judge, known, mean
from trimtab.lab.study import Study

NAME = "eps"
SIZES = (XS, S, M)
LRS = (3e-3, 1e-2, 3e-2, 1e-1)
EPS = (1e-15, 1e-8, 1e-6, 1e-4, 1e-2)
ARMS = {f"eps {eps:g}": (f"eps={eps:g}",) for eps in EPS}
SMALL, USUAL, LARGE = f"eps {EPS[0]:g}", f"eps {EPS[1]:g}", f"eps {EPS[-1]:g}"


def study() -> Study:
    """About 13 minutes on two cores."""
    return ask(NAME, "When is eps too large?", arms=ARMS, sizes=SIZES, lrs=LRS, always=STEADIED)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    losses = {arm: seen.best(arm) for arm in (SMALL, LARGE)}
    return [
        judge(
            "gradients shrink with the size and with the learning rate",
            dict(zip(("decades per decade of size", "of learning rate"), _slopes(seen), strict=True)),
            lambda size, lr: size < 0 and lr < 0,
        ),
        judge(
            f"at {M} and a rate of 0.01 updates shrink to r / (r + eps), within 30%",
            {f"{eps:g}": _shrinkage(seen, eps) for eps in EPS[1:]},
            lambda *x: all(0.7 <= ratio <= 1.3 for ratio in x),
            note="measured over expected, by eps",
        ),
        judge("an eps above the gradients costs loss", losses, lambda small, large: large > small),
    ]


def _slopes(seen: Seen) -> tuple[float | None, float | None]:
    """Least squares of log r over log size and log learning rate, together."""
    rows = []
    for run in [run for size in SIZES for run in seen.runs(USUAL, size)]:
        if run.params and run.grad_rms > 0:
            rows.append((log10(run.params), log10(run.lr), 1.0, log10(run.grad_rms)))
    if len({row[0] for row in rows}) < 2 or len({row[1] for row in rows}) < 2:
        return None, None
    table = np.array(rows)
    found = np.linalg.lstsq(table[:, :3], table[:, 3], rcond=None)[0]
    return known(float(found[0])), known(float(found[1]))


def _shrinkage(seen: Seen, eps: float) -> float | None:
    """Updates with this eps over those with hardly any, over what the gradients let expect."""
    here, free = seen.runs(f"eps {eps:g}", M, 0.01), seen.runs(SMALL, M, 0.01)
    r = mean([run.grad_rms for run in here])
    update, whole = mean([run.update_rms for run in here]), mean([run.update_rms for run in free])
    return None if not r or not whole or update is None else update / whole * (r + eps) / r
