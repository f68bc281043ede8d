"""What causes loss spikes, and what prevents them? Wortsman et al. 2023a, section 3.

The paper: a slowly updated second moment causes them, StableAdamW prevents them. Gradient clipping would hide them, so
it is off.
"""

from trimtab.lab.questions.question import Checks, Evidence, Question, at_most, falls, judge, mean

ARMS = {f"beta2 {beta2}": [f"beta2={beta2}"] for beta2 in (0.95, 0.99, 0.999)}
ARMS["beta2 0.999, stable"] = ["beta2=0.999", "stable-adamw"]
LAST = ("beta2 0.999", "beta2 0.999, stable")


def check(found: Evidence) -> Checks:
    spikes = {arm: mean(len(r.spikes) for r in found.runs(arm)) if found.curve(arm) else None for arm in ARMS}
    ends = {arm: spikes[arm] for arm in ("beta2 0.999", "beta2 0.95")}
    yield judge("beta2 0.999 has more loss spikes than 0.95", ends, falls, note="spikes per run")
    yield judge("StableAdamW has fewer", {arm: spikes[arm] for arm in LAST}, falls, note="spikes per run")
    yield judge("its best loss is at most 1% higher", found.best(*LAST), at_most(1.01))


QUESTION = Question("beta2", __doc__, ARMS, check, lrs=(3e-3, 1e-2, 3e-2, 1e-1), always=("no-clip",), paper="P1")
