"""Does attention-logit growth break high learning rates, earlier in larger models, and does qk-norm cure it?

Figures 1 and 2 of Wortsman et al. 2023b.
"""

from trimtab.analysis.findings import Findings, Points
from trimtab.lab.questions.asking import XS, Check, M, S, Seen, ask, growth, judge, mean
from trimtab.lab.study import Study

NAME = "qk-norm"
SIZES = (XS, S, M)
HIGH = (0.1, 0.3)


def study() -> Study:
    """About 9 minutes on two cores."""
    return ask(
        NAME, "Does qk-norm steady high learning rates?", arms={"plain": (), "qk-norm": ("qk-norm",)}, sizes=SIZES
    )


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    sensitivities = {arm: seen.sensitivity(arm) for arm in ("plain", "qk-norm")}
    return [
        judge(
            f"at {M} the sensitivity without qk-norm is at least 1.5 times that with it",
            sensitivities,
            lambda off, on: off >= 1.5 * on,
        ),
        _same_below(seen),
        _failing(seen),
        *(check for lr in HIGH for check in _logits(seen, lr)),
    ]


def _same_below(seen: Seen) -> Check:
    claim = "below the first failure both have the same loss, within 2%"
    off, on = seen.curve("plain"), seen.curve("qk-norm")
    if off is None or on is None or off.lrs != on.lrs:
        return Check(claim, None, "not enough finished runs")
    end = off.failing_lr or max(off.lrs) * 2
    apart = {f"{lr:g}": b / a - 1 for lr, a, b in zip(off.lrs, off.loss, on.loss, strict=True) if lr < end}
    return judge(claim, apart, lambda *shares: max(map(abs, shares)) < 0.02, note="share by learning rate")


def _failing(seen: Seen) -> Check:
    """A size at which nothing fails counts as failing above the grid."""
    curves = {size: seen.curve("plain", size) for size in SIZES}
    rates = {size: (curve.failing_lr or 2 * max(curve.lrs)) if curve else None for size, curve in curves.items()}
    claim = "without qk-norm the first failing learning rate does not grow with the size, and the largest has one"
    top = max((max(curve.lrs) for curve in curves.values() if curve), default=0.0)
    return judge(claim, rates, lambda *r: list(r) == sorted(r, reverse=True) and r[-1] <= top)


def _logits(seen: Seen, lr: float) -> list[Check]:
    off, on = seen.runs("plain", M, lr), seen.runs("qk-norm", M, lr)
    grown = mean([growth(run.logits) or float("nan") for run in off])
    tops = {name: mean([top(run.logits) for run in runs]) for name, runs in (("plain", off), ("qk-norm", on))}
    leads = [steps for run in off if (steps := lead(run.logits, run.losses)) is not None]
    at = f"at {M} and a learning rate of {lr:g}"
    return [
        judge(f"{at} the largest attention logit grows ten times without qk-norm", {"times": grown}, lambda x: x >= 10),
        judge(f"{at} it stays ten times lower with qk-norm", tops, lambda a, b: a >= 10 * b),
        judge(f"{at} it grows before the loss rises", {"steps ahead": mean(leads)}, lambda x: x > 0),
    ]


def top(points: Points) -> float:
    return max((value for _, value in points), default=float("nan"))


def lead(logits: Points, losses: Points) -> float | None:
    """Steps from when the logits are ten times the first to when the loss is 5% above its lowest, if both happen."""
    values = [(step, value) for step, value in logits if value > 0]
    grown = next((step for step, value in values if value >= 10 * values[0][1]), None)
    lowest, risen = float("inf"), None
    for i in range(4, len(losses)):
        # Means of five: single batches differ by more than 5%.
        now = sum(value for _, value in losses[i - 4 : i + 1]) / 5
        lowest = min(lowest, now)
        if now > 1.05 * lowest:
            risen = losses[i][0]
            break
    return None if grown is None or risen is None else float(risen - grown)
