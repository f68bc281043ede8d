"""The sentences about single facts: a note, the critical logit, a forecast, the state of a cell, a prediction."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trimtab.analysis.findings import Critical, Findings, Forecast, HeldOut, Note, Outcome, Result, Status, clean
from trimtab.analysis.predict import Prediction, Rate, Sign, Silence
from trimtab.analysis.thresholds import FEWEST_SIZES, HORIZON, NEAR_EPS
from trimtab.report.numbers import UNKNOWN, between, beyond, count, join, join_rates, number, params, plural
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
    "no logits": f"{{where}}: no attention logits were logged ({SIGNALS}), so they are no part of the forecast",
    "few sizes": f"{{where}}: with {FEWEST_SIZES} sizes the forecast could be checked by itself, there are {{count}}",
    "open grid": "{where}: the best learning rate, {shown}, is at the end of the grid, so a better one may be outside; "
    "--extend runs more",
    "no params": "sizes without a parameter count are in no fit: {shown}",
}
_CRITICAL = {
    "none failed": "no run failed",
    "all failed": "all runs failed",
    "no logits": "no attention logits were measured",
    "not separated": "attention logits do not separate failed from successful runs",
}
_OUTCOMES: dict[Outcome, str] = {"holds": "holds", "cannot tell": "cannot be judged", "fails": "fails"}
_SILENCES: dict[Silence, str] = {
    "not measured": "no attention logits were measured; docs/lab.md shows how to measure those of your own model",
    "few sizes": f"attention logits need {FEWEST_SIZES} sizes",
    "bounded": "attention logits say nothing, they are bounded",
    "no critical value": "attention logits say nothing, their critical value is unknown here",
    "outside grid": "attention logits were not measured near this learning rate",
}


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
            f"between {number(critical.low)}, the largest early logit of {plural(critical.stable, 'successful run')}, "
            f"and {number(critical.high)}, the smallest of {plural(critical.failed, 'failed run')}"
        )
    if critical.reason == "overlap":
        return (
            f"the value that best separates {plural(critical.failed, 'failed run')} from {critical.stable} successful "
            f"ones; {critical.wrong} on the wrong side"
        )
    why = _CRITICAL[critical.reason]
    return f"the paper's value for models of 2M parameters and more; it is unknown here, because {why}, and not used"


def forecast_words(x: Forecast) -> str:
    """The fact that a forecast is based on."""
    if x.outcome == "seen":
        return f"observed: it failed at {params(x.fails_at)}"
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
        return f"{what} within {10**HORIZON:.0f} times the largest size{perhaps}"
    if x.outcome == "at largest size":
        return f"by the fit {what} at the largest size, but it did not fail there"
    return f"{what} at {params(x.fails_at)} ({range_words(x)}), {beyond(x.decades)}"


def range_words(x: Forecast) -> str:
    return between(x.low, x.high, lambda y: count(y, 2)) or "no bounds"


# --- One size


def prediction_words(prediction: Prediction, held_out: Sequence[HeldOut] = ()) -> list[str]:
    """The forecast in sentences, the conclusion first."""
    size, rates = f"At {params(prediction.params)} {prediction.arm}", prediction.rates
    if not rates:
        return [f"{size} cannot be forecast: it has no runs."]
    groups = [tuple(rate for rate in rates if rate.outcome == outcome) for outcome in _OUTCOMES]
    words = [f"{size} {join([_group(group) for group in groups if group])}."]
    for rate in rates:
        start = f"Learning rate {number(rate.lr)}" if len(rates) > 1 else "Reason"
        words.append(f"{start}: {rate_words(prediction, rate)}.")
    if prediction.edge is not None:
        words.append(f"Edge of stability at this size: {edge_words(prediction.edge)}.")
        words += [text for rate in rates for text in warning_words(rate)]
        critical = prediction.critical
        if any(rate.sign("logits").probability is not None for rate in rates):
            words.append(f"The critical attention logit is {number(critical.value)}: {critical_words(critical)}.")
    mine = [row for row in held_out if (row.study, row.arm) == (prediction.study, prediction.arm)]
    return words + ([f"{held_out_words(mine)}."] if mine else [])


def rate_words(prediction: Prediction, rate: Rate) -> str:
    """Why a learning rate fails, holds or cannot be judged."""
    signs = "; ".join(text for sign in rate.signs[:2] if (text := sign_words(sign)))
    evidence = f"probability of failure {percent(rate.probability)} ({signs})"
    if rate.disagree:
        evidence += (
            "; the signs disagree: the edge of stability is measured on the loss, the logits are one cause of failure, "
            "so believe the first more"
        )
    return {
        "observed": f"it was run at this size and {'failed' if rate.outcome == 'fails' else 'did not fail'}",
        "no runs": "no run of this arm has learned anything; try lower learning rates with --lrs",
        "too far": f"the size is {beyond(prediction.decades)}, and forecasts were tested up to "
        f"{10**HORIZON:.0f} times; train a larger size",
        "open grid": "the best learning rate of the largest size is the highest of the grid, so the edge of stability "
        "is unknown; --extend runs higher ones",
        "outside grid": "it is far outside the learning rates that were run; add it with --lrs",
        "undecided": f"{evidence}; train this size, or one nearer to it, to know",
        "probability": evidence,
    }[rate.reason]


def sign_words(sign: Sign) -> str:
    if sign.silence:
        return _SILENCES[sign.silence] if sign.name == "logits" else ""
    if sign.name == "edge":
        return f"{percent(sign.probability)} by the edge of stability"
    logit = f"{number(sign.value)} ({between(sign.low, sign.high)})"
    return f"{percent(sign.probability)} by the attention logit, {logit} against {number(sign.level)}"


def edge_words(edge: tuple[float, float, float]) -> str:
    return f"{number(edge[0], 2)} ({between(edge[1], edge[2], lambda x: number(x, 2))})"


def held_out_words(rows: Sequence[HeldOut]) -> str:
    """The check of a study by itself."""
    right, wrong = (sum(row.right is x for row in rows) for x in (True, False))
    unsure = len(rows) - right - wrong
    missed = join([f"learning rate {number(row.lr)} of {row.arm}" for row in rows if row.right is False])
    start = "Check: the forecast of the largest size from the smaller ones"
    if right + wrong == 0:
        return f"{start} cannot tell at any of {plural(unsure, 'learning rate')}"
    text = f"right at {right} of {plural(right + wrong, 'learning rate')}" + (f" (wrong: {missed})" if wrong else "")
    return f"{start} is {text}" + (f" and cannot tell at {unsure}" if unsure else "")


def percent(probability: float | None) -> str:
    """Never 0 % or 100 %: a forecast is not certain."""
    if probability is None or math.isnan(probability):
        return UNKNOWN
    if not 0.01 <= probability <= 0.99:
        return "below 1 %" if probability < 0.5 else "above 99 %"
    return f"{100 * probability:.0f} %"


def prediction_json(prediction: Prediction, held_out: Sequence[HeldOut] = ()) -> dict[str, Any]:
    """All numbers, and the sentences."""
    data: dict[str, Any] = clean(prediction)
    data["critical"]["why"] = critical_words(prediction.critical)
    for row, rate in zip(data["rates"], prediction.rates, strict=True):
        row["why"] = rate_words(prediction, rate)
    return data | {"words": prediction_words(prediction, held_out)}


def _group(rates: tuple[Rate, ...]) -> str:
    return f"{_OUTCOMES[rates[0].outcome]} at learning rate {join_rates([rate.lr for rate in rates])}"


def warning_words(rate: Rate) -> Iterator[str]:
    """Causes that the probability does not include."""
    eps, logz, start = rate.sign("eps"), rate.sign("logz"), f"Learning rate {number(rate.lr)}:"
    if (eps.probability or 0) > 0.5:
        yield (
            f"{start} the gradient RMS, {number(eps.value)}, comes within {NEAR_EPS:.0f} times Adam's ε, which leaves "
            f"{rate.update_left:.0%} of the update; a smaller ε avoids it."
        )
    if (logz.probability or 0) > 0.5:
        yield (
            f"{start} log Z of the output drifts by {number(logz.value)} nats, which can make training in 16 bits "
            "fail; z-loss prevents it."
        )
