"""The verdict in plain words, the headline first, each sentence from numbers in `Findings`.

    headline       at which learning rate each arm breaks, at which size, and from which size on by the fit
    sensitivity    the first arm against the others at the largest size, and how it grows
    cause          which signal left its range first in the runs that failed
    cure           which arms do not fail where the first one does
    prediction     what the fits say of larger sizes, and how far off they were when they could be checked
    missing        what the reader should know before believing it

No sentence claims more than was run: a single seed, a fit over few sizes and a borrowed critical value are said.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from trimtab.analysis.findings import Curve, Findings, Forecast, Result, Source
from trimtab.analysis.forecasts import NEAR
from trimtab.analysis.measure import run_fails
from trimtab.analysis.words import (
    join,
    plural,
    say_count,
    say_decades,
    say_factor,
    say_number,
    say_range,
    say_rate,
)

DRIFT = 5.0  # nats: log Z has left its place


def judge(findings: Findings) -> Findings:
    """The same findings with their verdict."""
    if not any(result.finished for result in findings.results):
        return replace(findings, verdict=tuple(_nothing(findings)))
    words: list[str] = []
    for source in findings.studies:
        said = _study(findings, source)
        words += said if len(findings.studies) == 1 else [f"{source.name}: {sentence}" for sentence in said]
    return replace(findings, verdict=(*words, *_missing(findings)))


def _nothing(findings: Findings) -> list[str]:
    counts = {status: sum(r.status == status for r in findings.results) for status in ("failed", "running", "missing")}
    told = join(
        [f"{count} {'not run' if status == 'missing' else status}" for status, count in counts.items() if count]
    )
    cells = plural(len(findings.results), "cell")
    lines = [f"No run has finished, so there is nothing to say yet: of {cells} {told}."]
    failed = [result for result in findings.results if result.status == "failed"]
    if failed:
        lines.append(f"The first that failed, {failed[0].name}, said: {failed[0].why}")
    return [*lines, "Start the study again with the same folder: cells that are finished are kept, the rest is run."]


def _study(findings: Findings, source: Source) -> list[str]:
    curves = [curve for curve in findings.curves if curve.study == source.name]
    if not curves:
        broken = any(result.finished for result in findings.results if result.study == source.name)
        return ["Every run broke: there is no finite loss." if broken else "No run has finished."]
    arms = list(dict.fromkeys(curve.arm for curve in curves))
    says = [_headline(findings, source, curves, arms), *_sensitivity(findings, curves, arms)]
    says += [*_cause(findings, curves, arms), *_cure(curves, arms), *_prediction(findings, source.name, arms)]
    return says


# --- Headline


def _headline(findings: Findings, source: Source, curves: Sequence[Curve], arms: Sequence[str]) -> str:
    parts = [f"{_named(source, arm)} {_fate(findings, curves, arm)}" for arm in arms]
    text = "; ".join(parts[:4]) + (f"; {len(parts) - 4} arms more" if len(parts) > 4 else "")
    return (text[:1].upper() + text[1:] if arms[0].isalpha() else text) + "."


def _named(source: Source, arm: str) -> str:
    """An arm with its switches, where the study tells them."""
    known: Any = source.data.get("arms")
    for item in known if isinstance(known, list) else []:
        if isinstance(item, dict) and item.get("name") == arm and isinstance(item.get("switches"), list):
            switches = [str(switch) for switch in item["switches"]]
            return f"{arm} ({', '.join(switches)})" if switches else arm
    return arm


def _fate(findings: Findings, curves: Sequence[Curve], arm: str) -> str:
    own = _of_arm(curves, arm)
    largest = own[-1]
    failing = [curve for curve in own if curve.failing_lr is not None]
    if largest.best_loss >= largest.first:
        return f"learns nothing at {_size(largest)}, at any learning rate"
    if not failing:
        text = f"holds up to learning rate {say_rate(largest.lrs[-1])} at {_size(largest)}"
    else:
        worst = min(failing, key=lambda curve: (curve.failing_lr or 0, curve.params or 0))
        rate = worst.failing_lr or 0
        held = [lr for lr in largest.lrs if lr < rate]
        if held and len(own) > 1 and {curve.failing_lr for curve in own} == {rate}:
            text = f"holds up to learning rate {say_rate(held[-1])} and breaks at {say_rate(rate)} at every size"
        else:
            text = f"breaks at learning rate {say_rate(rate)} {_from(worst, largest)}"
    ahead = [x for x in _forecasts(findings, largest.study, arm) if not x.seen and x.fails_at is not None]
    if ahead:
        lowest = min(ahead, key=lambda forecast: forecast.fails_at or math.inf)
        text += f", and by the fit at {say_rate(lowest.lr)} from about {say_count(lowest.fails_at or 0)} on"
    return text


# --- Sensitivity


def _sensitivity(findings: Findings, curves: Sequence[Curve], arms: Sequence[str]) -> list[str]:
    largest = _of_arm(curves, arms[0])[-1]
    says = []
    for comparison in findings.comparisons:
        if (comparison.study, comparison.size) != (largest.study, largest.size) or not math.isfinite(comparison.ratio):
            continue
        other = next(c for c in curves if (c.arm, c.size) == (comparison.other, comparison.size))
        seeds = min(*largest.seeds, *other.seeds)
        sure = "one seed, so how much of it is chance is not known"
        if comparison.low is not None and comparison.high is not None:
            sure = f"{comparison.low:.1f} to {comparison.high:.1f} over {seeds} seeds"
        says.append(
            f"At {_size(largest)} {comparison.arm} is {say_factor(comparison.ratio)} as sensitive to its learning rate "
            f"as {comparison.other} ({sure}){_against(largest, other)}."
        )
    return says + [line for arm in arms if (line := _growth(_of_arm(curves, arm)))]


def _against(one: Curve, other: Curve) -> str:
    """Both values, if they are over all learning rates; what is over fewer is not comparable."""
    if one.missing or other.missing:
        return ", over the learning rates that both have"
    windows = [f"learning rates {say_rate(curve.window[0])} to {say_rate(curve.window[1])}" for curve in (one, other)]
    values = [f"{curve.sensitivity:.2f} nats of loss on average" for curve in (one, other)]
    if windows[0] == windows[1]:
        return f": {one.sensitivity:.2f} against {values[1]} over {windows[0]}"
    return f": {values[0]} over {windows[0]} against {values[1]} over {windows[1]}"


def _growth(own: Sequence[Curve]) -> str:
    """How one arm changes with size, over the sizes that are complete."""
    known = [curve for curve in own if math.isfinite(curve.sensitivity) and not curve.missing]
    if len(known) < 2:
        return f"Sensitivity of {own[0].arm}: {known[0].sensitivity:.2f} nats at {_size(known[0])}." if known else ""
    values = join([f"{curve.sensitivity:.2f}" for curve in known])
    first = join([say_rate(curve.failing_lr) if curve.failing_lr is not None else "none" for curve in known])
    sizes = join([say_count(curve.params) if curve.params else curve.size for curve in known])
    fails = f"and first failing learning rate {first} " if any(c.failing_lr is not None for c in known) else ""
    return f"{own[0].arm}: sensitivity {values} nats {fails}at {sizes} parameters."


# --- Cause and cure


def _cause(findings: Findings, curves: Sequence[Curve], arms: Sequence[str]) -> list[str]:
    """Of the runs of each arm that failed: how many showed what, and what came first."""
    says = []
    by_key = {(curve.study, curve.arm, curve.size): curve for curve in curves}
    for arm in arms:
        own = [r for r in findings.results if r.finished and r.arm == arm and (r.study, arm, r.size) in by_key]
        failed = [result for result in own if run_fails(result, by_key[result.study, arm, result.size])]
        if not failed:
            continue
        found: dict[str, int] = {}
        for result in failed:
            first = min(signs_of(result, findings.critical.value), default=(0, "nothing that was watched"))
            found[first[1]] = found.get(first[1], 0) + 1
        told = join([f"{sign} in {count}" for sign, count in sorted(found.items(), key=lambda item: -item[1])])
        says.append(f"What breaks first in the {plural(len(failed), 'run')} of {arm} that failed: {told}.")
    return says


def signs_of(result: Result, critical: float) -> list[tuple[int, str]]:
    """(step, what) for each signal that left its range."""
    found = [(step, "attention logits above the critical value") for step, value in result.logits if value > critical][
        :1
    ]
    if result.logz:
        start = result.logz[0][1]
        moved = [step for step, value in result.logz if abs(value - start) > DRIFT]
        found += [(step, "output logits drifting") for step in moved[:1]]
    found += [(step, "a spike of the loss") for step, _ in result.spikes[:1]]
    if result.grad_rms < NEAR * result.eps:
        found.append((result.steps, "gradients near eps"))
    return found


def _cure(curves: Sequence[Curve], arms: Sequence[str]) -> list[str]:
    base = _of_arm(curves, arms[0])[-1]
    if base.failing_lr is None or len(arms) < 2:
        return []
    others = [_of_arm(curves, arm)[-1] for arm in arms[1:]]
    same = [curve for curve in others if curve.size == base.size]
    whole = [c.arm for c in same if c.failing_lr is None and c.lrs[-1] >= base.failing_lr]
    part = [c for c in same if c.failing_lr is not None and c.failing_lr > base.failing_lr]
    none = [c.arm for c in same if c.failing_lr is not None and c.failing_lr <= base.failing_lr]
    says = [f"At {_size(base)} no learning rate fails with {join(whole)}."] if whole else []
    says += [f"{c.arm} moves the first failing learning rate to {say_rate(c.failing_lr or 0)}." for c in part]
    return says + ([f"It makes no difference with {join(none)}."] if none else [])


# --- Prediction


def _prediction(findings: Findings, study: str, arms: Sequence[str]) -> list[str]:
    says = []
    for arm in arms:
        ahead = [f for f in _forecasts(findings, study, arm) if not f.seen and f.fails_at is not None]
        for forecast in sorted(ahead, key=lambda f: f.fails_at or 0)[:2]:
            says.append(
                f"By the fit {arm} will fail at learning rate {say_rate(forecast.lr)} from about "
                f"{say_count(forecast.fails_at or 0)} parameters on ({say_range(forecast.low, forecast.high)}), "
                f"{say_decades(forecast.decades)}."
            )
    says += _eps(findings, study, arms)
    if any(forecast.signal == "logit_max" and forecast.study == study for forecast in findings.forecasts):
        says.append(f"The critical attention logit is {say_number(findings.critical.value)}: {findings.critical.why}.")
    return says + _backtests(findings, study)


def _eps(findings: Findings, study: str, arms: Sequence[str]) -> list[str]:
    says = []
    for arm in arms:
        near = [f for f in findings.forecasts if (f.study, f.arm, f.signal) == (study, arm, "grad_rms")]
        seen = {f.lr for f in _forecasts(findings, study, arm) if f.seen}  # what fails anyway needs no other reason
        near = [f for f in near if f.fails_at is not None and f.lr not in seen]
        if near:
            first = min(near, key=lambda f: f.fails_at or 0)
            says.append(
                f"Gradients of {arm} come within {NEAR:.0f} times of Adam's eps at learning rate {say_rate(first.lr)} "
                f"from about {say_count(first.fails_at or 0)} parameters on ({say_range(first.low, first.high)}); "
                "a smaller eps avoids it."
            )
    return says


def _backtests(findings: Findings, study: str) -> list[str]:
    fits = [f for f in findings.fits if (f.study, f.signal) == (study, "logit_max") and not f.bounded]
    factors = sorted((f.backtest.factor, f.arm, f.lr) for f in fits if f.backtest is not None)
    if not factors:
        return []
    worst = factors[-1]
    return [
        f"Checked where it can be: predicted from the smaller sizes, the attention logits of the largest are off by "
        f"a factor of {median(factor for factor, _, _ in factors):.1f} in the middle of {plural(len(factors), 'fit')} "
        f"and of {worst[0]:.1f} at worst ({worst[1]}, learning rate {say_rate(worst[2])})."
    ]


# --- What is missing


def _missing(findings: Findings) -> list[str]:
    unfinished = sum(not result.finished for result in findings.results)
    says = [f"{unfinished} of {plural(len(findings.results), 'cell')} are not in this."] if unfinished else []
    if findings.curves and all(max(curve.seeds) < 2 for curve in findings.curves):
        says.append("There is one seed only; a second would tell how much of the differences is chance.")
    are = "is" if len(findings.notes) == 1 else "are"
    return says + ([f"There {are} {plural(len(findings.notes), 'note')} on what was read."] if findings.notes else [])


# --- Small things


def _of_arm(curves: Sequence[Curve], arm: str) -> list[Curve]:
    """By size, the largest last."""
    return sorted((curve for curve in curves if curve.arm == arm), key=lambda curve: curve.params or 0)


def _forecasts(findings: Findings, study: str, arm: str) -> list[Forecast]:
    return [f for f in findings.forecasts if (f.study, f.arm, f.signal) == (study, arm, "logit_max")]


def _from(smallest: Curve, largest: Curve) -> str:
    return f"from {_size(smallest)} on" if smallest.size != largest.size else f"at {_size(largest)}"


def _size(curve: Curve) -> str:
    return f"{say_count(curve.params)} parameters" if curve.params else f"size {curve.size}"
