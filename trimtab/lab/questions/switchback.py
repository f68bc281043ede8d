"""Do quantized linear layers train as steadily as float ones? Wortsman et al. 2023a, sections 2 and 3.

There one scale per tensor in float8 diverges at a billion weights, SwitchBack does not, and branches that start at
zero (layer-scale) save the former. At this size all may train; then the losses differ by little.
"""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import STEADIED, Check, Seen, ask, judge
from trimtab.lab.study import Study

NAME = "switchback"
ARMS = {
    "float": (),
    "switchback": ("switchback",),
    "llm-int8": ("llm-int8",),
    "fp8-switchback": ("fp8-switchback",),
    "fp8-tensorwise": ("fp8-tensorwise",),
    "fp8-tensorwise, layer-scale": ("fp8-tensorwise", "layer-scale=0"),
}
LRS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def study() -> Study:
    """About 12 minutes of float layers on two cores; quantized ones this small take about twice as long."""
    return ask(NAME, "Which linear layers train as steadily as float?", arms=ARMS, lrs=LRS, always=STEADIED)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    losses = {arm: seen.best(arm) for arm in ARMS}
    checks = []
    for arm in ("switchback", "fp8-switchback"):
        sensitivities = {name: seen.sensitivity(name) for name in ("float", arm)}
        checks += [
            judge(
                f"{arm}: the best loss is within 1% of float", pick(losses, "float", arm), lambda a, b: b <= 1.01 * a
            ),
            judge(f"{arm}: no more than 25% more sensitive", sensitivities, lambda a, b: b <= 1.25 * a),
        ]
    names = ("switchback", "llm-int8")
    checks.append(judge("switchback is no worse than llm-int8", pick(losses, *names), lambda a, b: a <= 1.005 * b))
    names = ("fp8-switchback", "fp8-tensorwise")
    claim = "a scale per row in float8 is no worse than one per tensor"
    return [*checks, judge(claim, pick(losses, *names), lambda a, b: a <= 1.005 * b)]


def pick(values: dict[str, float | None], *names: str) -> dict[str, float | None]:
    return {name: values[name] for name in names}
