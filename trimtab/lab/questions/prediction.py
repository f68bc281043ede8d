"""Do small models foretell the attention logits of a larger one? Figure 9 of Wortsman et al. 2023b.

One fit per learning rate over the smaller sizes; the largest is predicted and measured.
"""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import Check, L, Seen, ask, judge
from trimtab.lab.study import Study
from trimtab.report.sentences import critical_words

NAME = "prediction"
SIZES = ("2x16", "2x32", "3x48", "3x64", "3x96", L)
LRS = (0.01, 0.03, 0.1, 0.3)


def study() -> Study:
    """About 10 minutes on two cores."""
    question = "Can the logits of a larger model be foretold?"
    return ask(NAME, question, arms={"plain": ()}, sizes=SIZES, lrs=LRS)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    there = all(seen.runs("plain", size, lr) for size in SIZES for lr in LRS)
    fits = [fit for fit in findings.fits if (fit.study, fit.signal) == (NAME, "logit_max")]
    factors = {f"{fit.lr:g}": fit.backtest.factor for fit in fits if fit.backtest is not None} if there else {}
    critical = findings.critical
    whole = len(factors) == len(LRS)
    return [
        judge(
            f"the largest logit of {L} is foretold within 3 times at every learning rate",
            dict(factors) if whole else {},
            lambda *x: max(x) <= 3,
            note="times off, by learning rate",
        ),
        judge(
            "the runs themselves show the logit above which training fails",
            {"critical logit": critical.value} if whole else {},
            lambda x: critical.measured,
            note=critical_words(critical),
        ),
    ]
