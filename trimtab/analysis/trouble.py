"""Every kind of trouble has one function that looks at a run's files and answers with a finding, or with nothing.

A finding is evidence, not proof: two things that happen together may have a third cause. Thresholds are those of the
papers where they give one; the others are written below, and are ours.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from trimtab.analysis.one_run import ANY, FirstSpike, first_spikes, lead_times, losses_of
from trimtab.analysis.spikes import Floats, Ints, SpikeRules
from trimtab.runs.reader import Record, Run

CRITICAL_LOGIT = 1e4  # where runs of every size diverged (Wortsman et al. 2023b)
LOGIT_GROWTH, LOGIT_LEAST = 10.0, 50.0  # times the early value, and so large that a softmax is nearly one-hot
LOGZ_DRIFT = 5.0  # nats
ENDS_ABOVE = 1.2  # times the best loss
LEAST_SPIKE = 1.1  # times the usual loss; a loss without noise deviates by less than anybody cares for
EPS_SHARE = 1 / 11  # of the update lost where the gradient is ten times eps


@dataclass(frozen=True)
class Finding:
    kind: str
    what: str  # one sentence
    step: int | None = None  # when it began
    where: str = ""  # the tensor or layer that was first
    evidence: list[str] = field(default_factory=list)
    advice: str = ""

    def __str__(self) -> str:
        lines = [self.what, *(f"  {line}" for line in self.evidence)]
        return "\n".join([*lines, f"  What usually helps: {self.advice}"] if self.advice else lines)


def find_not_finite(run: Run, rules: SpikeRules) -> Finding | None:
    steps, losses = losses_of(run)
    bad = steps[~np.isfinite(losses)]
    names, first = _first_bad_tensors(run)
    alarms = [a for a in run.of_kind("alarm") if "finite" in str(a.get("kind", ""))]
    moments = [int(bad[0])] if len(bad) else []
    moments += [first] if names else []
    moments += [a["step"] for a in alarms if isinstance(a.get("step"), int)]
    if not moments:
        return None
    where = str(alarms[0].get("where", "")) if alarms else (names[0] if names else "")
    evidence = [_alarm_words(alarms[0])] if alarms else []
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        evidence.append(f"no number any more from step {first}: {', '.join(names[:3])}{more}")
    before = losses[np.isfinite(losses) & (steps < min(moments))]
    if len(before):
        evidence.append(f"the last loss before it was {before[-1]:.4g}, the best {before.min():.4g}")
    evidence += _rms_before(run, min(moments), rules)
    lost = f"the loss was not finite at {len(bad)} steps, first at {bad[0]}" if len(bad) else "the loss stayed finite"
    what = f"Not finite: from step {min(moments)}{f', first in {where}' if where else ''}; {lost}."
    advice = (
        "a lower learning rate or a longer warm-up, qk-norm and z-loss, StableAdamW; float32 where 16 bits overflow"
    )
    return Finding("not finite", what, min(moments), where, evidence, advice)


def find_loss_spikes(run: Run, rules: SpikeRules) -> Finding | None:
    every = first_spikes(run, rules)
    spikes = [spike for spike in every if spike.size >= LEAST_SPIKE]
    if not spikes:
        return None
    worst = max(spikes, key=lambda spike: spike.size)
    announced = next((spike for spike in spikes if spike.lead is not None and spike.lead >= rules.lead[0]), None)
    shown = {spike.step: spike for spike in (spikes[0], worst, announced) if spike is not None}
    evidence = [_spike_words(spike) for _, spike in sorted(shown.items())]
    if len(every) > len(spikes):
        evidence.append(f"{len(every) - len(spikes)} more, under {LEAST_SPIKE:g} times the usual loss, are left out")
    evidence += _lead_time_words(run, rules)
    what = f"Loss spikes: {len(spikes)}, the first at step {spikes[0].step}, the worst at step {worst.peak[0]}."
    if any(spike.tensors for spike in spikes):
        advice = "StableAdamW, a lower β₂ (RMS_t cannot exceed 1/√(1-β₂)), a longer warm-up, a lower learning rate"
    else:
        advice = (
            "look at the batches of these steps; gradient clipping, a lower learning rate, sequence length warmup. No "
            "RMS_t rose before, so a lower β₂ is less likely to help"
        )
    first = announced or (worst if worst.tensors else next((spike for spike in spikes if spike.tensors), worst))
    return Finding("loss spike", what, spikes[0].step, first.tensors[0][0] if first.tensors else "", evidence, advice)


def find_divergence(run: Run, rules: SpikeRules) -> Finding | None:
    """The loss in fifty pieces: is the median of the last far above the lowest?"""
    steps, losses = losses_of(run)
    steps, losses = steps[np.isfinite(losses)], losses[np.isfinite(losses)]
    if len(losses) < 50:
        return None
    pieces = np.array_split(np.arange(len(losses)), 50)
    medians = np.array([np.median(losses[piece]) for piece in pieces])
    noise = float(np.median([np.std(losses[piece]) for piece in pieces]))
    low, last = float(medians.min()), float(medians[-1])
    if not (last > ENDS_ABOVE * low and last - low > 2 * noise):
        return None
    near = np.flatnonzero(medians <= low + 0.1 * (last - low))[-1]  # where it was last about as good
    since = int(steps[pieces[near][-1]])
    evidence = [f"median loss {low:.4g} around step {since}, {last:.4g} at the end; noise within a piece {noise:.2g}"]
    begun = [spike for spike in first_spikes(run, rules) if 0 <= spike.step - since <= len(steps) // 20]
    evidence += [f"it began with the loss spike at step {begun[0].step}"] if begun else []
    evidence += [f"stopped: {e.get('reason', '')}" for e in run.of_kind("stopped")]
    what = f"Divergence: the loss was as good as ever until step {since} and ends {last / low:.2f} times as high."
    advice = "a lower learning rate, a longer warm-up, qk-norm, independent weight decay; resume from before that step"
    return Finding("divergence", what, since, "", evidence, advice)


def find_logit_growth(run: Run, _: SpikeRules) -> Finding | None:
    steps, grown = run.signals.steps, list[tuple[int, str, float, float]]()
    attends = run.layers("entropy")  # output logits have no entropy, and a largest one too
    for layer, values in ((name, x) for name, x in run.layers("logit_max").items() if name in attends):
        early = _median(values[np.isfinite(values)][: max(1, len(values) // 10)])
        high = np.isfinite(values) & ((values >= CRITICAL_LOGIT) | (values >= max(LOGIT_GROWTH * early, LOGIT_LEAST)))
        if high.any():
            grown.append((int(steps[high.argmax()]), layer, early, float(np.nanmax(values))))
    if not grown:
        return None
    step, layer, early, highest = min(grown)
    evidence = [f"{name}: {start:.3g} at first, {top:.3g} at most" for _, name, start, top in sorted(grown)[:3]]
    evidence += _entropy_words(run, layer) + _lead_words(run, step)
    what = f"Attention logits grow: {layer} first, from step {step}; {len(grown)} layers in all, up to {highest:.3g}."
    advice = f"qk-norm; a lower learning rate. Near {CRITICAL_LOGIT:g} runs diverge whatever their size"
    return Finding("attention logits", what, step, layer, evidence, advice)


def find_logz_drift(run: Run, _: SpikeRules) -> Finding | None:
    steps, values = run.signals.steps, run.signals.column("totals/logz")
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if len(values) < 10:
        return None
    tenth = len(values) // 10
    early, late = _median(values[:tenth]), _median(values[-tenth:])
    if abs(late) - abs(early) <= LOGZ_DRIFT:
        return None
    step = int(steps[(np.abs(values) - abs(early) > LOGZ_DRIFT).argmax()])
    what = f"log Z drifts: from {early:.2f} to {late:.2f} nats, past {LOGZ_DRIFT:g} more than at first at step {step}."
    advice = "z-loss (1e-4), or weight decay; in float32 the loss itself does not see the drift, in 16 bits it does"
    return Finding("logZ", what, step, "output logits", _lead_words(run, step), advice)


def find_near_eps(run: Run, _: SpikeRules) -> Finding | None:
    steps, small = run.signals.steps, list[tuple[float, str, int]]()
    for name, share in _eps_shares(run).items():
        late = _median(share[-max(1, len(share) // 10) :])
        if late >= EPS_SHARE:
            small.append((late, name, int(steps[(np.nan_to_num(share) >= EPS_SHARE).argmax()])))
    if not small:
        return None
    worst, name, step = max(small)
    evidence = [f"{other}: {part:.0%} of the update lost at the end" for part, other, _ in sorted(small)[::-1][:3]]
    what = f"Gradients near eps: {len(small)} tensors, worst {name}, whose update is {worst:.0%} too short."
    return Finding("eps", what, step, name, evidence, "a smaller eps (1e-15); a larger one makes it worse")


def find_skips(run: Run, _: SpikeRules) -> Finding | None:
    acted = [a for a in run.of_kind("alarm") if a.get("kind") == "action" and a.get("signal") == "skip"]
    skips = [*run.of_kind("skipped", "rolled back"), *({"reason": a.get("advice", "")} | a for a in acted)]
    if not skips:
        return None
    at = sorted({event["step"] for event in skips if isinstance(event.get("step"), int)})
    reasons = sorted({str(event.get("reason", "no reason given")) for event in skips})
    when = f", the first at step {at[0]}, the last at step {at[-1]}" if at else ""
    what = f"Skipped steps: {len(at) or len(skips)}{when}."
    advice = "find what made these steps impossible: the batches, or the instability named above"
    return Finding("skips", what, at[0] if at else None, "", reasons[:3], advice)


# --- Words and numbers that several findings need


def _spike_words(spike: FirstSpike) -> str:
    at, height = spike.peak
    known = math.isfinite(spike.usual[0])
    usual = f"usual {spike.usual[0]:.4g} ± {spike.usual[1]:.2g}" if known else "usual range, which is not known,"
    text = f"step {spike.step}: the loss leaves its {usual} and reaches {height:.4g} at step {at}; "
    if spike.lead is None:
        return text + "no tensor's RMS_t rose before"
    name, step, rms = spike.tensors[0]
    when = f"{spike.lead} steps before" if spike.lead > 0 else f"not before the loss, but {at - step} before its peak"
    more = f", then {len(spike.tensors) - 1} more tensors" if len(spike.tensors) > 1 else ""
    return text + f"{name} was first, RMS_t {rms:.2f} at step {step}, {when}{more}"


def _lead_time_words(run: Run, rules: SpikeRules) -> list[str]:
    """Over all loss spikes of the rule, small ones too: how much of it could be chance?"""
    together, *tensors = lead_times(run, rules)
    if not together.rms_spikes:
        return []
    count = len(together.loss_spikes)
    words = [
        f"an RMS spike of {ANY} began {rules.lead[0]} to {rules.lead[1]} steps before {together.explained} of {count}; "
        f"chance alone would give {together.chance * count:.1f} (p {together.p:.2g}); "
        f"{together.false_alarms} of {len(together.rms_spikes)} RMS spikes had no loss spike after them"
    ]
    return words + ([f"the most telling tensor is {tensors[0]}"] if tensors and tensors[0].explained else [])


def _alarm_words(alarm: Record) -> str:
    return f"alarm at step {alarm.get('step')}: {alarm.get('where')} {alarm.get('signal')} {alarm.get('value')}"


def _first_bad_tensors(run: Run) -> tuple[list[str], int]:
    """Tensors whose gradient stopped being a number, at the first step at which one did."""
    steps, since = run.signals.steps, dict[str, int]()
    for name, values in run.tensors("grad_rms").items():
        known = np.isfinite(values)
        lost = np.flatnonzero(~known & (np.cumsum(known) > 0))
        if len(lost):
            since[name] = int(steps[lost[0]])
    first = min(since.values(), default=0)
    return [name for name, step in since.items() if step == first], first


def _rms_before(run: Run, step: int, rules: SpikeRules) -> list[str]:
    steps, found = run.signals.steps, list[tuple[int, float, str]]()
    for name, rms in run.tensors("rms").items():
        high = (steps < step) & (steps >= step - rules.lead[1]) & (np.nan_to_num(rms) >= rules.rms)
        if high.any():
            found.append((int(steps[high.argmax()]), -float(rms[high.argmax()]), name))
    if not found:
        return []
    at, negative, name = min(found)
    return [f"{name} had RMS_t {-negative:.2f} at step {at}, {step - at} steps before"]


def _lead_words(run: Run, step: int) -> list[str]:
    """How long before the loss was far above its best."""
    steps, losses = losses_of(run)
    best = np.minimum.accumulate(np.where(np.isfinite(losses), losses, np.inf))
    bad: Ints = steps[(steps > step) & ~(losses <= 1.5 * best)]
    return [f"{bad[0] - step} steps before the loss was half above its best, at step {bad[0]}"] if len(bad) else []


def _entropy_words(run: Run, layer: str) -> list[str]:
    entropy = run.layers("entropy").get(layer, np.empty(0))
    entropy = entropy[np.isfinite(entropy)]
    return [f"its attention entropy went from {entropy[0]:.3g} to {entropy[-1]:.3g}"] if len(entropy) > 1 else []


def _eps_shares(run: Run) -> dict[str, Floats]:
    """Share of each update that eps takes away, eps / (r + eps); tensors without any gradient left out."""
    shares = run.tensors("eps_share")
    gradients = run.tensors("grad_rms")
    eps = (run.config.get("config") or {}).get("optim", {}).get("eps")
    if not shares and isinstance(eps, float) and eps > 0:
        shares = {name: eps / (r + eps) for name, r in gradients.items()}
    return {name: np.where(gradients.get(name, np.ones(1)) == 0, np.nan, share) for name, share in shares.items()}


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan
