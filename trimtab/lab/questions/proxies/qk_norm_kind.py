"""Which kind of qk-norm is best: per head, or all heads together? Figure E.8 of Wortsman et al. 2023b.

The paper uses `shared`: each head by itself, one gain for all. Others report better results with a gain per head.

After the runs: the losses of `per-head` and `whole` are equal, and `shared` is better than both by 1 %, about as much
as seeds of one arm differ.
"""

from trimtab.lab.questions.question import Checks, Evidence, M, Question, judge

KINDS = ("shared", "per-head", "whole")
LRS = (0.01, 0.03, 0.1)


def check(found: Evidence) -> Checks:
    noise = max(found.noise("shared"), found.noise("whole"))
    for kind in KINDS[:2]:
        claim = f"at {M} `{kind}` is not worse than `whole` by more than the difference between seeds"
        losses = found.best(kind, "whole")
        yield judge(claim, losses, lambda a, b: a <= b + noise, note=f"seeds differ by {noise:.2g}")


ARMS = {kind: (f"qk-norm={kind}", "z-loss") for kind in KINDS}
QUESTION = Question("qk-norm-kind", __doc__, ARMS, check, lrs=LRS)
