"""Alarm rules: from signals to alarms.

    rms spike            RMS_t >= 2.3 in some tensor
    loss spike           loss >= running mean + 3.2 running deviations, at least twice within 10 steps
    non-finite           NaN or Inf in a loss, gradient, parameter, update or layer
    gradient near eps    0 < RMS of a gradient < 10 eps
    attention logits     largest logit >= a tenth of the critical value 1e4
    drift                log Z, logits or a parameter's RMS moved far, in one direction over five windows

Repetitions within 10 steps belong to the same event and give no new alarm. Non-finite values enter no window. All
constants are fields of `Rules`. The state is plain numbers, so a resumed run continues its windows exactly.

Sources: [S] Wortsman et al. 2023, Stable and low-precision training, appendix (spike analysis);
[P] Wortsman et al. 2023, Small-scale proxies for large-scale Transformer training instabilities.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

Records = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Every constant of the detector, with its source; "ours" where no paper gives a number."""

    rms: float = 2.3  # RMS_t of a spike [S]
    deviations: float = 3.2  # standard deviations above the running mean that make a loss deviate [S]
    window: int = 100  # losses in the running mean, and steps in one drift window; ours
    fewest: int = 20  # losses needed before the first is judged; ours
    ignore: int = 1000  # first steps without spike and drift alarms, because everything changes there [S]
    gap: int = 10  # events closer than this many steps are one [S]
    deviating: int = 2  # deviating losses within `gap` that make a loss spike [S]
    eps_margin: float = 10.0  # alarm for gradients below this many eps; [P] section 3.4 observes the effect
    logits_critical: float = 1e4  # every run above it had diverged: [P] section 3.3
    logits_share: float = 0.1  # share of the critical value that gives an alarm; ours: at 1e3 the loss already suffers
    drift_windows: int = 5  # windows that must all move in one direction; ours
    drift_logz: float = 3.0  # change of log Z over these windows; ours, for the divergence in [P] section 3.1
    drift_factor: float = 2.0  # growth or shrinkage of logits and parameters over these windows; ours

    def __post_init__(self) -> None:
        for name in ("window", "fewest", "gap", "deviating", "drift_windows"):
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


@dataclass
class Detector:
    """Running windows of all signals. Everything in `state_dict` is JSON."""

    rules: Rules
    every: int = 1  # steps between two measurements of the tensors
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

    def check_loss(self, step: int, loss: float) -> list[Alarm]:
        rules, known, finite = self.rules, self.losses, math.isfinite(loss)
        deviates, usual = False, NO_RANGE
        if len(known) >= rules.fewest and step > rules.ignore:
            mean = math.fsum(known) / len(known)
            sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in known) / len(known))
            usual = (mean - 2 * sigma, mean + 2 * sigma)
            deviates = not finite or (loss > mean and loss >= mean + rules.deviations * sigma)
        if finite:
            self.losses = [*known, loss][-rules.window :]
            self.best = loss if self.best is None else min(self.best, loss)
        alarms = []
        if not finite and self._is_new("non-finite loss", step):
            alarms.append(Alarm(step, "non-finite", "loss", "loss", loss, usual, advise("non-finite", "loss")))
        if deviates:
            self.deviating = [s for s in self.deviating if step - s < rules.gap] + [step]
            if len(self.deviating) >= rules.deviating and self._is_new("loss spike loss", step):
                advice = advise("loss spike", "loss")
                alarms.append(Alarm(self.deviating[0], "loss spike", "loss", "loss", loss, usual, advice))
        return alarms

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

    def check_layers(self, step: int, layers: Records) -> list[Alarm]:
        limit = self.rules.logits_share * self.rules.logits_critical
        attention = {name: x["logit_max"] for name, x in layers.items() if "entropy" in x}
        near = {name: x for name, x in attention.items() if x >= limit}
        alarms = self._report(step, "attention logits", "logit_max", near)
        for signal in ("logit_max", "out_max", "logz"):
            alarms += self._report_broken(step, signal, layers, {})
        for name, value in attention.items():
            self._update_range(f"{name} logit_max", value)
        return alarms

    def check_drift(self, step: int, values: Mapping[tuple[str, str], float]) -> list[Alarm]:
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
                alarms.append(Alarm(step, "drift", where, signal, means[-1], usual, advise("drift", signal)))
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
    ) -> list[Alarm]:
        """One alarm for all tensors that are new to this event, named after the largest, smallest or first of them."""
        new = [name for name in found if self._is_new(f"{kind} {signal} {name}", step)]
        if not new:
            return []
        worst = choose(new, key=lambda name: found[name]) if choose else new[0]
        usual, also = self._range(f"{worst} {signal}"), tuple(name for name in new if name != worst)
        advice = advise(kind, signal, (hints or {}).get(worst, {}))
        return [Alarm(step, kind, worst, signal, found[worst], usual, advice, also)]

    def _is_new(self, event: str, step: int) -> bool:
        known = self.last.get(event)
        self.last[event] = step
        return known is None or not 0 <= step - known <= max(self.rules.gap, self.every)

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


def advise(kind: str, signal: str, hints: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Likely cause of an alarm, then what to change. `hints` are the hyper-parameters of the tensor; may be empty."""
    eps, betas = hints.get("eps"), hints.get("betas")
    match kind:
        case "rms spike":
            now = f" (now {float(betas[1]):g})" if betas else ""
            stable = "StableAdamW already shortens this step" if "clip_threshold" in hints else "use StableAdamW"
            return (
                "Gradients are much larger than the second moment; a loss spike often follows within 8 steps. "
                f"Lower β₂{now} or warm up longer; {stable}"
            )
        case "loss spike":
            return (
                "If an rms spike came first, lower β₂ or use StableAdamW. "
                "Otherwise lower the learning rate, warm up longer, or use sequence length warmup"
            )
        case "gradient near eps":
            now = f" (now {float(eps):g})" if eps is not None else ""
            return f"eps reduces these updates. Use a smaller eps{now}, down to 1e-15; a larger eps makes it worse"
        case "attention logits":
            return "Training diverges when attention logits grow further. Use qk-norm or lower the learning rate"
        case "drift" if signal == "logz":
            return "log Z of the output moves steadily in one direction. Add a z-loss of 1e-4"
        case "drift" if signal == "param_rms":
            return "The size of these weights moves steadily in one direction. Check weight decay and learning rate"
        case "drift":
            return "Logits move steadily in one direction. Add a z-loss of 1e-4; for attention logits use qk-norm"
        case "non-finite" if signal == "loss":
            return "Skip this step. The alarms of the same step name the first tensor or layer with a NaN or Inf"
        case "non-finite":
            return "Skip such steps (skip_nonfinite=True), check the loss scale, or lower the learning rate"
    return ""
