"""Do the output logits drift when nothing holds them, and does z-loss stop it?

Figures 3 and 4 of Wortsman et al. 2023b: no decay, no z-loss. In 32 bits the loss does not see a common shift of all
logits, so there the drift does no harm; with 16 bits it should.
"""

from trimtab.analysis.findings import Findings, Result
from trimtab.lab.questions.asking import Check, S, Seen, ask, judge, known, mean
from trimtab.lab.study import Study

NAME = "z-loss"
LR = 0.1
ARMS = {"free": (), "z-loss": ("z-loss",), "free, 16 bits": ("bfloat16",), "z-loss, 16 bits": ("z-loss", "bfloat16")}


def study() -> Study:
    """About 5 minutes on two cores; more where 16 bits are slower than 32."""
    always = ("qk-norm", "weight-decay=0")
    question = "Do output logits drift, and does z-loss stop it?"
    return ask(NAME, question, arms=ARMS, sizes=(S,), lrs=(LR,), steps=4000, always=always)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    free, held = ([run.logz for run in seen.runs(arm, S, LR) if run.logz] for arm in ("free", "z-loss"))
    drift = mean([max(abs(value - points[0][1]) for _, value in points) for points in free])
    ends = mean([abs(points[-1][1]) for points in held])
    losses = {arm: _loss(seen.runs(arm, S, LR)) for arm in ("free, 16 bits", "z-loss, 16 bits")}
    return [
        judge("without z-loss logZ drifts by more than 5", {"nats": drift}, lambda x: x > 5),
        judge("with z-loss it ends within 1 of zero", {"|logZ|": ends}, lambda x: x < 1),
        judge("in 16 bits the loss is worse without z-loss", losses, lambda a, b: a > b),
    ]


def _loss(runs: list[Result]) -> float | None:
    """A run that broke counts as it was before training."""
    value = mean([run.score for run in runs])
    return None if value is None else known(value)
