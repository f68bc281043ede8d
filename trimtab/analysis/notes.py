"""What a reader must know before using the findings: cells that are missing, runs that are mixed, too few seeds.

`trimtab.report.sentences` has a sentence for each kind of note.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from trimtab.analysis.findings import Curve, Note, Result, Status
from trimtab.analysis.thresholds import FEWEST_SIZES


def notes_of(results: Sequence[Result], curves: Sequence[Curve]) -> list[Note]:
    return [*_cells(results), *_mixed(results), *_curves(curves), *_forecasts(results)]


def _cells(results: Sequence[Result]) -> Iterator[Note]:
    for status in (Status.FAILED, Status.MISSING, Status.RUNNING, Status.UNREADABLE, Status.STOPPED):
        names = tuple(result.name for result in results if result.status == status)
        if names:
            yield Note(kind=status.value, count=len(names), of=len(results), items=names[:3])
    broken = [result.broken for result in results if result.broken]
    if broken:
        yield Note(kind="broken lines", count=len(broken), of=sum(broken))


def _mixed(results: Sequence[Result]) -> Iterator[Note]:
    """Runs whose losses may not be comparable."""
    there = [result for result in results if result.planned]
    kinds = {
        "corpora (sha256)": [result.sha256[:12] for result in there if result.sha256],
        "kinds of model": [result.kind for result in there if result.kind],
        "lengths in steps": [str(result.planned) for result in there],
        "versions of trimtab": [result.versions.get("trimtab", "") for result in there if result.versions],
        "versions of torch": [result.versions.get("torch", "") for result in there if result.versions],
    }
    for what, values in kinds.items():
        if len(counts := Counter(values)) > 1:
            items = tuple(f"{value}: {count} runs" for value, count in counts.most_common(4))
            yield Note(kind="mixed", where=what, count=len(counts), items=items)


def _curves(curves: Sequence[Curve]) -> Iterator[Note]:
    for curve in curves:
        where, rates = f"{curve.arm} at {curve.size}", len(curve.lrs)
        if curve.missing:
            missing = tuple(f"{lr:.4g}" for lr in curve.missing)
            yield Note(kind="missing rates", where=where, count=rates, of=rates + len(missing), items=missing)
        if not curve.learned:
            yield Note(kind="nothing learned", where=where)
        elif curve.open_ended and rates > 1:
            yield Note(kind="open grid", where=where, items=(f"{curve.best_lr:.4g}",))
        if not math.isfinite(curve.first):
            yield Note(kind="no first loss", where=where)
        elif not math.isfinite(curve.sensitivity):
            yield Note(kind="one rate", where=where, count=rates)
    most = [max(curve.seeds) for curve in curves]
    if curves and min(most) < 2:
        yield Note(kind="few seeds", count=min(most), of=max(most))


def _forecasts(results: Sequence[Result]) -> Iterator[Note]:
    finished = [result for result in results if result.finished]
    for study in dict.fromkeys(result.study for result in finished):
        those = [result for result in finished if result.study == study]
        sizes = {result.params for result in those if result.params}
        if not any(math.isfinite(result.logit_max) for result in those):
            yield Note(kind="no logits", where=study)
        elif len(sizes) < FEWEST_SIZES:
            yield Note(kind="few sizes", where=study, count=len(sizes))
    unknown = tuple(sorted({result.size for result in finished if not result.params}))
    if unknown:
        yield Note(kind="no params", items=unknown)
