"""Sensitivity to the learning rate, and the learning rate at which training fails.

    score(η)      the final validation loss, at most l0, the loss before training; l0 for a run without a final loss
    sensitivity   mean over the grid of score(η) - lowest score                      Wortsman et al. 2023b, section 2.2
    too slow      the part of that mean from learning rates below the best one: more steps would lower it
    unstable      the part from those above it
    window        sensitivity covers three decades. A longer grid has several such windows, and the lowest counts: an
                  optimum that moves must not count as instability

    fails(η, N)   for η from the best learning rate of size N on: score - reference > limit
    reference     the lowest score of this size, or that of a smaller size at the same η if it is lower
    limit         MARGIN, or DEVIATIONS standard errors of the difference of two means over seeds, if that is more
    edge          the learning rate at which score - reference crosses the limit, linear in log η between two of the
                  grid. Its range: the same for each seed where it was run; with one seed, the two learning rates

The standard deviation over seeds is pooled over the cells of an arm that are within MARGIN of the best: failing cells
vary more. Without a second seed it is unknown, and MARGIN decides alone. A diverging run has the score l0, so it fails
by the same rule. The paper has no formal rule. MARGIN and DEVIATIONS were fixed before they were tried.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

import numpy as np

from trimtab.analysis.findings import Comparison, Curve, Result, Slope, geometric_mean, score
from trimtab.analysis.thresholds import DEVIATIONS, MARGIN

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


# --- Curves


def curves_of(results: Sequence[Result]) -> list[Curve]:
    """One per study, arm and size."""
    groups = group_by([result for result in results if math.isfinite(result.lr)], lambda result: result.key)
    curves = [curve for group in groups.values() if (curve := _curve(group)) is not None]
    by_arm = group_by(curves, lambda curve: (curve.study, curve.arm))
    noise = {arm: _noise([group for key, group in groups.items() if key[:2] == arm], by_arm[arm]) for arm in by_arm}
    judged = []
    for curve in curves:
        arm = curve.study, curve.arm
        smaller = [x for x in by_arm[arm] if x.params and curve.params and x.params < curve.params]
        judged.append(_judge(curve, groups[curve.key], smaller, noise[arm]))
    return judged


def _curve(group: Sequence[Result]) -> Curve | None:
    """A curve without its failures, if a run of it has finished."""
    first = _mean(result.first for result in group)
    done = [result for result in group if result.finished and math.isfinite(_score(result, first))]
    if not done:
        return None
    by_lr = group_by(sorted(done, key=lambda result: result.lr), lambda result: result.lr)
    lrs, groups = tuple(by_lr), list(by_lr.values())
    scores = [[_score(result, first) for result in runs] for runs in groups]
    loss = tuple(map(fmean, scores))
    best = min(loss)
    planned = {result.lr for result in group if not result.extra}
    grid = [(lr, x) for lr, x in zip(lrs, loss, strict=True) if lr in planned]
    rates, losses = [lr for lr, _ in grid], [x for _, x in grid]
    value, window = best_window(rates, losses, first)
    too_slow, unstable = split_sensitivity(rates, losses, window)
    seeds = seed_sensitivities(done, rates, losses)
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
        too_slow=too_slow,
        unstable=unstable,
        sensitivity_low=min(spread, default=None),
        sensitivity_high=max(spread, default=None),
        window=window,
    )


def split_sensitivity(
    lrs: Sequence[float], losses: Sequence[float], window: tuple[float, float]
) -> tuple[float, float]:
    """The parts of the sensitivity below and above the best learning rate of the window."""
    inside = [(lr, loss) for lr, loss in zip(lrs, losses, strict=True) if window[0] <= lr <= window[1]]
    best = min(inside, key=lambda pair: pair[1])
    below, above = (sum(loss - best[1] for lr, loss in inside if (lr < best[0]) == slow) for slow in (True, False))
    return below / len(inside), above / len(inside)


# --- Failures


def _noise(groups: Sequence[Sequence[Result]], curves: Sequence[Curve]) -> float:
    """Standard deviation of the score over seeds, pooled over the cells of an arm that are near the best; or NaN."""
    best = {curve.key: curve for curve in curves}
    squares, free = 0.0, 0
    for group in groups:
        curve = best.get(group[0].key)
        cells = group_by([run for run in group if math.isfinite(run.score)], lambda run: run.lr).values()
        for scores in ([run.score for run in cell] for cell in cells if curve is not None):
            middle = fmean(scores)
            if curve is not None and middle - curve.best_loss <= MARGIN:
                squares += sum((score - middle) ** 2 for score in scores)
                free += len(scores) - 1
    return math.sqrt(squares / free) if free else math.nan


def _judge(curve: Curve, group: Sequence[Result], smaller: Sequence[Curve], noise: float) -> Curve:
    """The curve with its reference, its limit and its edge."""
    known = {
        lr: [loss for x in smaller for rate, loss in zip(x.lrs, x.loss, strict=True) if rate == lr] for lr in curve.lrs
    }
    reference = tuple(min([curve.best_loss, *known[lr]]) for lr in curve.lrs)
    at_best = curve.seeds[curve.lrs.index(curve.best_lr)]
    limit = tuple(_limit(noise, seeds, at_best) for seeds in curve.seeds)
    curve = replace(curve, reference=reference, limit=limit, noise=noise)
    if not curve.learned:
        return replace(curve, failing_lr=curve.lrs[0])
    pairs = list(zip(curve.lrs, curve.loss, strict=True))
    failing = next((lr for lr, loss in pairs if curve.excess(lr, loss) > 1), None)
    if failing is None:
        return curve
    seeds = {run.seed for run in group if math.isfinite(run.score)}
    losses = [_with_seed(curve.lrs, curve.loss, group, seed) for seed in sorted(seeds)] if len(seeds) > 1 else []
    edges = [_edge(curve, own) for own in losses]
    found = [edge for edge in edges if edge is not None]
    held = max((lr for lr in curve.lrs if curve.best_lr <= lr < failing), default=failing)
    return replace(
        curve,
        failing_lr=failing,
        edge=_edge(curve, curve.loss),
        edge_low=min(found, default=held),
        # A seed that does not fail at any learning rate has its edge above them.
        edge_high=max(found, default=failing) if None not in edges else curve.lrs[-1],
    )


def _limit(noise: float, seeds: int, at_best: int) -> float:
    return max(MARGIN, DEVIATIONS * noise * math.sqrt(1 / seeds + 1 / at_best)) if math.isfinite(noise) else MARGIN


def _with_seed(lrs: Sequence[float], losses: Sequence[float], runs: Sequence[Result], seed: int) -> list[float]:
    """The losses of one seed; the given ones where it was not run."""
    own = {run.lr: run.score for run in runs if run.seed == seed and math.isfinite(run.score)}
    return [own.get(lr, loss) for lr, loss in zip(lrs, losses, strict=True)]


def _edge(curve: Curve, losses: Sequence[float]) -> float | None:
    """Where the excess crosses 1, linear in the logarithm of the learning rate."""
    before: tuple[float, float] | None = None
    for lr, loss in zip(curve.lrs, losses, strict=True):
        excess = curve.excess(lr, loss)
        if excess > 1:
            if before is None:
                return lr
            share = (1 - before[1]) / (excess - before[1])
            return float(before[0] * (lr / before[0]) ** share)
        before = (lr, excess) if lr >= curve.best_lr else None
    return None


def seed_sensitivities(results: Sequence[Result], lrs: Sequence[float], losses: Sequence[float]) -> dict[int, float]:
    """The sensitivity of each seed; where a seed was not run, the mean over the others counts."""
    first = _mean(result.first for result in results)
    known = [run for run in results if run.finished and run.lr in lrs and math.isfinite(run.score)]
    return {
        seed: best_window(lrs, _with_seed(lrs, losses, known, seed), first)[0]
        for seed in sorted({run.seed for run in known})
    }


def run_fails(result: Result, curve: Curve) -> bool:
    """Whether one run fails, compared with the curve it belongs to."""
    return not curve.learned or curve.excess(result.lr, score(result.loss, curve.first)) > 1


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
    """Over the learning rates of the grid that both have; their best windows may differ."""
    runs = [[run for run in results if run.key == curve.key and run.finished] for curve in (one, other)]
    grids = [{run.lr for run in those if not run.extra} for those in runs]
    shared = [lr for lr in one.lrs if lr in other.lrs and lr in grids[0] & grids[1]]
    if len(shared) < 2:
        return None
    values, unstable, seeds = [], [], []
    for curve, those in zip((one, other), runs, strict=True):
        losses = [loss for lr, loss in zip(curve.lrs, curve.loss, strict=True) if lr in shared]
        value, window = best_window(shared, losses, curve.first)
        values.append(value)
        unstable.append(split_sensitivity(shared, losses, window)[1])
        seeds.append(seed_sensitivities(those, shared, losses))
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
        unstable=_ratio(*unstable),
        low=min(spread, default=None),
        high=max(spread, default=None),
    )


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
