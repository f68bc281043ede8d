"""What went wrong in a run, from its files: one function per kind of problem, which returns its evidence or None.

Evidence is not proof: two things that happen together may have a third cause.
"""

import math
from dataclasses import dataclass

import numpy as np

from trimtab.analysis import spikes
from trimtab.analysis import thresholds as limits
from trimtab.analysis.one_run import (
    FirstSpike,
    LeadTime,
    first_above,
    first_spikes,
    lead_times,
    losses_of,
    outliers,
    rules_for,
)
from trimtab.analysis.spikes import SpikeRules
from trimtab.runs import Event, EventKind, Run
from trimtab.runs.reader import Floats

EPS_SHARE = 1 / (1 + limits.NEAR_EPS)  # of the update that eps takes where the gradient is NEAR_EPS times eps


@dataclass(frozen=True, kw_only=True)
class Problem:
    step: int | None = None  # when it began
    where: str = ""  # the tensor or layer that was first


@dataclass(frozen=True, kw_only=True)
class NotFinite(Problem):  # a loss, a gradient or an alarm
    bad_losses: list[int]  # steps
    bad_tensors: tuple[int, list[str]] | None  # the first step with such gradients, and their tensors
    alarm: Event | None
    losses: tuple[float, float] | None  # the last before it, and the best
    rms: tuple[str, int, float] | None  # the first RMS spike shortly before: tensor, step, RMS_t


@dataclass(frozen=True, kw_only=True)
class Explosion(Problem):  # in the first steps the loss rises far above the loss before training
    before: float
    peak: tuple[int, float]  # step and height; a loss that is not finite is the highest
    last: float  # loss at the end
    lr: float  # at the step when it began
    reasons: list[str]  # why the run was stopped


@dataclass(frozen=True, kw_only=True)
class Divergence(Problem):  # the loss ends more than MARGIN above its best
    best: float  # median loss of the best piece of the run
    last: float
    noise: float  # standard deviation within a piece
    spike: int | None  # the loss spike it began with
    reasons: list[str]  # why the run was stopped


@dataclass(frozen=True, kw_only=True)
class LossSpikes(Problem):
    spikes: list[FirstSpike]  # at least LEAST_SPIKE times the usual loss
    worst: FirstSpike
    shown: list[FirstSpike]  # the first, the worst, and the first that an RMS spike predicted
    small: int  # spikes below LEAST_SPIKE
    lead_times: list[LeadTime]  # over all loss spikes, small ones included
    lead: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class BadBatches(Problem):  # single losses far above the others
    losses: list[FirstSpike]


@dataclass(frozen=True, kw_only=True)
class LogitGrowth(Problem):  # of attention
    layers: list[tuple[int, str, float, float]]  # step, layer, early value, largest value
    at_first: bool  # already large when they were first measured
    entropy: tuple[float, float] | None  # attention entropy of the first layer, at the first and the last step
    rises: int | None  # step at which the loss is 1.5 times its best


@dataclass(frozen=True, kw_only=True)
class LogzDrift(Problem):  # of the output logits
    early: float
    late: float
    rises: int | None


@dataclass(frozen=True, kw_only=True)
class NearEps(Problem):  # gradients so small that Adam's eps shortens the update
    tensors: list[tuple[float, str]]  # share of the update that is lost, the largest first


@dataclass(frozen=True, kw_only=True)
class SkippedSteps(Problem):
    count: int
    last: int | None
    reasons: list[str]


def find_problems(run: Run, rules: SpikeRules | None = None) -> list[Problem]:
    """Everything that went wrong, the most severe kind first."""
    rules = rules or rules_for(run)
    exploded = find_explosion(run, rules)
    # A run that never recovers from its first steps has no best loss to diverge from.
    diverged = None if exploded is not None and not exploded.last < exploded.before else find_divergence(run, rules)
    severe = (exploded, find_not_finite(run, rules), diverged, find_loss_spikes(run, rules))
    others = (find_bad_batches(run, rules), find_logit_growth(run), find_logz_drift(run), find_near_eps(run))
    return [problem for problem in (*severe, *others, find_skips(run)) if problem is not None]


def find_explosion(run: Run, rules: SpikeRules) -> Explosion | None:
    """The first loss is that before training. Are two losses of the first steps, or the last, far above it?"""
    steps, losses = losses_of(run)
    if not len(steps) or steps[0] > 1 or not np.isfinite(losses[0]):
        return None
    before = float(losses[0])
    high = steps[~(losses < max(limits.EXPLODES * before, before + 1))]
    if not len(high) or high[0] > max(rules.ignore, limits.FIRST_STEPS):
        return None
    if high[0] != steps[-1] and not (high[1:] - high[0] < rules.gap).any():
        return None
    rates = dict(zip(run.log.steps.tolist(), run.log.column("lr").tolist(), strict=True))
    return Explosion(
        step=int(high[0]),
        before=before,
        peak=spikes.find_peak(steps, losses, (int(high[0]), int(high[0])), rules),
        last=_median(losses[-10:]) if np.isfinite(losses[-1]) else math.nan,
        lr=rates.get(int(high[0]), math.nan),
        reasons=_reasons(run),
    )


def find_not_finite(run: Run, rules: SpikeRules) -> NotFinite | None:
    steps, losses = losses_of(run)
    bad = [int(step) for step in steps[~np.isfinite(losses)]]
    tensors = _first_bad_tensors(run)
    alarms = [event for event in run.of_kind(EventKind.ALARM) if "finite" in event.alarm.kind]
    moments = [*bad[:1], *([tensors[0]] if tensors else []), *(a.step for a in alarms if a.step is not None)]
    if not moments:
        return None
    first = min(moments)
    before = losses[np.isfinite(losses) & (steps < first)]
    return NotFinite(
        step=first,
        where=alarms[0].alarm.where if alarms else tensors[1][0] if tensors else "",
        bad_losses=bad,
        bad_tensors=tensors,
        alarm=alarms[0] if alarms else None,
        losses=(float(before[-1]), float(before.min())) if len(before) else None,
        rms=next(iter(first_above(run, (first - rules.lead[1], first - 1), rules.rms)), None),
    )


def find_divergence(run: Run, rules: SpikeRules) -> Divergence | None:
    """The loss in up to fifty pieces: is the median of the last more than `MARGIN` above the lowest?"""
    steps, losses = losses_of(run)
    steps, losses = steps[np.isfinite(losses)], losses[np.isfinite(losses)]
    if len(losses) < 20:
        return None
    pieces = np.array_split(np.arange(len(losses)), min(50, len(losses) // 4))
    medians = np.array([np.median(losses[piece]) for piece in pieces])
    noise = float(np.median([np.std(losses[piece]) for piece in pieces]))
    best, last = float(medians.min()), float(medians[-1])
    # By chance the lowest of fifty medians is about two standard errors too low, and the last may be two too high.
    error = 1.25 * noise / math.sqrt(len(pieces[-1]))
    if last - best <= max(limits.MARGIN, 5 * error):
        return None
    near = np.flatnonzero(medians <= best + 0.1 * (last - best))[-1]  # where it was last about as good
    since = int(steps[pieces[near][-1]])
    begun = [spike.step for spike in first_spikes(run, rules) if 0 <= spike.step - since <= len(steps) // 20]
    spike = next(iter(begun), None)
    return Divergence(step=since, best=best, last=last, noise=noise, spike=spike, reasons=_reasons(run))


def find_loss_spikes(run: Run, rules: SpikeRules) -> LossSpikes | None:
    every = first_spikes(run, rules)
    spikes = [spike for spike in every if spike.size >= limits.LEAST_SPIKE]
    if not spikes:
        return None
    worst = max(spikes, key=lambda spike: spike.size)
    predicted = next((spike for spike in spikes if spike.lead is not None and spike.lead >= rules.lead[0]), None)
    shown = {spike.step: spike for spike in (spikes[0], worst, predicted) if spike is not None}
    first = predicted or (worst if worst.tensors else next((spike for spike in spikes if spike.tensors), worst))
    return LossSpikes(
        step=spikes[0].step,
        where=first.tensors[0][0] if first.tensors else "",
        spikes=spikes,
        worst=worst,
        shown=[spike for _, spike in sorted(shown.items())],
        small=len(every) - len(spikes),
        lead_times=lead_times(run, rules),
        lead=rules.lead,
    )


def find_bad_batches(run: Run, rules: SpikeRules) -> BadBatches | None:
    found = outliers(run, rules)
    return BadBatches(step=found[0].step, losses=found) if found else None


def find_logit_growth(run: Run) -> LogitGrowth | None:
    """Compared with the early logits, but at most with `LOGIT_FIRST`: they may have grown before the first look."""
    steps, grown = run.signals.steps, list[tuple[int, str, float, float]]()
    entropies = run.signals.layers("entropy")  # output logits have no entropy
    for layer, values in run.signals.layers("logit_max").items():
        early = _median(values[np.isfinite(values)][: max(1, len(values) // 10)])
        limit = max(limits.LOGIT_GROWTH * min(early, limits.LOGIT_FIRST), limits.LOGIT_LEAST)
        high = np.isfinite(values) & (values >= limit)
        if layer in entropies and high.any():
            grown.append((int(steps[high.argmax()]), layer, early, float(np.nanmax(values))))
    if not grown:
        return None
    step, layer = min(grown)[:2]
    known = np.isfinite(entropies[layer])
    entropy = entropies[layer][known]
    ends = (float(entropy[0]), float(entropy[-1])) if len(entropy) > 1 else None
    return LogitGrowth(
        step=step,
        where=layer,
        layers=sorted(grown),
        at_first=step == steps[known.argmax()],
        entropy=ends,
        rises=_loss_rises(run, step),
    )


def find_logz_drift(run: Run) -> LogzDrift | None:
    steps, values = run.signals.steps, run.signals.total("logz")
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if len(values) < 10:
        return None
    tenth = len(values) // 10
    early, late = _median(values[:tenth]), _median(values[-tenth:])
    if abs(late) - abs(early) <= limits.LOGZ_DRIFT:
        return None
    step = int(steps[(np.abs(values) - abs(early) > limits.LOGZ_DRIFT).argmax()])
    return LogzDrift(step=step, where="output logits", early=early, late=late, rises=_loss_rises(run, step))


def find_near_eps(run: Run) -> NearEps | None:
    steps, small = run.signals.steps, list[tuple[float, str, int]]()
    for name, share in _eps_shares(run).items():
        late = _median(share[-max(1, len(share) // 10) :])
        if late >= EPS_SHARE:
            small.append((late, name, int(steps[(np.nan_to_num(share) >= EPS_SHARE).argmax()])))
    if not small:
        return None
    small.sort(reverse=True)
    return NearEps(step=small[0][2], where=small[0][1], tensors=[row[:2] for row in small])


def find_skips(run: Run) -> SkippedSteps | None:
    acted = [event for event in run.of_kind(EventKind.ALARM) if event.alarm.skips]
    events = run.of_kind(EventKind.SKIPPED, EventKind.ROLLED_BACK)
    if not acted and not events:
        return None
    at = sorted({event.step for event in (*events, *acted) if event.step is not None})
    reasons = sorted({event.reason for event in events} | {event.alarm.advice for event in acted})
    first, last = (at[0], at[-1]) if at else (None, None)
    return SkippedSteps(step=first, last=last, count=len(at) or len(events) + len(acted), reasons=reasons)


def _first_bad_tensors(run: Run) -> tuple[int, list[str]] | None:
    """The first step at which gradients became NaN or infinite, and the tensors."""
    steps, since = run.signals.steps, dict[str, int]()
    for name, values in run.signals.tensors("grad_rms").items():
        known = np.isfinite(values)
        lost = np.flatnonzero(~known & (np.cumsum(known) > 0))
        if len(lost):
            since[name] = int(steps[lost[0]])
    first = min(since.values(), default=None)
    return None if first is None else (first, [name for name, step in since.items() if step == first])


def _reasons(run: Run) -> list[str]:
    return [event.reason for event in run.of_kind(EventKind.STOPPED)]


def _loss_rises(run: Run, step: int) -> int | None:
    """The first step after `step` at which the loss was 1.5 times its best."""
    steps, losses = losses_of(run)
    best = np.minimum.accumulate(np.where(np.isfinite(losses), losses, np.inf))
    bad = steps[(steps > step) & ~(losses <= 1.5 * best)]
    return int(bad[0]) if len(bad) else None


def _eps_shares(run: Run) -> dict[str, Floats]:
    """Share of each update that eps takes, eps / (r + eps); NaN where the gradient is zero."""
    shares, gradients = run.signals.tensors("eps_share"), run.signals.tensors("grad_rms")
    eps = run.config.values.get("optim.eps") if run.config is not None else None
    if not shares and isinstance(eps, float) and eps > 0:
        shares = {name: eps / (r + eps) for name, r in gradients.items()}
    return {name: np.where(gradients.get(name, np.ones(1)) == 0, np.nan, share) for name, share in shares.items()}


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan
