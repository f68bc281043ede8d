"""What went wrong in a run, in sentences with the evidence: `print(explain("runs/gpt"))`.

`trimtab.analysis.problems` finds the problems; each of its classes has a function here that describes it.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.analysis import problems
from trimtab.analysis.one_run import ANY, Analysis, FirstSpike, LeadTime, analyze, losses_of
from trimtab.analysis.spikes import SpikeRules
from trimtab.analysis.thresholds import (
    CRITICAL_LOGIT,
    LEAST_SPIKE,
    LOGIT_FIRST,
    LOGZ_DRIFT,
    LONG_WARMUP,
    LOSS_RATIOS,
)
from trimtab.report.live import sparkline
from trimtab.runs import EventKind, Run, read_run
from trimtab.runs.records import number


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
    used = remedies_in_use(run)
    findings = [Finding(*problem_words(x, used), step=x.step, where=x.where) for x in found]
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


# --- Remedies

LOWER_LR, WARMUP, QK_NORM = "a lower learning rate", "longer warmup", "qk-norm"
Z_LOSS, STABLE, FLOAT32 = "z-loss (1e-4)", "StableAdamW", "float32 where 16 bits overflow"
BETA2, EPS = "a lower β₂ (RMS_t cannot exceed 1/√(1-β₂))", "a smaller eps (1e-15); a larger one makes it worse"
CLIPPING, DECAY = "gradient clipping", "weight decay"
INDEPENDENT, LENGTHS = "independent weight decay", "sequence length warmup"
Used = Mapping[str, bool]


def remedies_in_use(run: Run) -> Used:
    """What a run already has, by its config, and is not recommended again. Nothing is known without a config."""
    config: dict[str, Any] = run.config.values if run.config is not None else {}
    steps, rates = run.log.steps, np.nan_to_num(run.log.column("lr"))
    betas, end = config.get("optim.betas"), steps[rates.argmax()] if len(steps) else 0  # where the warmup ends
    return {
        WARMUP: bool(end >= LONG_WARMUP * number(config.get("steps"))),
        QK_NORM: config.get("model.qk_norm", "off") != "off" or config.get("model.kappa") is not None,
        Z_LOSS: number(config.get("model.z_loss")) > 0 or config.get("kind") == "clip",  # CLIP has no such option
        STABLE: config.get("optim.name") == "stable-adamw",
        BETA2: isinstance(betas, list) and any(number(x) <= 0.9 for x in betas[1:]),  # RMS_t is at most 3.2
        EPS: number(config.get("optim.eps")) <= 1e-15,
        CLIPPING: number(config.get("optim.clip_norm")) > 0,
        DECAY: number(config.get("optim.weight_decay")) > 0,
        INDEPENDENT: config.get("optim.independent_decay") is True,
        LENGTHS: number(config.get("schedule.seqlen.start")) > 0,
        FLOAT32: (config.get("autocast"), config.get("model.linear", "float")) == ("off", "float"),
    }


def remedies(used: Used, *names: str) -> str:
    return ", ".join(name for name in names if not used.get(name, False))


# --- Problems

Words = tuple[str, str, list[str], str]  # kind, sentence, evidence, remedies


@singledispatch
def problem_words(problem: problems.Problem, used: Used) -> Words:
    """`used` are the remedies that the run has."""
    raise TypeError(f"no words for {type(problem).__name__}")


@problem_words.register
def _(x: problems.Explosion, used: Used) -> Words:
    at, height = x.peak
    rate = f", at learning rate {x.lr:.3g}" if math.isfinite(x.lr) else ""
    evidence = [f"the loss was {x.before:.4g} before training, {height:.4g} at step {at}, {x.last:.4g} at the end"]
    evidence += [f"stopped: {reason}" for reason in x.reasons]
    what = f"Explosion in the first steps: from step {x.step} the loss is far above that before training{rate}."
    lower = f"a lower peak learning rate (at most a tenth of {x.lr:.3g})" if rate else LOWER_LR
    return "explosion", what, evidence, remedies(used, lower, WARMUP, CLIPPING)


@problem_words.register
def _(x: problems.NotFinite, used: Used) -> Words:
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
    return "non-finite", what, evidence, remedies(used, LOWER_LR, WARMUP, QK_NORM, Z_LOSS, STABLE, FLOAT32)


@problem_words.register
def _(x: problems.Divergence, used: Used) -> Words:
    evidence = [f"median loss {x.best:.4g} around step {x.step}, {x.last:.4g} at the end; noise {x.noise:.2g}"]
    evidence += [f"it began with the loss spike at step {x.spike}"] if x.spike is not None else []
    evidence += [f"stopped: {reason}" for reason in x.reasons]
    what = f"Divergence: the loss was near its best until step {x.step} and ends {x.last - x.best:.2g} above it."
    advice = remedies(used, LOWER_LR, WARMUP, QK_NORM, INDEPENDENT)
    return "divergence", what, evidence, f"{advice}; resume from before that step"


@problem_words.register
def _(x: problems.LossSpikes, used: Used) -> Words:
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
        advice = remedies(used, STABLE, BETA2, WARMUP, LOWER_LR)
    else:
        advice = f"check the batches of these steps; {remedies(used, CLIPPING, LOWER_LR, LENGTHS)}. "
        advice += "No RMS_t rose before, so a lower β₂ is less likely to help"
    return "loss spike", what, evidence, advice


@problem_words.register
def _(x: problems.BadBatches, used: Used) -> Words:
    levels = [(spike.peak[1], *spike.usual, spike.step) for spike in x.losses[:3]]
    evidence = [f"step {step}: {loss:.4g}, usually {mean:.4g} ± {sigma:.2g}" for loss, mean, sigma, step in levels]
    what = f"Single losses far above those before them: {len(x.losses)}, the first at step {x.step}."
    evidence.append("the next loss is not unusual, as after a bad batch")
    advice = f"check the batches of these steps; if they are good: {remedies(used, CLIPPING, STABLE, LOWER_LR)}"
    return "bad batch", what, evidence, advice


@problem_words.register
def _(x: problems.LogitGrowth, used: Used) -> Words:
    evidence = [f"{name}: {start:.3g} early, {top:.3g} at most" for _, name, start, top in x.layers[:3]]
    if x.at_first:
        evidence.append(f"they grew before the first measurement: before training they are below {LOGIT_FIRST:g}")
    evidence += [f"its attention entropy went from {x.entropy[0]:.3g} to {x.entropy[1]:.3g}"] if x.entropy else []
    highest = x.layers[0][3]
    grow = "are large from the first measurement on" if x.at_first else "grow"
    what = f"Attention logits {grow}: {x.where} first, from step {x.step}; {len(x.layers)} layers, up to {highest:.3g}."
    gains = "Queries and keys are normalised, so the gains of the norm, or kappa, are too large. "
    why = gains if used.get(QK_NORM) else ""
    advice = f"{remedies(used, QK_NORM, LOWER_LR, WARMUP)}. {why}"
    advice += f"Large models diverge with logits above {CRITICAL_LOGIT:g}; small ones may go on with a high loss"
    return "attention logits", what, evidence + _lead_words(x.step, x.rises), advice


@problem_words.register
def _(x: problems.LogzDrift, used: Used) -> Words:
    what = f"log Z drifts from {x.early:.2f} to {x.late:.2f} nats; by more than {LOGZ_DRIFT:g} at step {x.step}."
    more = "a larger z-loss" if used.get(Z_LOSS) else Z_LOSS
    advice = f"{remedies(used, more, DECAY, LOWER_LR)}. The drift changes the loss in 16 bits, not in float32"
    return "logZ", what, _lead_words(x.step, x.rises), advice


@problem_words.register
def _(x: problems.NearEps, used: Used) -> Words:
    evidence = [f"{name}: {share:.0%} of the update lost at the end" for share, name in x.tensors[:3]]
    what = f"Gradients near eps: {len(x.tensors)} tensors; the update of {x.where} is {x.tensors[0][0]:.0%} too short."
    vanish = "eps is small enough: these gradients vanish. Check that the loss depends on these tensors"
    return "eps", what, evidence, remedies(used, EPS) or vanish


@problem_words.register
def _(x: problems.SkippedSteps, used: Used) -> Words:
    when = f", the first at step {x.step}, the last at step {x.last}" if x.step is not None else ""
    reasons = [reason or "no reason given" for reason in x.reasons[:3]]
    advice = remedies(used, "check the batches of these steps, and the problems above", FLOAT32)
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


def analyze_words(folder: Path, width: int = 60) -> str:
    """`trimtab analyze`: spikes and their lead times, loss ratios, correlations, and the course of the variance."""
    found = analyze(read_run(folder))
    lines = [str(folder), analysis_words(found)]
    for name, course in found.variance.items():
        ends = (
            f"{course.values[0]:.3g} to {course.values[-1]:.3g}, highest {course.highest():.3g} at step {course.peak}"
        )
        lines.append(f"{name:8} {sparkline(course.values.tolist(), width)}  {ends}")
    if found.variance and found.lr_peak is not None:
        lines.append(f"the learning rate is highest at step {found.lr_peak}")
    return "\n".join(lines)


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
    for name, (r, p, pairs, shifted) in found.correlations.items():
        lines.append(
            f"loss ratio and {name}: Pearson {r:.3f}, p {p:.2g}, {pairs} steps; p against shifts {shifted:.2g}"
        )
    return "\n".join(lines)
