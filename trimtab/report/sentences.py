"""The sentences about single facts: a note, the critical logit, a forecast, the state of a cell, a prediction."""

import math
from typing import Any

from trimtab.analysis.findings import Critical, Findings, Forecast, Note, Result, Status, clean
from trimtab.analysis.predict import Outcome, Prediction, Rate
from trimtab.analysis.thresholds import CRITICAL_LOGIT, FEWEST_SIZES, HORIZON, NEAR_EPS
from trimtab.report.numbers import between, beyond, count, join, join_rates, number, params, plural
from trimtab.runs.folder import CONFIG, SIGNALS, STUDY

NOTES = {
    "no runs": f"{{where}} holds no study and no run: there is no {STUDY} and no {CONFIG} in it",
    "not a folder": "{where} is not a folder",
    "bad study": "{where} cannot be read, so its runs are read without it",
    "bad cells": "{count} cells of {where} cannot be read",
    "failed": "{count} of {of} cells failed ({shown})",
    "missing": "{count} of {of} cells were not run ({shown})",
    "running": "{count} of {of} cells are not finished ({shown})",
    "unreadable": "{count} of {of} cells cannot be read ({shown})",
    "stopped": "{count} of {of} cells were stopped early; they count with the loss before training",
    "broken lines": "{count} runs have lines that cannot be read, {of} in all; these lines are left out",
    "mixed": "the runs have {count} different {where} ({shown}), so their losses may not be comparable",
    "missing rates": "{where}: sensitivity covers {count} of {of} learning rates; no run has finished at {shown}",
    "nothing learned": "{where}: no learning rate improved the loss, so the sensitivity is not meaningful",
    "no first loss": "{where}: the loss before training was not evaluated, so there is no sensitivity",
    "one rate": "{where}: sensitivity needs two learning rates, there is {count}",
    "few seeds": "{shown}, so random variation cannot be estimated; a second seed would show how much of the "
    "differences is random",
    "no logits": f"{{where}}: no attention logits were logged ({SIGNALS}), so there is no forecast",
    "few sizes": f"{{where}}: a forecast needs {FEWEST_SIZES} sizes, there are {{count}}",
    "no params": "sizes without a parameter count are in no fit: {shown}",
}
_CRITICAL = {
    "none failed": "no run diverged",
    "all failed": "all runs diverged",
    "no logits": "no attention logits were logged",
    "not separated": "attention logits do not separate diverging from stable runs",
}
_PREDICTED: dict[Outcome, str] = {"fine": "is stable", "uncertain": "is uncertain", "fails": "diverges"}


def note_words(note: Note, results: tuple[Result, ...] = ()) -> str:
    shown = join(note.items)
    if note.kind in ("failed", "missing", "running", "unreadable"):
        reasons = {result.name: f"{result.name}: {status_words(result)}" for result in results}
        more = [f"{note.count - len(note.items)} more"] * (note.count > len(note.items))
        shown = "; ".join([*(reasons.get(name, name) for name in note.items), *more])
    elif note.kind == "mixed":
        shown = ", ".join(note.items)
    elif note.kind == "few seeds":
        shown = f"{'for some cells ' if note.of > 1 else ''}there is only {plural(note.count, 'seed')}"
    return NOTES[note.kind].format(where=note.where, count=note.count, of=note.of, shown=shown)


def notes_words(findings: Findings) -> list[str]:
    return [note_words(note, findings.results) for note in findings.notes]


def status_words(result: Result) -> str:
    """Why a cell is in its state."""
    if result.status == Status.MISSING:
        return "not run"
    if result.status == Status.RUNNING:
        return f"at step {result.steps} of {result.planned}" if result.steps else "no step yet"
    return f"cannot be read: {result.why}" if result.status == Status.UNREADABLE else result.why


def critical_words(critical: Critical) -> str:
    """Where the critical attention logit comes from."""
    if critical.reason == "separated":
        return (
            f"between {number(critical.low)}, the largest attention logit of {plural(critical.stable, 'stable run')}, "
            f"and {number(critical.high)}, the smallest of {plural(critical.failed, 'diverging run')}"
        )
    if critical.reason == "overlap":
        return (
            f"the value that best separates {plural(critical.failed, 'diverging run')} from {critical.stable} stable "
            f"ones; {critical.wrong} on the wrong side"
        )
    why = _CRITICAL[critical.reason]
    return f"{number(CRITICAL_LOGIT)}, the paper's value for models of 2M parameters and more, because {why} here"


def forecast_words(x: Forecast) -> str:
    """The fact that a forecast is based on."""
    if x.outcome == "seen":
        return f"observed: training diverges at {params(x.fails_at)}"
    if x.outcome == "few sizes":
        return f"a forecast needs {FEWEST_SIZES} sizes, there are {len(x.sizes)}"
    never = x.outcome == "not within horizon"
    now = f"{number(x.value)} at {params(x.sizes[-1])}"
    what = f"the largest attention logit, {now}, {'does not reach' if never else 'reaches'} {number(x.level)}"
    if x.signal == "grad_rms":
        level = f"{number(x.level, 1)}, where ε shortens the update by {1 / (1 + NEAR_EPS):.0%},"
        what = f"the gradient RMS, {now}, {'does not fall to' if never else 'falls to'} {level}"
    if never:
        perhaps = f"; at the earliest at {count(x.low)}" if x.low is not None else ""
        return f"{what} within {HORIZON:.0f} powers of ten beyond the largest size{perhaps}"
    if x.outcome == "at largest size":
        return f"by the fit {what} at the largest size, but training did not diverge there"
    return f"{what} at {params(x.fails_at)} ({range_words(x)}), {beyond(x.decades)}"


def range_words(x: Forecast) -> str:
    return between(x.low, x.high, lambda y: count(y, 2)) or "no bounds"


# --- One size


def prediction_words(prediction: Prediction) -> list[str]:
    """The prediction in sentences, the conclusion first."""
    size, rates = f"At {params(prediction.params)} {prediction.arm}", prediction.rates
    if not rates:
        return [f"{size} cannot be predicted: it has no runs."]
    if len(rates) == 1:
        words = [f"{size} {_predicted(rates[:1])}: {rate_words(prediction, rates[0])}."]
    else:
        groups = [tuple(rate for rate in rates if rate.outcome == outcome) for outcome in _PREDICTED]
        words = [f"{size} {join([_predicted(group) for group in groups if group])}."]
        words += [
            f"Learning rate {number(rate.lr)} {_PREDICTED[rate.outcome]}: {rate_words(prediction, rate)}."
            for rate in rates
        ]
    if prediction.decades > 0:
        far = f". The sizes that were run span only {prediction.span:.1f} powers of ten: treat it as a hint"
        words.append(f"This size is {beyond(prediction.decades)}{far if prediction.hint else ''}.")
    critical = prediction.critical
    words.append(f"The critical attention logit is {number(critical.value)}: {critical_words(critical)}.")
    words.append("The prediction covers attention logits and gradients near ε only, not other causes.")
    if factors := prediction.backtests:
        words.append(
            f"Back-test: the largest size, predicted from the smaller ones, is off by a factor of "
            f"{factors[len(factors) // 2]:.1f} (median of {plural(len(factors), 'learning rate')}) and "
            f"{factors[-1]:.1f} at most."
        )
    return words


def rate_words(prediction: Prediction, rate: Rate) -> str:
    """Why a learning rate is predicted to diverge or not."""
    critical = number(prediction.critical.value)
    logit = f"attention logit {number(rate.logit)} ({between(rate.logit_low, rate.logit_high)})"
    why = {
        "no logits": "no attention logits were logged (docs/lab.md shows how to log those of your own model)",
        "few sizes": f"a prediction needs {FEWEST_SIZES} sizes, there are {prediction.sizes}",
        "outside grid": f"it is outside the grid, which has {join_rates(prediction.grid)}",
        "too far": f"{logit}, but the size is {beyond(prediction.decades)}, too far for the fit",
        "above": f"{logit}, above {critical}",
        "below": f"{logit}, below {critical}",
        "near": f"{logit}, too close to {critical}",
    }.get(rate.reason, "")
    if rate.failed is not None:
        same = math.isclose(rate.failed[0], rate.lr, rel_tol=1e-6)
        why = f"{'it' if same else f'learning rate {number(rate.failed[0])}'} diverged at {params(rate.failed[1])}"
    return why + (f"; ε leaves {rate.update_left:.0%} of the update" if rate.near_eps else "")


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """All numbers, and the sentences."""
    data: dict[str, Any] = clean(prediction)
    data["critical"]["why"] = critical_words(prediction.critical)
    for row, rate in zip(data["rates"], prediction.rates, strict=True):
        row["why"] = rate_words(prediction, rate)
    return data | {"words": prediction_words(prediction)}


def _predicted(rates: tuple[Rate, ...]) -> str:
    return f"{_PREDICTED[rates[0].outcome]} at learning rate {join_rates([rate.lr for rate in rates])}"
