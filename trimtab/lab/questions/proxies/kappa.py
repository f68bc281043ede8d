"""How large must attention logits be to increase the loss? Figure 10 of Wortsman et al. 2023b.

Queries and keys are rescaled to the size kappa, so that the logits are about as large. For comparison, a model without
layers shows the contribution of attention and MLPs. The paper: 1000 hurts, 10,000 is worse than no layers.

After the runs: the loss falls again from 10,000 to 100,000, by more than seeds differ. The margin of the last claim,
1.2 %, is hardly larger than the range over the seeds, 0.9 %; at 10,000 it is 5 %.
"""

from collections.abc import Iterator
from itertools import pairwise

from trimtab.analysis.answers import Figure, Line, Panel
from trimtab.lab.questions.question import Checks, Evidence, Question, S, falls, judge

KAPPAS = (1, 10, 100, 1_000, 10_000, 100_000)
RESCALED = {f"kappa {kappa}": (f"kappa={kappa}",) for kappa in KAPPAS}
ARMS = {**RESCALED, "no layers": ("no-layers",)}
NOISE = 0.01  # relative difference between the losses of seeds


def check(found: Evidence) -> Checks:
    losses, last = found.best(*RESCALED, size=S), f"kappa {KAPPAS[-1]}"
    yield judge("the loss does not fall as kappa grows", losses, _rises)
    pair = {arm: losses[arm] for arm in ("kappa 1", "kappa 1000")}
    yield judge("kappa 1000 increases the loss", pair, lambda a, b: b > (1 + NOISE) * a)
    yield judge("the largest kappa is worse than no layers", found.best(last, "no layers", size=S), falls)


def _rises(*values: float) -> bool:
    return all(b >= (1 - NOISE) * a for a, b in pairwise(values))


def figures(found: Evidence) -> Iterator[Figure]:
    losses, nothing = found.best(*RESCALED, size=S), found.best("no layers", size=S)
    lines = [
        Line(f"{S}, with kappa", KAPPAS, [*losses.values()]),
        Line("no layers", KAPPAS, [*nothing.values()] * len(KAPPAS)),
    ]
    yield Figure(
        name="kappa",
        title="Loss at the best learning rate against the size of the attention logits",
        x="kappa",
        y="validation loss",
        panels=[Panel(S, lines)],
        log_x=True,
    )


QUESTION = Question("kappa", __doc__, ARMS, check, sizes=(S,), lrs=(3e-3, 1e-2, 3e-2), figures=figures)
