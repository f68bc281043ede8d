"""Does qk-norm stabilise high learning rates? Figures 1, 2 and E.1 of Wortsman et al. 2023b.

The paper: growing attention logits limit the learning rate, more so in larger models, and qk-norm prevents it. The
logits grow because queries and keys get longer, not because they align. As there, z-loss is on in both arms.

After the runs: below the edge of stability the losses differ because qk-norm is 2 to 6 % better there. The sensitivity
as a whole falls with the size, because small models are too slow at low learning rates in short runs. Its part above
the best learning rate grows with the size; the figure of the sensitivity shows both.
"""

from collections.abc import Iterator
from math import inf, isfinite, nan

from trimtab.analysis.answers import Check, Figure
from trimtab.analysis.findings import Points
from trimtab.lab.questions.proxies.figures import logits_over_time, losses_over_time, sensitivity_figure
from trimtab.lab.questions.question import XS, Checks, Evidence, M, Question, S, growth, judge, largest, mean

ARMS = {"plain": (), "qk-norm": ("qk-norm",)}
SIZES = (XS, S, M)
HIGH = (0.1, 0.3)


def check(found: Evidence) -> Checks:
    claim = f"at {M} the sensitivity without qk-norm is at least 1.5 times that with it"
    yield judge(claim, found.sensitivity(*ARMS), lambda off, on: off >= 1.5 * on)
    yield _same_below(found)
    yield _failing(found)
    for lr in HIGH:
        yield from _logits(found, lr)
    yield from _lengths(found)


def _same_below(found: Evidence) -> Check:
    claim = "below the first failing learning rate the losses differ by at most 2%"
    off, on = (found.curve(arm) for arm in ARMS)
    if off is None or on is None or off.lrs != on.lrs:
        return Check(claim, None, "not enough finished runs")
    end = off.failing_lr or max(off.lrs) * 2
    shares = {f"{lr:g}": b / a - 1 for lr, a, b in zip(off.lrs, off.loss, on.loss, strict=True) if lr < end}
    return judge(claim, shares, lambda *x: max(map(abs, x)) < 0.02, note="relative difference by learning rate")


def _failing(found: Evidence) -> Check:
    """A size without a failure counts as failing above the grid."""
    curves = {size: found.curve("plain", size) for size in SIZES}
    first = {size: (curve.failing_lr or 2 * max(curve.lrs)) if curve else None for size, curve in curves.items()}
    claim = "without qk-norm the first failing learning rate does not grow with the size, and the largest size has one"
    top = max((max(curve.lrs) for curve in curves.values() if curve), default=0.0)
    return judge(claim, first, lambda *x: list(x) == sorted(x, reverse=True) and x[-1] <= top)


def _logits(found: Evidence, lr: float) -> Checks:
    off, on = (found.runs(arm, M, lr) for arm in ARMS)
    at = f"at {M} and learning rate {lr:g}"
    factor = {"factor": mean(growth(run.logits) for run in off)}
    yield judge(f"{at} the largest attention logit grows tenfold without qk-norm", factor, lambda x: x >= 10)
    tops = {arm: mean(largest(run.logits) for run in runs) for arm, runs in zip(ARMS, (off, on), strict=True)}
    yield judge(f"{at} the largest attention logit is ten times lower with qk-norm", tops, lambda a, b: a >= 10 * b)
    leads = [steps for run in off if (steps := lead(run.logits, run.losses)) is not None]
    yield judge(
        f"{at} the largest attention logit grows before the loss rises", {"steps ahead": mean(leads)}, lambda x: x > 0
    )


def _lengths(found: Evidence) -> Checks:
    """Growth from the first record to that of the largest logit, in the layer that has it."""
    runs = [run for run in found.runs("plain", M, HIGH[-1]) if run.lengths and run.logits]
    lengths, aligned, cosines = [], [], []
    for run in runs:
        peak = max(range(len(run.logits)), key=lambda i: run.logits[i][1] if isfinite(run.logits[i][1]) else -inf)
        at = dict(run.lengths)
        first, last = run.logits[0], run.logits[peak]
        if first[1] > 0 and at.get(first[0], 0) > 0 and last[0] in at:
            lengths.append(at[last[0]] / at[first[0]])
            aligned.append(last[1] / first[1] / lengths[-1])
            cosines.append(dict(run.cosines).get(last[0], nan))
    at_lr = f"at {M} and learning rate {HIGH[-1]:g}, without qk-norm,"
    claim = f"{at_lr} the lengths of queries and keys, multiplied, grow at least fivefold"
    yield judge(claim, {"factor": mean(lengths)}, lambda x: x >= 5)
    note = f"mean cosine of all pairs at the end {mean(cosines) or 0.0:.2g}"
    claim = f"{at_lr} the logits grow less than twice as much as the lengths: it is not the cosine"
    yield judge(claim, {"growth of the logits / of the lengths": mean(aligned)}, lambda x: x < 2, note=note)


def lead(logits: Points, losses: Points) -> float | None:
    """Steps from the logits at ten times the first to the loss at 5% above its lowest, if both happen."""
    values = [(step, value) for step, value in logits if value > 0]
    grown = next((step for step, value in values if value >= 10 * values[0][1]), None)
    lowest, risen = inf, None
    for i in range(4, len(losses)):
        now = sum(value for _, value in losses[i - 4 : i + 1]) / 5  # single batches differ by more than 5%
        lowest = min(lowest, now)
        if now > 1.05 * lowest:
            risen = losses[i][0]
            break
    return None if grown is None or risen is None else float(risen - grown)


def figures(found: Evidence) -> Iterator[Figure]:
    places = [(size, HIGH[-1]) for size in SIZES]
    yield sensitivity_figure(found, [*ARMS], SIZES)
    yield losses_over_time(found, places, [*ARMS])
    yield logits_over_time(found, places, [*ARMS])


QUESTION = Question("qk-norm", __doc__, ARMS, check, sizes=SIZES, always=("z-loss",), figures=figures)
