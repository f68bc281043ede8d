"""What went wrong in a run, in sentences with the evidence: `print(explain("runs/gpt"))`.

`trimtab.analysis.problems` finds the problems; each of its classes has a function here that describes it.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import singledispatch
from pathlib import Path

import numpy as np

from trimtab.analysis import problems
from trimtab.analysis.one_run import ANY, Analysis, FirstSpike, LeadTime, losses_of
from trimtab.analysis.spikes import SpikeRules
from trimtab.analysis.thresholds import CRITICAL_LOGIT, LEAST_SPIKE, LOGZ_DRIFT, LOSS_RATIOS
from trimtab.runs import EventKind, Run, read_run


@dataclass(frozen=True)
class Finding:
    """One problem in words."""

    kind: str
    what: str  # one sentence
    evidence: list[str] = field(default_factory=list)
    advice: str = ""
    step: int | None = None  # when it began
    where: str = ""  # the tensor or layer that was first

    def __str__(self) -> str:
        remedies = [f"Possible remedies: {self.advice}"] if self.advice else []
        return "\n  ".join([self.what, *self.evidence, *remedies])


@dataclass(frozen=True)
class Explanation:
    folder: Path
    summary: str
    findings: list[Finding]

    def __bool__(self) -> bool:
        """Whether there is a problem."""
        return bool(self.findings)

    def __str__(self) -> str:
        found = [f"{i}. {finding}" for i, finding in enumerate(self.findings, start=1)]
        return "\n\n".join([self.summary, *(found or ["These files show no problem."])])


def explain(folder: Run | str | Path, rules: SpikeRules | None = None) -> Explanation:
    """Find every kind of problem, the most severe first."""
    run = folder if isinstance(folder, Run) else read_run(folder)
    found = problems.find_problems(run, rules)
    findings = [Finding(*problem_words(x), step=x.step, where=x.where) for x in found]
    return Explanation(run.folder.path, _summary(run), findings)


def _summary(run: Run) -> str:
    steps, losses = losses_of(run)
    finite = losses[np.isfinite(losses)]
    why = str(getattr(run.result.why, "value", run.result.why)) if run.result is not None else ""
    state = f"ended: {why}" if why else f"not finished (there is no {run.folder.result.name})"
    parts = [f"{run.folder.path}: {len(steps)} steps, {state}"]
    if len(finite):
        parts.append(f"loss {finite[0]:.4g} at the start, {finite.min():.4g} at best, {finite[-1]:.4g} at the end")
    watched = len(run.signals.steps)
    parts.append(f"signals of {watched} steps" if watched else f"no {run.folder.signals.name}")
    alarms = Counter(event.alarm.kind or "?" for event in run.of_kind(EventKind.ALARM))
    if alarms:
        parts.append(f"{alarms.total()} alarms ({', '.join(f'{many} {kind}' for kind, many in alarms.most_common())})")
    if run.broken:
        parts.append(f"{run.broken} lines could not be read")
    return "; ".join([*parts, *(f"not as the run wrote it: {text}" for text in run.damage)])


Words = tuple[str, str, list[str], str]  # kind, sentence, evidence, remedies


@singledispatch
def problem_words(problem: problems.Problem) -> Words:
    raise TypeError(f"no words for {type(problem).__name__}")


@problem_words.register
def _(x: problems.NotFinite) -> Words:
    evidence = []
    if x.alarm is not None:
        alarm = x.alarm.alarm
        evidence.append(f"alarm at step {x.alarm.step}: {alarm.where} {alarm.signal} {alarm.value:g}")
    if x.bad_tensors is not None:
        step, names = x.bad_tensors
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        evidence.append(f"gradients not finite from step {step}: {', '.join(names[:3])}{more}")
    if x.losses is not None:
        evidence.append(f"the last loss before was {x.losses[0]:.4g}, the best {x.losses[1]:.4g}")
    if x.rms is not None:
        name, step, rms = x.rms
        evidence.append(f"{name} had RMS_t {rms:.2f} at step {step}, {(x.step or 0) - step} steps before")
    lost = f"the loss was not finite at {len(x.bad_losses)} steps, first at {x.bad_losses[0]}" if x.bad_losses else ""
    first = f", first in {x.where}" if x.where else ""
    what = f"Values that are not finite from step {x.step}{first}; {lost or 'the loss stayed finite'}."
    advice = "a lower learning rate or longer warmup, qk-norm and z-loss, StableAdamW; float32 where 16 bits overflow"
    return "non-finite", what, evidence, advice


@problem_words.register
def _(x: problems.Divergence) -> Words:
    evidence = [f"median loss {x.best:.4g} around step {x.step}, {x.last:.4g} at the end; noise {x.noise:.2g}"]
    evidence += [f"it began with the loss spike at step {x.spike}"] if x.spike is not None else []
    evidence += [f"stopped: {reason}" for reason in x.reasons]
    what = f"Divergence: the loss was near its best until step {x.step} and ends {x.last / x.best:.2f} times as high."
    advice = "a lower learning rate, longer warmup, qk-norm, independent weight decay; resume from before that step"
    return "divergence", what, evidence, advice


@problem_words.register
def _(x: problems.LossSpikes) -> Words:
    evidence = [_spike_words(spike) for spike in x.shown]
    if x.small:
        evidence.append(f"{x.small} smaller spikes, below {LEAST_SPIKE:g} times the usual loss, are left out")
    together, *tensors = x.lead_times
    if together.rms_spikes:
        many = len(together.loss_spikes)
        evidence.append(
            f"an RMS spike of {ANY} began {x.lead[0]} to {x.lead[1]} steps before {together.explained} of {many}; "
            f"expected by chance: {together.chance * many:.1f} (p {together.p:.2g}); "
            f"{together.false_alarms} of {len(together.rms_spikes)} RMS spikes had no loss spike after them"
        )
        if tensors and tensors[0].explained:
            evidence.append(f"the best predictor is {lead_time_words(tensors[0])}")
    what = f"Loss spikes: {len(x.spikes)}, the first at step {x.step}, the worst at step {x.worst.peak[0]}."
    if any(spike.tensors for spike in x.spikes):
        advice = "StableAdamW, a lower β₂ (RMS_t cannot exceed 1/√(1-β₂)), longer warmup, a lower learning rate"
    else:
        advice = "check the batches of these steps; gradient clipping, a lower learning rate, sequence length warmup. "
        advice += "No RMS_t rose before, so a lower β₂ is less likely to help"
    return "loss spike", what, evidence, advice


@problem_words.register
def _(x: problems.LogitGrowth) -> Words:
    evidence = [f"{name}: {start:.3g} early, {top:.3g} at most" for _, name, start, top in x.layers[:3]]
    evidence += [f"its attention entropy went from {x.entropy[0]:.3g} to {x.entropy[1]:.3g}"] if x.entropy else []
    highest = x.layers[0][3]
    what = f"Attention logits grow: {x.where} first, from step {x.step}; {len(x.layers)} layers, up to {highest:.3g}."
    advice = f"qk-norm, a lower learning rate. Runs with logits near {CRITICAL_LOGIT:g} diverge at every size"
    return "attention logits", what, evidence + _lead_words(x.step, x.rises), advice


@problem_words.register
def _(x: problems.LogzDrift) -> Words:
    what = f"log Z drifts from {x.early:.2f} to {x.late:.2f} nats; by more than {LOGZ_DRIFT:g} at step {x.step}."
    advice = "z-loss (1e-4) or weight decay. The drift changes the loss in 16 bits, not in float32"
    return "logZ", what, _lead_words(x.step, x.rises), advice


@problem_words.register
def _(x: problems.NearEps) -> Words:
    evidence = [f"{name}: {share:.0%} of the update lost at the end" for share, name in x.tensors[:3]]
    what = f"Gradients near eps: {len(x.tensors)} tensors; the update of {x.where} is {x.tensors[0][0]:.0%} too short."
    return "eps", what, evidence, "a smaller eps (1e-15); a larger one makes it worse"


@problem_words.register
def _(x: problems.SkippedSteps) -> Words:
    when = f", the first at step {x.step}, the last at step {x.last}" if x.step is not None else ""
    reasons = [reason or "no reason given" for reason in x.reasons[:3]]
    advice = "check the batches of these steps, and the problems above"
    return "skips", f"Skipped steps: {x.count}{when}.", reasons, advice


def _spike_words(spike: FirstSpike) -> str:
    at, height = spike.peak
    usual = f"{spike.usual[0]:.4g} ± {spike.usual[1]:.2g}" if math.isfinite(spike.usual[0]) else "an unknown level"
    text = f"step {spike.step}: the loss rises from {usual} to {height:.4g} at step {at}; "
    if spike.lead is None:
        return text + "no tensor's RMS_t rose before"
    name, step, rms = spike.tensors[0]
    late = f"not before the onset, {at - step} steps before the peak"
    when = f"{spike.lead} steps before" if spike.lead > 0 else late
    more = f", then {len(spike.tensors) - 1} more tensors" if len(spike.tensors) > 1 else ""
    return text + f"{name} was first, RMS_t {rms:.2f} at step {step}, {when}{more}"


def _lead_words(step: int | None, rises: int | None) -> list[str]:
    if rises is None:
        return []
    return [f"{rises - (step or 0)} steps before the loss was 1.5 times its best, at step {rises}"]


# --- The whole analysis of a run


def lead_time_words(row: LeadTime) -> str:
    lead = "" if row.median_lead is None else f", {row.median_lead:g} steps before (median)"
    return (
        f"{row.name}: {row.explained} of {len(row.loss_spikes)} loss spikes predicted{lead}; chance {row.chance:.2%}, "
        f"p {row.p:.2g}; {row.false_alarms} of {len(row.rms_spikes)} RMS spikes false"
    )


def analysis_words(found: Analysis) -> str:
    """`trimtab.analysis.one_run.analyze` as text."""
    together, *tensors = found.lead_times
    shown = [row for row in tensors if row.explained][:8]
    lines = [lead_time_words(row) for row in (together, *shown)]
    if len(tensors) > len(shown):
        lines.append(f"... and {len(tensors) - len(shown)} more tensors with RMS spikes")
    for spike in found.first_spikes:
        first = ", ".join(f"{name} {rms:.2f} at {step}" for name, step, rms in spike.tensors[:3]) or "no RMS spike"
        peak = f"{spike.peak[1]:.4g} at {spike.peak[0]}, usual {spike.usual[0]:.4g}"
        lines.append(f"loss spike at {spike.step}: {peak}; before the peak {first}")
    ratios = found.ratios
    above = [(ratios.above(limit), limit) for limit in LOSS_RATIOS]
    counts = ", ".join(f"{n} steps ({n / max(1, len(ratios.ratios)):.1%}) above {limit}" for n, limit in above)
    lines.append(f"loss ratio: {counts}; highest {ratios.highest:.3f}; noise at the end {ratios.floor:.3f}")
    for name, (r, p, pairs) in found.correlations.items():
        lines.append(f"loss ratio and {name}: Pearson {r:.3f}, p {p:.2g}, {pairs} steps")
    return "\n".join(lines)
