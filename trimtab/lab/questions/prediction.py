"""Can the attention logits of a larger model be predicted? Figure 9 of Wortsman et al. 2023b.

One fit per learning rate over the smaller sizes; the largest size is predicted and measured.
"""

from trimtab.lab.questions.question import Checks, Evidence, L, Question, judge
from trimtab.report.sentences import critical_words

SIZES = ("2x16", "2x32", "3x48", "3x64", "3x96", L)
LRS = (0.01, 0.03, 0.1, 0.3)


def check(found: Evidence) -> Checks:
    findings = found.findings
    complete = all(found.runs("plain", size, lr) for size in SIZES for lr in LRS)
    fits = [fit for fit in findings.fits if (fit.study, fit.signal) == (found.study, "logit_max") and complete]
    factors = {f"{fit.lr:g}": fit.backtest.factor for fit in fits if fit.backtest is not None}
    if len(factors) < len(LRS):
        factors = {}
    claim = f"the forecast of the largest logit of {L} is within a factor of 3 at every learning rate"
    yield judge(claim, dict(factors), lambda *x: max(x) <= 3, note="factor by learning rate")
    critical = findings.critical
    yield judge(
        "the runs show the logit above which training fails",
        {"critical logit": critical.value} if factors else {},
        lambda _: critical.measured,
        note=critical_words(critical),
    )


QUESTION = Question("prediction", __doc__, {"plain": ()}, check, sizes=SIZES, lrs=LRS)
