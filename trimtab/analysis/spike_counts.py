"""RMS spikes before loss spikes, counted over several runs: how many are preceded, how many would be by chance.

    onset    every loss spike by the paper's rule, dated where it begins
    peak     only those that at least double the loss, dated where it is highest
    race     which raises an alarm first: RMS_t, or the loss itself

The rules are those that docs/results/spikes.md fixed for runs of a few hundred steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np

from trimtab.analysis.one_run import binomial_tail, losses_of, rms_of
from trimtab.analysis.spikes import (
    SpikeRules,
    chance_rate,
    deviates,
    exceeds,
    explain_spikes,
    find_peak,
    loss_spans,
    loss_spikes,
    merge,
    rms_spikes,
    running_range,
)
from trimtab.runs.reader import Run

RULES = SpikeRules(ignore=60, window=50)
LARGE = 2.0  # times the usual loss, at its peak

# The onset of every loss spike by the paper's rule, or the peaks of those that at least double the loss.
Moment = Literal["onset", "peak"]


@dataclass(frozen=True)
class Count:
    """Loss spikes and RMS spikes of several runs, added up."""

    runs: int
    steps: int
    loss_spikes: int
    rms_spikes: int
    preceded: int  # loss spikes with an RMS spike in the lead
    chance: float  # share of the loss spikes that a blind guess precedes
    p: float
    false_alarms: int  # RMS spikes that no loss spike followed
    leads: list[int]
    same_step: int  # loss spikes with an RMS spike in the very same step
    after: int  # loss spikes that an RMS spike followed within the same number of steps: the mirror image


def count(
    runs: Sequence[Run], tensor: str | None, moment: Moment, rules: SpikeRules = RULES, share: float = 0.0
) -> Count:
    """`tensor` None counts the RMS spikes of all, or with a `share` the steps at which so many are high together."""
    parts = [_count_one(run, moment, rules, alarms(run, tensor, rules, share)) for run in runs]
    late, hits = sum(part["late"] for part in parts), sum(len(part["leads"]) for part in parts)
    expected = sum(part["late"] * part["chance"] for part in parts if part["late"])
    chance = expected / late if late else fmean(part["chance"] for part in parts)
    return Count(
        runs=len(runs),
        steps=sum(part["steps"] for part in parts),
        loss_spikes=late,
        rms_spikes=sum(part["early"] for part in parts),
        preceded=hits,
        chance=chance,
        p=binomial_tail(hits, late, chance),
        false_alarms=sum(part["false"] for part in parts),
        leads=sorted(lead for part in parts for lead in part["leads"]),
        same_step=sum(part["same"] for part in parts),
        after=sum(part["after"] for part in parts),
    )


def moments(run: Run, moment: Moment, rules: SpikeRules = RULES) -> list[int]:
    """When the loss spikes of a run happen."""
    if moment == "onset":
        return loss_spikes(*losses_of(run), rules)
    return [peak for _, peak in large_spikes(run, rules)]


def large_spikes(run: Run, rules: SpikeRules = RULES) -> list[tuple[int, int]]:
    """Onset and peak of the loss spikes that at least double the loss."""
    steps, losses = losses_of(run)
    usual, _ = running_range(losses, rules.window)
    found = []
    for span in loss_spans(steps, losses, rules):
        peak, height = find_peak(steps, losses, span, rules)
        if not height < LARGE * usual[np.searchsorted(steps, span[0])]:
            found.append((span[0], peak))
    return found


def highest_rise(run: Run, rules: SpikeRules = RULES) -> float:
    """The highest loss above the usual one before it, as a share of the first loss. Unlike a ratio it does not grow
    where the usual loss is near zero."""
    steps, losses = losses_of(run)
    usual, _ = running_range(losses, rules.window)
    rises = (losses - usual)[(steps > rules.ignore) & np.isfinite(usual)]
    if not len(rises):
        return math.nan
    return float(np.nan_to_num(rises, nan=math.inf).max() / losses[0])


@dataclass(frozen=True)
class Race:
    """For each large spike, how many steps RMS_t sounded before the loss did; None if it did not until the peak."""

    ahead: list[int | None]


def race(runs: Sequence[Run], rules: SpikeRules = RULES) -> Race:
    ahead: list[int | None] = []
    for run in runs:
        steps, losses = losses_of(run)
        watched, by_tensor = rms_of(run)
        high = np.unique(np.concatenate([exceeds(watched, rms, rules) for rms in by_tensor.values()]))
        late = steps[deviates(losses, rules)]
        for onset, peak in large_spikes(run, rules):
            loss_alarm = late[late >= onset][rules.deviating - 1]  # it takes so many to be sure
            near = high[(high >= onset - rules.lead[1]) & (high <= peak)]
            ahead.append(int(loss_alarm - near[0]) if len(near) else None)
    return Race(ahead)


def alarms(run: Run, tensor: str | None, rules: SpikeRules, share: float = 0.0) -> list[int]:
    """The steps at which RMS spikes begin."""
    watched, by_tensor = rms_of(run)
    if share:
        high = np.concatenate([exceeds(watched, rms, rules) for rms in by_tensor.values()])
        found, times = np.unique(high, return_counts=True)
        return merge(found[times >= share * len(by_tensor)], rules.gap)
    names = list(by_tensor) if tensor is None else [tensor]
    return sorted({step for name in names for step in rms_spikes(watched, by_tensor[name], rules)})


def _count_one(run: Run, moment: Moment, rules: SpikeRules, early: list[int]) -> dict[str, Any]:
    steps, _ = losses_of(run)
    late = moments(run, moment, rules)
    causes = explain_spikes(late, early, rules)
    first, last = rules.lead
    return {
        "steps": int((steps > rules.ignore).sum()),
        "late": len(late),
        "early": len(early),
        "leads": [step - cause for step, cause in zip(late, causes, strict=True) if cause is not None],
        "chance": chance_rate(early, steps, rules),
        "false": sum(not any(first <= step - other <= last for step in late) for other in early),
        "same": sum(step in early for step in late),
        "after": sum(any(first <= other - step <= last for other in early) for step in late),
    }
