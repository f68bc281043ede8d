"""Sensitivity to the learning rate, and the learning rate at which training fails.

    score(η)      the final validation loss, at most l0, the loss before training; l0 for a run without a final loss
    sensitivity   mean over the grid of score(η) - lowest score                      Wortsman et al. 2023b, section 2.2
    window        sensitivity covers three decades. A longer grid has several such windows, and the lowest counts: an
                  optimum that moves must not count as instability
    failing η     the smallest above the best one with score > lowest + FAILS * (l0 - lowest)

FAILS is the share of the improvement by training that is lost; the paper has no formal rule. For large models, where a
failing run ends near l0, one half would do. Models of a few thousand parameters never lose as much: without useful
attention they still predict bytes from the byte before. Measured on the default study (byte-level GPTs of 6k, 25k and
147k parameters): runs whose attention logits had exploded lost 17 to 26 %, runs with qk-norm and z-loss at most 6 % at
any learning rate, and one intermediate run 7 %. A learning rate below the best one with as high a loss learns too
slowly; it does not fail.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import TypeVar

import numpy as np

from trimtab.analysis.findings import Comparison, Curve, Result, Slope, score
from trimtab.analysis.thresholds import FAILS

Item = TypeVar("Item")
Key = TypeVar("Key")
DECADES = 3.0
_ROUNDING = 0.02  # decades: 3e-4 ... 0.3 is a window of three even where it was written as 0.00031


def sensitivity(losses: Sequence[float], first: float) -> float:
    """Of final losses over a grid; NaN for fewer than two or an unknown l0."""
    scores = [score(loss, first) for loss in losses]
    return fmean(scores) - min(scores) if len(scores) > 1 and math.isfinite(first) else math.nan


def best_window(lrs: Sequence[float], losses: Sequence[float], first: float) -> tuple[float, tuple[float, float]]:
    """The lowest sensitivity of all windows of DECADES, and the window. Learning rates in any order."""
    pairs = sorted(zip(lrs, losses, strict=True))
    places = [math.log10(lr) for lr, _ in pairs]
    ends = [int(np.searchsorted(places, start + DECADES + _ROUNDING)) for start in places]
    length = max(end - start for start, end in enumerate(ends))
    found = []
    for start in [i for i, end in enumerate(ends) if end - i == length]:
        part = pairs[start : start + length]
        found.append((sensitivity([loss for _, loss in part], first), (part[0][0], part[-1][0])))
    return min(found, key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf)


def fails(loss: float, best: float, first: float) -> bool:
    return score(loss, first) > best + FAILS * (first - best)


# --- Curves


def curves_of(results: Sequence[Result]) -> list[Curve]:
    """One per study, arm and size."""
    groups = group_by([result for result in results if math.isfinite(result.lr)], lambda result: result.key)
    return [curve for group in groups.values() if (curve := _curve(group)) is not None]


def _curve(group: Sequence[Result]) -> Curve | None:
    """A curve, if a run of it has finished."""
    first = _mean(result.first for result in group)
    done = [result for result in group if result.finished and math.isfinite(_score(result, first))]
    if not done:
        return None
    by_lr = group_by(sorted(done, key=lambda result: result.lr), lambda result: result.lr)
    lrs, groups = tuple(by_lr), list(by_lr.values())
    scores = [[_score(result, first) for result in runs] for runs in groups]
    loss = tuple(map(fmean, scores))
    best = min(loss)
    value, window = best_window(lrs, loss, first)
    seeds = seed_sensitivities(done, lrs)
    spread = [*seeds.values(), value] if len(seeds) > 1 else []
    return Curve(
        study=done[0].study,
        arm=done[0].arm,
        size=done[0].size,
        params=done[0].params,
        depth=done[0].depth,
        width=done[0].width,
        lrs=lrs,
        loss=loss,
        low=tuple(map(min, scores)),
        high=tuple(map(max, scores)),
        seeds=tuple(map(len, scores)),
        broken=tuple(sum(not math.isfinite(run.loss) for run in runs) for runs in groups),
        spikes=tuple(fmean(len(run.spikes) for run in runs) for runs in groups),
        loss_ratio=tuple(_ratio(x, best) for x in loss),
        logit_max=tuple(geometric_mean(run.logit_max for run in runs) for runs in groups),
        grad_rms=tuple(geometric_mean(run.grad_rms for run in runs) for runs in groups),
        missing=tuple(sorted({result.lr for result in group} - set(lrs))),
        first=first,
        best_lr=lrs[loss.index(best)],
        best_loss=best,
        sensitivity=value,
        sensitivity_low=min(spread, default=None),
        sensitivity_high=max(spread, default=None),
        window=window,
        failing_lr=_failing(lrs, loss, first),
    )


def _failing(lrs: Sequence[float], losses: Sequence[float], first: float) -> float | None:
    """The smallest learning rate above the best one that fails; the smallest of all if nothing was learned."""
    best = min(losses)
    if best >= first:
        return lrs[0]
    above = [(lr, loss) for lr, loss in zip(lrs, losses, strict=True) if lr > lrs[losses.index(best)]]
    return next((lr for lr, loss in above if fails(loss, best, first)), None)


def seed_sensitivities(results: Sequence[Result], lrs: Sequence[float]) -> dict[int, float]:
    """The sensitivity of each seed that has all of these learning rates."""
    found = {}
    for seed in sorted({result.seed for result in results}):
        runs = {run.lr: run for run in results if run.seed == seed and run.lr in lrs and run.finished}
        first = _mean(run.first for run in runs.values())
        if len(runs) == len(set(lrs)) and len(runs) > 1 and math.isfinite(first):
            found[seed] = best_window(list(runs), [run.loss for run in runs.values()], first)[0]
    return found


def run_fails(result: Result, curve: Curve) -> bool:
    """Whether one run fails, measured against the curve it belongs to."""
    worse = result.lr > curve.best_lr and fails(result.loss, curve.best_loss, curve.first)
    return worse or curve.best_loss >= curve.first


# --- Between sizes and arms


def slopes_of(curves: Sequence[Curve]) -> list[Slope]:
    """Sensitivity against size, along width, along depth, and along both where both change."""
    slopes = []
    for (study, arm), group in group_by(curves, lambda curve: (curve.study, curve.arm)).items():
        known = [curve for curve in group if curve.params and math.isfinite(curve.sensitivity)]
        same_depth = _largest(known, lambda curve: curve.depth)
        same_width = _largest(known, lambda curve: curve.width)
        everything = known if len(same_depth) < len(known) and len(same_width) < len(known) else []
        for along, those in (("width", same_depth), ("depth", same_width), ("both", everything)):
            if len({curve.params for curve in those}) > 1:
                x = [math.log10(curve.params or 1) for curve in those]
                value = float(np.polyfit(x, [curve.sensitivity for curve in those], 1)[0])
                sizes = tuple(curve.size for curve in those)
                slopes.append(Slope(study=study, arm=arm, along=along, sizes=sizes, value=value))  # type: ignore[arg-type]
    return slopes


def comparisons_of(results: Sequence[Result], curves: Sequence[Curve]) -> list[Comparison]:
    """The first arm of each study against the others, size by size."""
    arms = {result.study: result.arm for result in reversed(results)}
    found = []
    for (study, _), group in group_by(curves, lambda curve: (curve.study, curve.size)).items():
        for first in (curve for curve in group if curve.arm == arms[study]):
            found += [_compare(results, first, curve) for curve in group if curve is not first]
    return [comparison for comparison in found if comparison is not None]


def _compare(results: Sequence[Result], one: Curve, other: Curve) -> Comparison | None:
    """Over the learning rates that both have; their best windows may differ."""
    shared = [lr for lr in one.lrs if lr in other.lrs]
    if len(shared) < 2:
        return None
    values, seeds = [], []
    for curve in (one, other):
        losses = [loss for lr, loss in zip(curve.lrs, curve.loss, strict=True) if lr in shared]
        values.append(best_window(shared, losses, curve.first)[0])
        seeds.append(seed_sensitivities([result for result in results if result.key == curve.key], shared))
    ratio = _ratio(*values)
    ratios = [_ratio(seeds[0][seed], seeds[1][seed]) for seed in seeds[0] if seed in seeds[1]]
    spread = [*ratios, ratio] if len(ratios) > 1 else []
    return Comparison(
        study=one.study,
        size=one.size,
        params=one.params,
        arm=one.arm,
        other=other.arm,
        ratio=ratio,
        low=min(spread, default=None),
        high=max(spread, default=None),
    )


def geometric_mean(values: Iterator[float] | Sequence[float]) -> float:
    """Of those that are finite and above zero."""
    logs = [math.log(value) for value in values if math.isfinite(value) and value > 0]
    return math.exp(fmean(logs)) if logs else math.nan


def _score(result: Result, first: float) -> float:
    """A run that was not evaluated before training uses the loss before training of the others."""
    if math.isnan(result.loss):
        return math.nan
    return score(result.loss, result.first if math.isfinite(result.first) else first)


def _mean(values: Iterator[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else math.nan


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan if a == 0 else math.inf


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Lists of items by key, in the order of their first items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _largest(curves: Sequence[Curve], key: Callable[[Curve], int | None]) -> list[Curve]:
    """The largest group of curves that share a key."""
    return max(group_by([curve for curve in curves if key(curve) is not None], key).values(), key=len, default=[])
