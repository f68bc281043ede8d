"""Does 8-bit optimizer state make a recipe more sensitive? Dettmers et al. 2022, asked with the sensitivity of P3.

Tensors of fewer than 4096 values keep 32 bits, so the model is one whose matrices are larger.
"""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import STEADIED, Check, M, Seen, ask, judge
from trimtab.lab.study import Study

NAME = "eight-bits"
ARMS = {
    "32 bits": (),
    "8 bits": ("8-bit",),
    "8 bits, dynamic table": ("8-bit=dynamic:256",),
    "8 bits, stable embedding": ("8-bit", "stable-embedding"),
}


def study() -> Study:
    """About 11 minutes on two cores."""
    return ask(NAME, "Is 8-bit state as steady as 32-bit?", arms=ARMS, always=STEADIED)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    checks = []
    for arm in list(ARMS)[1:]:
        sensitivities = {name: seen.sensitivity(name) for name in ("32 bits", arm)}
        losses = {name: seen.best(name) for name in ("32 bits", arm)}
        at = f"{arm}, at {M}"
        checks += [
            judge(f"{at}: no more than 25% more sensitive", sensitivities, lambda a, b: b <= 1.25 * a),
            judge(f"{at}: the best loss is within 1%", losses, lambda a, b: b <= 1.01 * a),
        ]
    return checks
