"""Does a long memory of the second moment cause spikes, and does StableAdamW prevent them? Wortsman et al. 2023a, 3.

No clipping: it would hide what is asked for.
"""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import Check, M, Seen, ask, judge, mean
from trimtab.lab.study import Study

NAME = "beta2"
ARMS = {
    "beta2 0.95": ("beta2=0.95",),
    "beta2 0.99": ("beta2=0.99",),
    "beta2 0.999": ("beta2=0.999",),
    "beta2 0.999, stable": ("beta2=0.999", "stable-adamw"),
}
LRS = (3e-3, 1e-2, 3e-2, 1e-1)


def study() -> Study:
    """About 6 minutes on two cores."""
    return ask(NAME, "What causes spikes, and what prevents them?", arms=ARMS, lrs=LRS, always=("no-clip",))


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    spikes = {arm: _spikes(seen, arm) for arm in ARMS}
    losses = {arm: seen.best(arm) for arm in ("beta2 0.999", "beta2 0.999, stable")}
    ends = {arm: spikes[arm] for arm in ("beta2 0.95", "beta2 0.999")}
    cure = {arm: spikes[arm] for arm in losses}
    return [
        judge("a longer memory has more spikes", ends, lambda a, b: b > a, note="spikes per run"),
        judge("StableAdamW has fewer", cure, lambda a, b: b < a, note="spikes per run"),
        judge("and its best loss is no worse, within 1%", losses, lambda a, b: b <= 1.01 * a),
    ]


def _spikes(seen: Seen, arm: str) -> float | None:
    """Per run, over all learning rates."""
    return mean([float(len(run.spikes)) for run in seen.runs(arm, M)]) if seen.curve(arm) else None
