"""The verdict in sentences, the headline first. No sentence claims more than was run."""

import math
from collections.abc import Iterator

from trimtab.analysis.findings import Curve, Findings, Source, Status
from trimtab.analysis.measure import group_by
from trimtab.analysis.verdict import ArmVerdict, Cause, StudyVerdict, judge
from trimtab.report.numbers import between, capital, count, duration, factor, join, number, params, plural
from trimtab.report.sentences import edge_words, held_out_words, rate_words, warning_words
from trimtab.runs.records import as_text

_CAUSES: dict[Cause, str] = {
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
    for arm in study.arms:
        yield from _evidence(arm)
    yield from _sensitivity(study)
    yield from _effects(study)
    if rows := [row for arm in study.arms for row in arm.held_out]:
        yield f"{held_out_words(rows)}."
    yield from _next(findings, study)


def _headline(study: StudyVerdict) -> str:
    parts = [_outcome(arm) for arm in study.arms]
    text = "; ".join(parts[:4]) + (f"; {len(parts) - 4} more arms" if len(parts) > 4 else "")
    return (capital(text) if study.arms[0].arm.isalpha() else text) + "."


def _outcome(arm: ArmVerdict) -> str:
    """What was measured at the largest size, and the forecast at ten times that."""
    largest = arm.largest
    name = f"{arm.arm} ({', '.join(arm.switches)})" if arm.switches else arm.arm
    if not largest.learned:
        return f"{name} learns nothing at any learning rate at {_size(largest)}"
    if len(largest.lrs) < 2:
        return f"{name} has only one learning rate at {_size(largest)}, so its edge of stability is unknown"
    if largest.best_lr == largest.lrs[-1]:
        best = f"is best at the highest learning rate that was run, {number(largest.best_lr)}"
        return f"{name} {best}, so its edge of stability is unknown"
    text, fails = f"{name} fails above learning rate {number(largest.edge, 2)} at {_size(largest)}", "above"
    if largest.edge is None:
        text, fails = f"{name} holds up to learning rate {number(largest.lrs[-1])} at {_size(largest)}", "fails above"
    if arm.ahead is not None and arm.ahead.edge is not None and len(arm.curves) > 1:
        text += f" and, by forecast, {fails} {edge_words(arm.ahead.edge)} at {count(arm.ahead.params, 2)}"
    return text


def _edge(curve: Curve) -> str:
    spread = between(curve.edge_low, curve.edge_high, lambda x: number(x, 2))
    low, high = (number(x, 2) for x in (curve.edge_low, curve.edge_high))
    return f"{number(curve.edge, 2)} ({spread})" if low != high else number(curve.edge, 2)


def _evidence(arm: ArmVerdict) -> Iterator[str]:
    """Edges by size, their trend, open grids, causes, disagreeing signs."""
    curves = [curve for curve in arm.curves if curve.learned and len(curve.lrs) > 1]
    if len(curves) > 1:
        edges = [_edge(curve) if curve.edge is not None else f"above {number(curve.lrs[-1])}" for curve in curves]
        sizes = [count(curve.params) if curve.params else curve.size for curve in curves]
        text = f"{arm.arm}: edge of stability {join(edges)} at {join(sizes)} parameters"
        if arm.slope is not None:
            middle, high, low = (10 ** -(arm.slope[0] + times * arm.slope[1]) for times in (0, -1, 1))
            text += f"; it falls by a factor of {middle:.1f} per tenfold size ({low:.1f}–{high:.1f})"
        yield f"{text}."
    for curve in arm.open_ended:
        end = "highest" if curve.best_lr == curve.lrs[-1] else "lowest"
        place = f"{number(curve.best_lr)}, the {end} learning rate of the grid"
        yield f"{arm.arm} at {_size(curve)} is best at {place}: --extend runs more."
    if arm.causes:
        causes = join([f"{_CAUSES[cause]} in {plural(many, 'run')}" for cause, many in arm.causes.items()])
        failed = plural(sum(arm.causes.values()), "failed run")
        yield f"First abnormal signal in the {failed} of {arm.arm}: {causes}."
    if arm.ahead is not None:
        for rate in arm.ahead.rates:
            if rate.disagree:
                place = f"{arm.arm} at {params(arm.ahead.params)}, learning rate {number(rate.lr)}"
                yield f"{place}: {rate_words(arm.ahead, rate)}."
            if rate.outcome == "holds":
                for text in warning_words(rate):
                    yield f"{arm.arm} at {params(arm.ahead.params)}: {text[0].lower()}{text[1:]}"


def _sensitivity(study: StudyVerdict) -> Iterator[str]:
    for one, base, other in study.comparisons:
        sure = "one seed, so random variation is unknown"
        if one.low is not None and one.high is not None:
            sure = f"{one.low:.1f}–{one.high:.1f} over seeds"
        above = f"; above the best learning rate {factor(one.unstable)}" if math.isfinite(one.unstable) else ""
        yield (
            f"At {_size(base)} {one.arm} is {factor(one.ratio)} as sensitive to the learning rate as {one.other} "
            f"({sure}{above}){_values(base, other)}."
        )
    for arm in study.arms:
        known = [curve for curve in arm.curves if math.isfinite(curve.sensitivity) and not curve.missing]
        if known:
            sizes = join([count(curve.params) if curve.params else curve.size for curve in known])
            whole, slow, unstable = (
                join([f"{getattr(curve, part):.2f}" for curve in known])
                for part in ("sensitivity", "too_slow", "unstable")
            )
            parts = f"{slow} below the best learning rate (too slow) and {unstable} above it (unstable)"
            yield f"{arm.arm}: sensitivity {whole} nats at {sizes} parameters, of which {parts}{_dominates(known)}."


def _dominates(curves: list[Curve]) -> str:
    slow = [curve for curve in curves if curve.too_slow > curve.unstable]
    where = f" at {join([_size(curve) for curve in slow])}" if len(slow) < len(curves) else ""
    return f"; low learning rates dominate it{where}, and more steps would lower that part" if slow else ""


def _values(one: Curve, other: Curve) -> str:
    """Both values, if they cover all learning rates; otherwise they are not comparable."""
    if one.missing or other.missing:
        return ", over the learning rates that both have"
    windows = [f"learning rates {number(curve.window[0])}–{number(curve.window[1])}" for curve in (one, other)]
    if windows[0] == windows[1]:
        return f", over {windows[0]}"
    return f", over {windows[0]} for {one.arm} and {windows[1]} for {other.arm}"


def _effects(study: StudyVerdict) -> Iterator[str]:
    by_effect = group_by(study.arms, lambda arm: arm.effect)
    if prevents := by_effect.get("prevents"):
        size = _size(study.arms[0].largest)
        yield f"With {join([arm.arm for arm in prevents])} no learning rate that was run fails at {size}."
    for arm in by_effect.get("raises", []):
        rates = f"from {_edge(study.arms[0].largest)} to {_edge(arm.largest)}"
        yield f"{arm.arm} raises the edge of stability {rates} at {_size(arm.largest)}."
    if same := by_effect.get("none"):
        do = "does" if len(same) == 1 else "do"
        yield f"{join([arm.arm for arm in same])} {do} not raise the lowest failing learning rate."


def _next(findings: Findings, study: StudyVerdict) -> Iterator[str]:
    """What would change the verdict: one more size, with its cost and the command."""
    first = study.arms[0]
    if first.ahead is None or not first.largest.depth or not first.largest.width:
        return
    size = f"{first.largest.depth + 1}x{2 * first.largest.width}"
    larger = (first.largest.depth + 1) * (2 * first.largest.width) ** 2
    growth = larger / (first.largest.depth * first.largest.width**2)
    runs = [run for run in findings.results if run.study == study.source.name and run.size == first.largest.size]
    seconds = growth * sum(run.seconds for run in runs) / 2
    command = study_command(study.source, size)
    what = f"The forecast is tested by training {size} ({count(12 * larger)}), about {duration(seconds)} on two cores"
    yield f"{what}: {command}" if command else f"{what}: add it to the sizes of the study."


def study_command(source: Source, size: str) -> str:
    """The command that adds a size to a study; "" if the study is not one of the command's own."""
    own = {"default": "", "quick": " --quick"}
    sizes = source.data.get("sizes")
    names = [as_text(item.get("name")) for item in sizes if isinstance(item, dict)] if isinstance(sizes, list) else []
    if source.name not in own or not names:
        return ""
    subject = f" {source.subject}" if source.subject != "gpt-lab" else ""
    return f"trimtab lab{subject}{own[source.name]} --sizes {' '.join([*names, size])} --out {source.folder}"


def _missing(findings: Findings) -> Iterator[str]:
    unfinished = sum(not result.finished for result in findings.results)
    if unfinished:
        yield f"{unfinished} of {plural(len(findings.results), 'cell')} have no result."
    if findings.notes:
        yield f"{plural(len(findings.notes), 'note')} on missing or mixed data: see below."


def _size(curve: Curve) -> str:
    return params(curve.params) if curve.params else f"size {curve.size}"
