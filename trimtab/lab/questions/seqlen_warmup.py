"""Do short sequences at first steady a run, and better than small batches do? Li et al. 2022.

All arms see as many tokens. The model is plain: what is asked is whether the schedule alone helps.
"""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import Check, M, Seen, ask, judge, mean
from trimtab.lab.study import Study

NAME = "seqlen-warmup"
ARMS = {"full length": (), "sequence length": ("seqlen-warmup=0.3",), "batch": ("batch-warmup=0.3",)}
HIGH = (0.03, 0.1, 0.3)


def study() -> Study:
    """About 8 minutes on two cores."""
    return ask(NAME, "Does sequence length warmup steady a run?", arms=ARMS)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    names = ("full length", "sequence length")
    return [
        judge(
            "at high learning rates the loss jumps less with sequence length warmup",
            {arm: _jumps(seen, arm) for arm in names},
            lambda a, b: b < a,
            note="highest loss over the best before, mean",
        ),
        judge(f"at {M} it is less sensitive", {arm: seen.sensitivity(arm) for arm in names}, lambda a, b: b < a),
        judge(
            "its best loss is no worse, within 1%", {arm: seen.best(arm) for arm in names}, lambda a, b: b <= 1.01 * a
        ),
        judge(
            "it is no more sensitive than batch warm-up",
            {arm: seen.sensitivity(arm) for arm in ("batch", "sequence length")},
            lambda a, b: b <= a,
        ),
    ]


def _jumps(seen: Seen, arm: str) -> float | None:
    return mean([run.loss_ratio for lr in HIGH for run in seen.runs(arm, M, lr)]) if seen.curve(arm) else None
