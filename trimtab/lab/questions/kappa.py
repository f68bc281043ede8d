"""How large may attention logits be before they do harm? Figure 10 of Wortsman et al. 2023b.

Queries and keys are given a size, kappa, whatever they have learned; logits are then about as large. Beside it a model
without layers: what attention and MLPs are worth at all.
"""

from dataclasses import replace
from itertools import pairwise

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import Check, S, Seen, ask, judge
from trimtab.lab.sizes import Size
from trimtab.lab.study import Study

NAME = "kappa"
KAPPAS = (1, 10, 100, 1_000, 10_000, 100_000)
ARMS = {f"kappa {kappa}": (f"kappa={kappa}",) for kappa in KAPPAS}
NO_LAYERS = Size("0x32", depth=0, width=32, heads=2)
NOISE = 0.01  # share of a loss that seeds of such models differ by


def study() -> Study:
    """About 3 minutes on two cores."""
    question = "From which size on do attention logits do harm?"
    made = ask(NAME, question, arms=ARMS, sizes=(S,), lrs=(3e-3, 1e-2, 3e-2))
    return replace(made, sizes=(*made.sizes, NO_LAYERS))


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    losses = {f"{kappa:g}": seen.best(arm, S) for kappa, arm in zip(KAPPAS, ARMS, strict=True)}
    first, *_, last = ARMS
    ends = {"largest kappa": seen.best(last, S), "no layers": seen.best(first, NO_LAYERS.name)}
    return [
        judge("the loss does not fall as kappa grows", losses, _rises, note="loss by kappa"),
        judge("kappa 1000 costs loss", {"1": losses["1"], "1000": losses["1000"]}, lambda a, b: b > (1 + NOISE) * a),
        judge("the largest is worse than no layers at all", ends, lambda a, b: a > b),
    ]


def _rises(*values: float) -> bool:
    return all(b >= (1 - NOISE) * a for a, b in pairwise(values))
