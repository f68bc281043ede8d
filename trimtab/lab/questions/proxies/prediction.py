"""Can the attention logits of a larger model, and its failure, be predicted? Figure 9 of Wortsman et al. 2023b.

A fit per learning rate over the smaller sizes, a parabola in log-log coordinates from four sizes on, else a line. Two
sizes are predicted, each from all that are smaller. A failure is predicted where the logit is above the critical value
of the smaller sizes; in the paper it is 10,000, and a 4.8B model was predicted to fail. A forecast must be better than
the rule that a size does what the next smaller one does.

The logits are those of steps 16 to 40. This window was chosen on earlier runs of 2x16, 2x32 and 3x64, where it
predicted 3x64 within 1.4 times and later steps did not; 3x96 and 4x128 are new.

After the runs the claims were made stricter: 3x64, on which the window was chosen, is no longer one of the predicted
sizes. The critical logit is that of the runs it separates, and a limit of the learning rate would separate nearly as
many of them.
"""

from collections.abc import Callable, Iterator, Mapping
from math import log10
from statistics import fmean

import numpy as np

from trimtab.analysis.answers import Figure, Line, Panel
from trimtab.analysis.findings import Curve, evaluate, geometric_mean, power10
from trimtab.analysis.fits import polynomial
from trimtab.analysis.forecasts import critical_of
from trimtab.lab.questions.question import Checks, Evidence, L, M, Question, judge
from trimtab.report.sentences import critical_words

SIZES = ("2x16", "2x32", "3x48", M, "3x96", L)
PREDICTED = (L, "3x96")
LRS = (0.03, 0.1, 0.3)
ARM = "plain"


def check(found: Evidence) -> Checks:
    for size in PREDICTED:
        claim = f"the forecast of the largest logit of {size} is within a factor of 3 at every learning rate"
        yield judge(claim, _factors(found, size), lambda *x: max(x) <= 3, note="factor by learning rate")
    right = _right(found)
    cells = len(PREDICTED) * len(LRS)
    claim = (
        f"at least {cells - 1} of {cells} larger models fail, or do not, as predicted from the smaller ones; "
        "both occur, and more are right than if each did what the next smaller one does"
    )
    like_smaller = None if right is None else _like_smaller(found)
    failed = (
        None if right is None else float(sum(_fails(found.curve(ARM, size), lr) for size in PREDICTED for lr in LRS))
    )
    values = {"right": right, "fail": failed, "as the next smaller one": like_smaller}
    yield judge(claim, values, lambda x, fail, same: x >= cells - 1 and 0 < fail < cells and x > same)
    errors = {"fit": _error(found, _predict), "logit of the next smaller one": _error(found, _same_logit)}
    claim = "the forecasts of the logits are closer than the logits of the next smaller sizes"
    yield judge(claim, errors, lambda fit, same: fit < same, note="mean error in powers of ten")
    complete = right is not None
    critical = found.findings.critical
    yield judge(
        "the runs show the logit above which training fails",
        {"critical logit": critical.value} if complete else {},
        lambda _: critical.measured,
        note=critical_words(critical),
    )


def _like_smaller(found: Evidence) -> float:
    """In how many cells a size fails, or does not, as the next smaller one does."""
    pairs = [(found.curve(ARM, SIZES[SIZES.index(size) - 1]), found.curve(ARM, size)) for size in PREDICTED]
    return float(sum(_fails(small, lr) == _fails(large, lr) for small, large in pairs for lr in LRS))


def _error(found: Evidence, forecast: Callable[[Evidence, str, float], float | None]) -> float | None:
    """Mean distance of the forecasts from the measured logits, in powers of ten."""
    cells = [(forecast(found, size, lr), _logits(found, lr).get(size)) for size in PREDICTED for lr in LRS]
    errors = [abs(log10(x / measured[1])) for x, measured in cells if x is not None and measured is not None]
    return fmean(errors) if len(errors) == len(cells) else None


def _same_logit(found: Evidence, size: str, lr: float) -> float | None:
    smaller = _logits(found, lr).get(SIZES[SIZES.index(size) - 1])
    return smaller[1] if smaller else None


def _factors(found: Evidence, size: str) -> Mapping[str, float | None]:
    """How many times too high or too low."""
    factors: dict[str, float | None] = {}
    for lr in LRS:
        measured, predicted = _logits(found, lr).get(size), _predict(found, size, lr)
        known = measured is not None and predicted is not None
        factors[f"{lr:g}"] = max(predicted / measured[1], measured[1] / predicted) if known else None  # type: ignore[operator,index]
    return factors


def _right(found: Evidence) -> float | None:
    """How many failures and successes are predicted."""
    curves = {size: found.curve(ARM, size) for size in SIZES}
    if not all(curves.values()):
        return None
    right = 0
    for size in PREDICTED:
        smaller = [x for one in SIZES[: SIZES.index(size)] if (x := curves[one]) is not None]
        critical = critical_of([run for x in smaller for run in found.runs(ARM, x.size)], smaller).value
        for lr in LRS:
            logit = _predict(found, size, lr)
            if logit is None:
                return None
            right += (logit > critical) == _fails(curves[size], lr)
    return float(right)


def _fails(curve: Curve | None, lr: float) -> bool:
    return curve is not None and curve.excess(lr, curve.loss[curve.lrs.index(lr)]) > 1


def _predict(found: Evidence, size: str, lr: float) -> float | None:
    """The logit of a size by the fit over all smaller ones."""
    logits = _logits(found, lr)
    smaller = [logits[one] for one in SIZES[: SIZES.index(size)] if one in logits]
    if size not in logits or len(smaller) < SIZES.index(size):
        return None
    fit = polynomial([params for params, _ in smaller], [logit for _, logit in smaller])
    return power10(evaluate(fit, log10(logits[size][0])))


def _logits(found: Evidence, lr: float) -> dict[str, tuple[int, float]]:
    """Parameters and largest logit early in the run, by size; the geometric mean over seeds."""
    cells = {size: found.runs(ARM, size, lr) for size in SIZES}
    means = {size: geometric_mean(run.logit_max for run in runs) for size, runs in cells.items()}
    return {size: (runs[0].params, means[size]) for size, runs in cells.items() if means[size] > 0 and runs[0].params}


def figures(found: Evidence) -> Iterator[Figure]:
    panels = []
    for lr in LRS:
        logits = list(_logits(found, lr).values())
        measured = Line("measured", [params for params, _ in logits], [logit for _, logit in logits])
        lines = [measured]
        if len(logits) == len(SIZES):
            held = len(SIZES) - 1
            fit = polynomial([params for params, _ in logits[:held]], [logit for _, logit in logits[:held]])
            x = np.geomspace(logits[0][0], 3 * logits[-1][0], 40).tolist()
            lines.append(Line(f"fit without {L}", x, [power10(evaluate(fit, log10(params))) for params in x]))
        panels.append(Panel(f"learning rate {lr:g}", lines))
    title = "Largest attention logit early in the run, and its fit"
    yield Figure(name="fit", title=title, x="parameters", y="logit", panels=panels, log_x=True, log_y=True)


QUESTION = Question("prediction", __doc__, {ARM: ()}, check, sizes=SIZES, lrs=LRS, figures=figures)
