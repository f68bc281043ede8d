"""Alarm rules: from signals to alarms.

    rms spike            RMS_t >= 2.3 in some tensor
    loss spike           loss >= running mean + 3.2 running deviations, at least twice within 10 steps; or one loss
                         8 deviations above the last 20, as after a bad batch
    explosion            in the first steps, loss >= 2 times the loss before training, at least twice within 10 steps
    non-finite           NaN or Inf in a loss, gradient, parameter, update or layer
    gradient near eps    0 < RMS of a gradient < 10 eps
    attention logits     largest logit >= a tenth of the critical value 1e4, or >= 100 with an entropy below 0.5
    drift                log Z, logits or a parameter's RMS moved far, in one direction over five windows

Repetitions within 10 steps belong to the same event and give no new alarm. Non-finite values enter no window. All
constants are fields of `Rules`. The state is plain numbers, so a resumed run continues its windows exactly.

Sources: [S] Wortsman et al. 2023, Stable and low-precision training, appendix (spike analysis);
[P] Wortsman et al. 2023, Small-scale proxies for large-scale Transformer training instabilities.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

Records = Mapping[str, Mapping[str, float]]
NO_HINTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Every constant of the detector, with its source; "ours" where no paper gives a number."""

    rms: float = 2.3  # RMS_t of a spike [S]
    deviations: float = 3.2  # standard deviations above the running mean that make a loss deviate [S]
    window: int = 100  # losses in the running mean, and steps in one drift window; ours
    fewest: int = 20  # losses needed before the first is judged; ours
    outlier: float = 8.0  # deviations that make one loss an alarm; ours: by chance as rare as the rule of [S]
    outlier_share: float = 0.1  # of the mean, by which this loss must be higher; ours
    outlier_window: int = 20  # losses that it is compared with; ours: few, because the loss falls fast at first
    explosion: float = 2.0  # times the loss before training, and at least 1 above it; ours
    ignore: int = 1000  # first steps without spike and drift alarms, because everything changes there [S]
    gap: int = 10  # events closer than this many steps are one [S]
    deviating: int = 2  # deviating losses within `gap` that make a loss spike [S]
    eps_margin: float = 10.0  # alarm for gradients below this many eps; [P] section 3.4 observes the effect
    logits_critical: float = 1e4  # every run above it had diverged: [P] section 3.3
    logits_share: float = 0.1  # share of the critical value that gives an alarm; ours: at 1e3 the loss already suffers
    logits_high: float = 100.0  # alarm if entropy is low too; ours: without training it is of order 1 to 10
    entropy_low: float = 0.5  # nats; ours: attention to fewer than two tokens on average
    drift_windows: int = 5  # windows that must all move in one direction; ours
    drift_logz: float = 3.0  # change of log Z over these windows; ours, for the divergence in [P] section 3.1
    drift_factor: float = 2.0  # growth or shrinkage of logits and parameters over these windows; ours

    def __post_init__(self) -> None:
        for name in ("window", "fewest", "outlier_window", "gap", "deviating", "drift_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.fewest > self.window:
            raise ValueError(f"fewest={self.fewest} losses never fit into a window of {self.window}")
        if self.drift_factor <= 1:
            raise ValueError(f"drift_factor must be above 1, got {self.drift_factor}; 2 is doubling or halving")


@dataclass(frozen=True)
class Alarm:
    """One alarm. `str(alarm)` is one line: step, kind, place, value, usual range, advice."""

    step: int
    kind: str
    where: str  # the tensor or layer; if several, the worst one
    signal: str
    value: float
    usual: tuple[float, float]
    advice: str
    also: tuple[str, ...] = ()  # other tensors or layers with the same alarm at this step

    def __str__(self) -> str:
        more = f" and {len(self.also)} more" if self.also else ""
        low, high = self.usual
        usual = "" if math.isnan(low) else f" (usually {low:.3g} to {high:.3g})"
        shown = not math.isnan(self.value) or self.kind == "non-finite"
        value = f": {self.signal} {self.value:.4g}{usual}" if shown else ""
        return f"step {self.step}: {self.kind} in {self.where}{more}{value}. {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """A dict for JSON; non-finite numbers become None."""
        found = asdict(self) | {"usual": [x if math.isfinite(x) else None for x in self.usual], "also": list(self.also)}
        return found | {"value": self.value if math.isfinite(self.value) else None}


NO_RANGE = (math.nan, math.nan)
LOW_BETA2 = 0.9  # below it RMS_t is at most 3.2 and a lower one changes little
TINY_EPS = 1e-15  # the smallest that [P] section 3.4 tries


@dataclass
class Detector:
    """Running windows of all signals. Everything in `state_dict` is JSON."""

    rules: Rules
    every: int = 1  # steps between two measurements of the tensors
    deep_every: int = 1  # and of the layers
    losses: list[float] = field(default_factory=list)
    best: float | None = None
    deviating: list[int] = field(default_factory=list)  # steps among the last `gap` whose loss deviated
    last: dict[str, int] = field(default_factory=dict)  # last step of each event
    usual: dict[str, list[float]] = field(default_factory=dict)  # running mean, mean square, count
    drifts: dict[str, list[Any]] = field(default_factory=dict)  # window number, sum, count, means of closed windows

    STATE = ("losses", "best", "deviating", "last", "usual", "drifts")

    def state_dict(self) -> dict[str, Any]:
        return {name: deepcopy(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = [name for name in self.STATE if name not in state]
        if missing:
            raise ValueError(f"not a detector state: missing {', '.join(missing)}")
        for name in self.STATE:
            setattr(self, name, deepcopy(state[name]))

    # --- Losses

    def check_loss(self, step: int, loss: float, hints: Mapping[str, Any] = NO_HINTS) -> list[Alarm]:
        """`hints` are the hyper-parameters of the run, for the advice."""
        rules, known, finite = self.rules, self.losses, math.isfinite(loss)
        early = step <= rules.ignore or len(known) < rules.fewest
        limit, usual = self._explosion_limit() if early else self._limit(known, rules.deviations)
        last = min(rules.outlier_window, rules.window)
        far, recent = self._limit(known[-last:], rules.outlier, rules.outlier_share)
        outlier = len(known) >= last and far < loss < math.inf
        alarms = []
        if not finite and self._is_new("non-finite loss", step, rules.gap):
            advice = advise("non-finite", "early loss" if early else "loss", hints)
            alarms.append(Alarm(step, "non-finite", "loss", "loss", loss, usual, advice))
        confirmed = False
        if known and not (finite and loss <= limit):
            self.deviating = [s for s in self.deviating if step - s < rules.gap] + [step]
            confirmed = len(self.deviating) >= rules.deviating
        if (confirmed or outlier) and self._is_new("loss spike loss", step, rules.gap):
            kind = "explosion" if early and confirmed else "loss spike"
            before = f"{known[0]:.4g} {'before training' if step <= rules.window else f'{len(known)} steps before'}"
            advice = advise(kind, "loss" if confirmed else "one loss", {**hints, "before": before})
            first, usual = (self.deviating[0], usual) if confirmed else (step, recent)
            alarms.append(Alarm(first, kind, "loss", "loss", loss, usual, advice))
        if finite:
            self.losses = [*known, loss][-rules.window :]
            self.best = loss if self.best is None else min(self.best, loss)
        return alarms

    def _explosion_limit(self) -> tuple[float, tuple[float, float]]:
        """In the first steps: there is no usual level yet, but the loss before training is known."""
        if not self.losses:
            return math.inf, NO_RANGE
        first = self.losses[0]
        return max(self.rules.explosion * first, first + 1), (min(self.losses), max(self.losses))

    @staticmethod
    def _limit(losses: Sequence[float], deviations: float, share: float = 0.0) -> tuple[float, tuple[float, float]]:
        """The highest loss that is not unusual, and the usual range."""
        if not losses:
            return math.inf, NO_RANGE
        mean = math.fsum(losses) / len(losses)
        sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in losses) / len(losses))
        return mean + max(deviations * sigma, share * abs(mean)), (mean - 2 * sigma, mean + 2 * sigma)

    def loss_ratio(self, loss: float) -> float:
        """The loss over the best loss so far; 1 at the first step (Li et al. 2022, section 3)."""
        if not math.isfinite(loss):
            return math.inf
        if self.best is None:
            return 1.0
        return loss / self.best if self.best else math.nan

    # --- Tensors and layers

    def spiking(self, step: int, rms: Mapping[str, float]) -> dict[str, float]:
        """The tensors whose RMS_t is a spike."""
        return {} if step <= self.rules.ignore else {n: x for n, x in rms.items() if x >= self.rules.rms}

    def check_tensors(self, step: int, tensors: Records, hints: Mapping[str, Any]) -> list[Alarm]:
        """`hints` are the hyper-parameters of each tensor, for the advice."""
        largest_share = 1 / (1 + self.rules.eps_margin)
        near = {n: x["grad_rms"] for n, x in tensors.items() if x["eps_share"] > largest_share and x["grad_rms"] > 0}
        spiking = self.spiking(step, {name: x["rms"] for name, x in tensors.items()})
        alarms = self._report(step, "rms spike", "rms", spiking, hints=hints)
        alarms += self._report(step, "gradient near eps", "grad_rms", near, hints=hints, choose=min)
        # RMS_t is not checked: it is NaN without a second moment, and these three show when it is not finite.
        for signal in ("grad_rms", "param_rms", "update_rms"):
            alarms += self._report_broken(step, signal, tensors, hints)
        for name, x in tensors.items():
            self._update_range(f"{name} rms", x["rms"])
            self._update_range(f"{name} grad_rms", x["grad_rms"])
        return alarms

    def check_layers(self, step: int, layers: Records, hints: Mapping[str, Any] = NO_HINTS) -> list[Alarm]:
        """The limits are absolute, because logits may be high at the first look."""
        rules, each = self.rules, dict.fromkeys(layers, hints)
        attention = {name: x["logit_max"] for name, x in layers.items() if "entropy" in x}
        collapsed = {name for name in attention if layers[name]["entropy"] < rules.entropy_low}
        usual = rules.logits_share * rules.logits_critical
        near = {n: x for n, x in attention.items() if x >= (rules.logits_high if n in collapsed else usual)}
        alarms = self._report(step, "attention logits", "logit_max", near, hints=each, gap=self.deep_every + self.every)
        for signal in ("logit_max", "out_max", "logz"):
            alarms += self._report_broken(step, signal, layers, {})
        for name, value in attention.items():
            self._update_range(f"{name} logit_max", value)
        return alarms

    def check_drift(
        self, step: int, values: Mapping[tuple[str, str], float], hints: Mapping[str, Any] = NO_HINTS
    ) -> list[Alarm]:
        """Values by (where, signal); "logz" drifts by a difference, every other signal by a factor."""
        alarms = []
        for (where, signal), value in values.items():
            if step <= self.rules.ignore or not math.isfinite(value):
                continue
            key = f"{where} {signal}"
            means = self._add_to_window(key, step, value)
            if means is not None and self._drifted(signal, means):
                self.drifts[key][3] = means[-1:]
                usual = (min(means[:2]), max(means[:2]))
                what = "output logits" if signal == "logit_max" and where in ("", "output") else signal
                alarms.append(Alarm(step, "drift", where, signal, means[-1], usual, advise("drift", what, hints)))
        return alarms

    def _add_to_window(self, key: str, step: int, value: float) -> list[float] | None:
        """Add to the window of this step. Return the means of the closed windows if this closed another one."""
        number = step // self.rules.window
        state = self.drifts.setdefault(key, [number, 0.0, 0, []])
        closed = state[0] != number
        if closed:  # it has at least one value
            state[3] = [*state[3], state[1] / state[2]][-self.rules.drift_windows - 1 :]
            state[:3] = [number, 0.0, 0]
        state[1] += value
        state[2] += 1
        return state[3] if closed else None

    def _drifted(self, signal: str, means: list[float]) -> bool:
        if len(means) <= self.rules.drift_windows:
            return False
        steps = [b - a for a, b in pairwise(means)]
        if not (all(x > 0 for x in steps) or all(x < 0 for x in steps)):
            return False
        first, last = means[0], means[-1]
        if signal == "logz":
            return abs(last - first) >= self.rules.drift_logz
        return first > 0 and last > 0 and max(last / first, first / last) >= self.rules.drift_factor

    # --- Shared by all rules

    def _report_broken(self, step: int, signal: str, records: Records, hints: Mapping[str, Any]) -> list[Alarm]:
        broken = {n or "output": x[signal] for n, x in records.items() if not math.isfinite(x.get(signal, 0.0))}
        return self._report(step, "non-finite", signal, broken, hints=hints, choose=None)

    def _report(
        self,
        step: int,
        kind: str,
        signal: str,
        found: Mapping[str, float],
        *,
        hints: Mapping[str, Any] | None = None,
        choose: Callable[..., str] | None = max,
        gap: int = 0,
    ) -> list[Alarm]:
        """One alarm for all tensors that are new to this event, named after the largest, smallest or first of them."""
        gap = max(self.rules.gap, self.every, gap)
        new = [name for name in found if self._is_new(f"{kind} {signal} {name}", step, gap)]
        if not new:
            return []
        worst = choose(new, key=lambda name: found[name]) if choose else new[0]
        usual, also = self._range(f"{worst} {signal}"), tuple(name for name in new if name != worst)
        advice = advise(kind, signal, (hints or {}).get(worst, {}))
        return [Alarm(step, kind, worst, signal, found[worst], usual, advice, also)]

    def _is_new(self, event: str, step: int, gap: int) -> bool:
        known = self.last.get(event)
        self.last[event] = step
        return known is None or not 0 <= step - known <= gap

    def _update_range(self, key: str, value: float) -> None:
        """Update the running mean and mean square, over about one window of finite values."""
        if not math.isfinite(value):
            return
        mean, square, count = self.usual.get(key, (0.0, 0.0, 0.0))
        share = 1 / (min(count, self.rules.window - 1) + 1)
        self.usual[key] = [mean + share * (value - mean), square + share * (value * value - square), count + 1]

    def _range(self, key: str) -> tuple[float, float]:
        """Mean ± two deviations, at least zero: all these signals are magnitudes."""
        mean, square, count = self.usual.get(key, (0.0, 0.0, 0.0))
        if count < 2:
            return NO_RANGE
        sigma = math.sqrt(max(0.0, square - mean * mean))
        return max(0.0, mean - 2 * sigma), mean + 2 * sigma

    def forget(self, names: Iterable[str]) -> None:
        """Delete the windows of tensors that no longer exist."""
        for key in (f"{name} {signal}" for name in names for signal in ("rms", "grad_rms", "param_rms")):
            self.usual.pop(key, None)
            self.drifts.pop(key, None)


def advise(kind: str, signal: str, hints: Mapping[str, Any] = NO_HINTS) -> str:
    """Likely cause of an alarm, then what to change: nothing that the run already has.

    `hints` are the hyper-parameters of the tensor, `qk_norm` and `z_loss` if the model has them, and whether gradients
    have been `clipped` of late; may be empty.
    """
    eps, betas, lr = hints.get("eps"), hints.get("betas"), hints.get("lr")
    rate = "the learning rate" if lr is None else f"the learning rate (now {float(lr):g})"
    stable = [] if "clip_threshold" in hints else ["use StableAdamW"]
    if betas and float(betas[1]) > LOW_BETA2:
        stable.insert(0, f"lower β₂ (now {float(betas[1]):g})")
    stable.insert(0, "clip gradients to a lower norm" if hints.get("clipped") else "clip gradients")
    match kind:
        case "rms spike":
            known = "" if "use StableAdamW" in stable else ". StableAdamW already shortens this step"
            return (
                "Gradients are much larger than the second moment; a loss spike may follow within 8 steps. "
                f"What helps: {_choose(*stable, 'warm up longer', f'lower {rate}')}{known}"
            )
        case "loss spike" if signal == "one loss":
            return (
                "One loss is far above those before it. If the next ones are not, check the batch of this step. "
                f"Otherwise: {_choose(*stable, f'lower {rate}', 'warm up longer')}"
            )
        case "loss spike":
            first, others = _choose(*stable), _choose(f"lower {rate}", "warm up longer", "use sequence length warmup")
            return f"If an rms spike came first: {first}. Otherwise: {others}"
        case "explosion":
            return (
                f"The loss was {hints['before']}: the updates of the first steps are too large. "
                f"Lower {rate}, for example to a tenth, or warm up longer"
            )
        case "gradient near eps" if eps is not None and float(eps) <= TINY_EPS:
            return (
                f"These gradients vanish: even an eps of {float(eps):g} reduces their updates. Check that the loss "
                "depends on these tensors, and whether attention logits have grown"
            )
        case "gradient near eps":
            now = f" (now {float(eps):g})" if eps is not None else ""
            return f"eps reduces these updates. Use a smaller eps{now}, down to 1e-15; a larger eps makes it worse"
        case "attention logits" | "drift" if hints.get("qk_norm") and signal == "logit_max":
            return (
                "Queries and keys are normalised, so the gains of the norm, or kappa, are too large: "
                f"lower {rate} or warm up longer"
            )
        case "attention logits":
            return f"With larger logits the loss rises or training diverges: {_choose('use qk-norm', f'lower {rate}')}"
        case "drift" if signal == "logit_max":
            return "Attention logits move steadily in one direction. Use qk-norm"
        case "drift" if signal == "param_rms":
            return "The size of these weights moves steadily in one direction. Check weight decay and learning rate"
        case "drift":
            what = "log Z of the output moves" if signal == "logz" else "Output logits move"
            z_loss = f"Lower {rate}, or use a larger z-loss" if hints.get("z_loss") else "Add a z-loss of 1e-4"
            return f"{what} steadily in one direction. {z_loss}"
        case "non-finite" if signal.endswith("loss"):
            early = f"In the first steps too large updates are the usual cause: lower {rate} or warm up longer. "
            names = "Skip this step. The alarms of the same step name the first tensor or layer with a NaN or Inf"
            return early + names if signal == "early loss" else names
        case "non-finite":
            return f"Skip such steps (skip_nonfinite=True), check the loss scale, or lower {rate}"
    return ""


def _choose(*remedies: str) -> str:
    """Remedies as one sentence, without its full stop."""
    return " or ".join([", ".join(remedies[:-1]), remedies[-1]] if remedies[:-1] else remedies)
