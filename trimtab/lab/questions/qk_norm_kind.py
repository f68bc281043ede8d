"""Should queries and keys be normalised head by head, or all heads together? Figure E.8 of Wortsman et al. 2023b.

The paper's kind is `shared`: each head by itself, one gain for all. Others report that gains of each head's own do
better, so that kind is here too.
"""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import Check, M, Seen, ask, judge
from trimtab.lab.study import Study

NAME = "qk-norm-kind"
ARMS = {kind: (f"qk-norm={kind}", "z-loss") for kind in ("shared", "per-head", "whole")}


def study() -> Study:
    """About 8 minutes on two cores."""
    return ask(NAME, "Which kind of qk-norm is best?", arms=ARMS)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    noise = max(seen.noise("shared"), seen.noise("whole"))
    checks = []
    for kind in ("shared", "per-head"):
        losses = {arm: seen.best(arm) for arm in (kind, "whole")}
        claim = f"at {M} `{kind}` is no worse than `whole`, beyond what seeds differ"
        checks.append(judge(claim, losses, lambda a, b: a <= b + noise, note=f"seeds differ by {noise:.2g}"))
    return checks
