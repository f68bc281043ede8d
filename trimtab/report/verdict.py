"""The verdict in sentences, the headline first. No sentence claims more than was run."""

import math
from collections.abc import Iterator
from statistics import median

from trimtab.analysis.findings import Curve, Findings, Status
from trimtab.analysis.measure import group_by
from trimtab.analysis.thresholds import NEAR_EPS
from trimtab.analysis.verdict import ArmVerdict, Sign, StudyVerdict, judge
from trimtab.report.numbers import beyond, capital, count, factor, join, number, params, plural
from trimtab.report.sentences import critical_words, range_words

_SIGNS: dict[Sign, str] = {
    "logits": "attention logits above the critical value",
    "logz": "drifting output logits",
    "spike": "a loss spike",
    "eps": "gradients near ε",
    "none": "none of the watched signals",
}


def verdict_words(findings: Findings) -> list[str]:
    if not any(result.finished for result in findings.results):
        return list(_nothing(findings))
    words = []
    for study in (judge(findings, source) for source in findings.studies):
        prefix = f"{study.source.name}: " if len(findings.studies) > 1 else ""
        words += [f"{prefix}{sentence}" for sentence in _study(findings, study)]
    return [*words, *_missing(findings)]


def _nothing(findings: Findings) -> Iterator[str]:
    names = {Status.FAILED: "failed", Status.RUNNING: "running", Status.MISSING: "not run"}
    counts = {word: sum(r.status == status for r in findings.results) for status, word in names.items()}
    states = join([f"{many} {word}" for word, many in counts.items() if many])
    yield f"No run has finished, so there are no results yet ({plural(len(findings.results), 'cell')}: {states})."
    for result in findings.results:
        if result.status == Status.FAILED:
            yield f"The first error, of {result.name}: {result.why}"
            break
    yield "Start the study again with the same folder: finished cells are kept, the others are run."


def _study(findings: Findings, study: StudyVerdict) -> Iterator[str]:
    if not study.arms:
        yield "No run has a finite loss." if study.finished else "No run has finished."
        return
    yield _headline(study)
    yield from _sensitivity(study)
    for arm in study.arms:
        if arm.causes:
            signs = join([f"{_SIGNS[sign]} in {plural(many, 'run')}" for sign, many in arm.causes.items()])
            failed = plural(sum(arm.causes.values()), "diverging run")
            yield f"First abnormal signal in the {failed} of {arm.arm}: {signs}."
    yield from _effects(study)
    yield from _forecasts(findings, study)
    if study.backtests:
        middle, (worst, fit) = median(factor for factor, _ in study.backtests), study.backtests[-1]
        yield (
            "Back-test: the attention logits of the largest size, predicted from the smaller ones, are off by a factor "
            f"of {middle:.1f} (median of {plural(len(study.backtests), 'fit')}) and {worst:.1f} at most ({fit.arm}, "
            f"learning rate {number(fit.lr)})."
        )


def _headline(study: StudyVerdict) -> str:
    parts = [_outcome(arm) for arm in study.arms]
    text = "; ".join(parts[:4]) + (f"; {len(parts) - 4} more arms" if len(parts) > 4 else "")
    return (capital(text) if study.arms[0].arm.isalpha() else text) + "."


def _outcome(arm: ArmVerdict) -> str:
    largest = arm.largest
    name = f"{arm.arm} ({', '.join(arm.switches)})" if arm.switches else arm.arm
    if largest.best_loss >= largest.first:
        return f"{name} learns nothing at any learning rate at {_size(largest)}"
    if arm.failing is None:
        text = f"{name} is stable up to learning rate {number(largest.lrs[-1])} at {_size(largest)}"
    elif arm.held_lr is not None:
        rates = f"{number(arm.held_lr)} and diverges at {number(arm.failing.failing_lr)}"
        text = f"{name} is stable up to learning rate {rates} at every size"
    else:
        start = "at" if arm.failing.size == largest.size else "from"
        text = f"{name} diverges at learning rate {number(arm.failing.failing_lr)} {start} {_size(arm.failing)}"
    if arm.ahead:
        text += f" (forecast: at learning rate {number(arm.ahead[0].lr)} above {count(arm.ahead[0].fails_at, 2)})"
    return text


def _sensitivity(study: StudyVerdict) -> Iterator[str]:
    for one, base, other in study.comparisons:
        sure = "one seed, so random variation is unknown"
        if one.low is not None and one.high is not None:
            sure = f"{one.low:.1f}–{one.high:.1f} over {min(*base.seeds, *other.seeds)} seeds"
        yield (
            f"At {_size(base)} {one.arm} is {factor(one.ratio)} as sensitive to the learning rate as {one.other} "
            f"({sure}){_values(base, other)}."
        )
    for arm in study.arms:
        known = [curve for curve in arm.curves if math.isfinite(curve.sensitivity) and not curve.missing]
        if known:
            sizes = join([count(curve.params) if curve.params else curve.size for curve in known])
            text = f"{arm.arm}: sensitivity {join([f'{c.sensitivity:.2f}' for c in known])} nats at {sizes} parameters"
            if len(known) > 1 and any(curve.failing_lr is not None for curve in known):
                rates = [number(c.failing_lr) if c.failing_lr is not None else "none" for c in known]
                text += f"; lowest diverging learning rate {join(rates)}"
            yield f"{text}."


def _values(one: Curve, other: Curve) -> str:
    """Both values, if they cover all learning rates; otherwise they are not comparable."""
    if one.missing or other.missing:
        return ", over the learning rates that both have"
    rates = [f"learning rates {number(curve.window[0])}–{number(curve.window[1])}" for curve in (one, other)]
    values = [f"{one.sensitivity:.2f} nats above the minimum for {one.arm}", f"{other.sensitivity:.2f} for {other.arm}"]
    if rates[0] == rates[1]:
        return f". The mean loss over {rates[0]} is {values[0]} and {values[1]}"
    return f". The mean loss is {values[0]} (over {rates[0]}) and {values[1]} (over {rates[1]})"


def _effects(study: StudyVerdict) -> Iterator[str]:
    by_effect = group_by(study.arms, lambda arm: arm.effect)
    if prevents := by_effect.get("prevents"):
        size = _size(study.arms[0].largest)
        yield f"With {join([arm.arm for arm in prevents])} no learning rate that was run diverges at {size}."
    for arm in by_effect.get("raises", []):
        rates = f"from {number(study.arms[0].largest.failing_lr)} to {number(arm.largest.failing_lr)}"
        yield f"{arm.arm} raises the lowest diverging learning rate {rates} at {_size(arm.largest)}."
    if same := by_effect.get("none"):
        do = "does" if len(same) == 1 else "do"
        yield f"{join([arm.arm for arm in same])} {do} not raise the lowest diverging learning rate."


def _forecasts(findings: Findings, study: StudyVerdict) -> Iterator[str]:
    for arm in study.arms:
        for x in arm.ahead[:2]:
            size = f"{count(x.fails_at, 2)} parameters ({range_words(x)})"
            yield f"Forecast for {arm.arm}: learning rate {number(x.lr)} diverges above {size}, {beyond(x.decades)}."
    for arm in study.arms:
        if (near := arm.near_eps) is not None:
            size = f"{count(near.fails_at, 2)} parameters ({range_words(near)})"
            yield (
                f"Forecast for {arm.arm}: at learning rate {number(near.lr)} the gradient RMS falls below "
                f"{NEAR_EPS:.0f} times Adam's ε above {size}. A smaller ε avoids it."
            )
    if any((x.signal, x.study) == ("logit_max", study.source.name) for x in findings.forecasts):
        critical = findings.critical
        yield f"The critical attention logit is {number(critical.value)}: {critical_words(critical)}."


def _missing(findings: Findings) -> Iterator[str]:
    unfinished = sum(not result.finished for result in findings.results)
    if unfinished:
        yield f"{unfinished} of {plural(len(findings.results), 'cell')} have no result."
    if findings.notes:
        yield f"{plural(len(findings.notes), 'note')} on missing or mixed data: see below."


def _size(curve: Curve) -> str:
    return params(curve.params) if curve.params else f"size {curve.size}"
