"""Is the softmax to blame for attention-logit growth? Figure E.11 of Wortsman et al. 2023b.

Squared ReLU in its place has nothing to saturate; the paper sees the logits grow all the same.
"""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import Check, M, Seen, ask, growth, judge, mean
from trimtab.lab.study import Study

NAME = "attention"
ARMS = {"softmax": (), "squared relu": ("attention=squared-relu",)}
LRS = (0.01, 0.1, 0.3)


def study() -> Study:
    """About 3 minutes on two cores."""
    return ask(NAME, "Do attention logits grow without a softmax too?", arms=ARMS, lrs=LRS)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    checks = []
    for arm in ARMS:
        times = {
            f"{lr:g}": mean([growth(run.logits) or float("nan") for run in seen.runs(arm, M, lr)]) for lr in LRS[1:]
        }
        claim = f"with {arm} the largest logit grows ten times at high learning rates"
        checks.append(judge(claim, times, lambda *x: max(x) >= 10, note="times, by learning rate"))
    return checks
