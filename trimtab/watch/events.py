"""From signals to alarms: spikes, drift, vanishing gradients, growing logits, numbers that are none.

    rms spike            RMS_t >= 2.3 in some tensor
    loss spike           loss >= running mean + 3.2 running deviations, at least twice inside 10 steps
    non-finite           a NaN or an Inf in a loss, gradient, parameter, second moment or layer
    gradient near eps    0 < RMS of a gradient < 10 eps
    attention logits     the largest one within a tenth of the critical 1e4
    drift                log Z, output logits or a parameter's RMS moved one way for five windows, and far

What follows within 10 steps is the same event, told once. What is not finite enters no window. All constants are
fields of `Rules`; the state is plain numbers, so a resumed run continues its windows exactly.

Wortsman et al. 2023a, appendix, for the spikes; Wortsman et al. 2023b, sections 3 and 4, for logits and eps.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from trimtab.watch.advice import advise

Records = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Every constant of the detector."""

    rms: float = 2.3  # RMS_t of a spike
    deviations: float = 3.2  # above the running mean, of a loss spike
    window: int = 100  # losses in the running mean; steps in one window of a drift
    fewest: int = 20  # losses before they are judged
    ignore: int = 1000  # first steps without spikes and drift: everything moves there
    gap: int = 10  # steps; what is closer is one event
    deviating: int = 2  # losses inside `gap` that make a spike
    eps_margin: float = 10.0  # a gradient below this many eps
    logits_critical: float = 1e4
    logits_share: float = 0.1  # of the critical value, from which to warn
    drift_windows: int = 5  # that all move the same way
    drift_logz: float = 3.0  # how far log Z moves in that time
    drift_factor: float = 2.0  # by how much logits and parameters grow or shrink

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
    """Something worth looking at. `str(alarm)` is one line for people."""

    step: int
    kind: str
    where: str  # the tensor or layer; the worst one if there are several
    signal: str
    value: float
    usual: tuple[float, float]
    advice: str
    also: tuple[str, ...] = ()  # where else, at the same step

    def __str__(self) -> str:
        more = f" and {len(self.also)} more" if self.also else ""
        low, high = self.usual
        usual = "" if math.isnan(low) else f" (usually {low:.3g} to {high:.3g})"
        value = (
            "" if math.isnan(self.value) and self.kind != "non-finite" else f": {self.signal} {self.value:.4g}{usual}"
        )
        return f"step {self.step}: {self.kind} in {self.where}{more}{value}. {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """For a line of events.jsonl: what is not a finite number becomes null."""
        found = asdict(self) | {"usual": [x if math.isfinite(x) else None for x in self.usual], "also": list(self.also)}
        return found | {"value": self.value if math.isfinite(self.value) else None}


NOTHING = (math.nan, math.nan)


@dataclass
class Detector:
    """The windows. Everything in `state_dict` is JSON."""

    rules: Rules
    every: int = 1  # steps between two looks at the tensors
    losses: list[float] = field(default_factory=list)
    best: float | None = None
    deviating: list[int] = field(default_factory=list)  # steps of the last `gap` whose loss deviated
    last: dict[str, int] = field(default_factory=dict)  # the last step of each event
    usual: dict[str, list[float]] = field(default_factory=dict)  # running mean, mean square, count
    drifts: dict[str, list[Any]] = field(default_factory=dict)  # number, sum and count of a window; means of old ones

    STATE = ("losses", "best", "deviating", "last", "usual", "drifts")

    def state_dict(self) -> dict[str, Any]:
        return {name: _copy(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = [name for name in self.STATE if name not in state]
        if missing:
            raise ValueError(f"this is no state of a watcher: it has no {', '.join(missing)}")
        for name in self.STATE:
            setattr(self, name, _copy(state[name]))

    # --- Losses

    def see_loss(self, step: int, loss: float) -> list[Alarm]:
        rules, finite = self.rules, math.isfinite(loss)
        known = self.losses
        deviates, usual = False, NOTHING
        if len(known) >= rules.fewest and step > rules.ignore:
            mean = math.fsum(known) / len(known)
            sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in known) / len(known))
            usual = (mean - 2 * sigma, mean + 2 * sigma)
            deviates = not finite or (loss > mean and loss >= mean + rules.deviations * sigma)
        if finite:
            self.losses = [*known, loss][-rules.window :]
            self.best = loss if self.best is None else min(self.best, loss)
        alarms = []
        if not finite and self._is_new("non-finite", "loss", step):
            alarms.append(self._alarm(step, "non-finite", "loss", "loss", loss, usual))
        if deviates:
            self.deviating = [s for s in self.deviating if step - s < rules.gap] + [step]
            enough = len(self.deviating) >= rules.deviating
            if enough and self._is_new("loss spike", "loss", step):
                alarms.append(self._alarm(self.deviating[0], "loss spike", "loss", "loss", loss, usual))
        return alarms

    def loss_ratio(self, loss: float, best: float | None) -> float:
        """Of this loss to the best one before it; 1 at the first step."""
        if best is None:
            return 1.0 if math.isfinite(loss) else math.inf
        return loss / best if math.isfinite(loss) and best else math.inf if not math.isfinite(loss) else math.nan

    # --- Tensors and layers

    def spiking(self, step: int, rms: Mapping[str, float]) -> dict[str, float]:
        """The tensors whose RMS_t is one of a spike."""
        return {} if step <= self.rules.ignore else {n: x for n, x in rms.items() if x >= self.rules.rms}

    def see_tensors(self, step: int, tensors: Records, hints: Mapping[str, Any]) -> list[Alarm]:
        rules = self.rules
        rms = {name: x["rms"] for name, x in tensors.items()}
        near = {
            name: x["grad_rms"]
            for name, x in tensors.items()
            if x["eps_share"] > 1 / (1 + rules.eps_margin) and x["grad_rms"] > 0
        }
        alarms = self._tell(step, "rms spike", "rms", self.spiking(step, rms), hints)
        alarms += self._tell(step, "gradient near eps", "grad_rms", near, hints, smallest=True)
        for signal in ("grad_rms", "param_rms", "update_rms"):
            # RMS_t has no value of its own where there is no second moment, and these are not finite where it is not.
            broken = {name: x[signal] for name, x in tensors.items() if not math.isfinite(x[signal])}
            alarms += self._tell(step, "non-finite", signal, broken, hints, first=True)
        for name, x in tensors.items():
            self._remember(f"{name} rms", x["rms"])
            self._remember(f"{name} grad_rms", x["grad_rms"])
        return alarms

    def see_layers(self, step: int, layers: Records) -> list[Alarm]:
        limit = self.rules.logits_share * self.rules.logits_critical
        attention = {name: x["logit_max"] for name, x in layers.items() if "entropy" in x}
        near = {name: x for name, x in attention.items() if x >= limit}
        alarms = self._tell(step, "attention logits", "logit_max", near, {})
        for signal in ("logit_max", "out_max", "logz"):
            broken = {n or "output": x[signal] for n, x in layers.items() if not math.isfinite(x.get(signal, 0.0))}
            alarms += self._tell(step, "non-finite", signal, broken, {}, first=True)
        for name, value in attention.items():
            self._remember(f"{name} logit_max", value)
        return alarms

    def see_drift(self, step: int, values: Mapping[tuple[str, str], float]) -> list[Alarm]:
        """Values by (where, signal); "logz" drifts by a difference, everything else by a factor."""
        alarms = []
        for (where, signal), value in values.items():
            if step <= self.rules.ignore or not math.isfinite(value):
                continue
            means = self._fill(f"{where} {signal}", step, value)
            if means is None or not self._drifted(signal, means):
                continue
            self.drifts[f"{where} {signal}"][3] = means[-1:]
            alarms.append(self._alarm(step, "drift", where, signal, means[-1], (min(means[:2]), max(means[:2]))))
        return alarms

    def _fill(self, key: str, step: int, value: float) -> list[float] | None:
        """Add to this step's window. The means so far, if that closed the one before it."""
        number = step // self.rules.window
        state = self.drifts.setdefault(key, [number, 0.0, 0, []])
        closed = state[0] != number and state[2] > 0
        if closed:
            state[3] = [*state[3], state[1] / state[2]][-self.rules.drift_windows - 1 :]
        if state[0] != number:
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

    # --- What they share

    def _tell(
        self,
        step: int,
        kind: str,
        signal: str,
        found: Mapping[str, float],
        hints: Mapping[str, Any],
        *,
        smallest: bool = False,
        first: bool = False,
    ) -> list[Alarm]:
        """One alarm for all tensors that are new to the event, named after the worst of them or the first."""
        fresh = [name for name in found if self._is_new(f"{kind} {signal}", name, step)]
        if not fresh:
            return []
        worst = fresh[0] if first else (min if smallest else max)(fresh, key=lambda name: found[name])
        also = tuple(name for name in fresh if name != worst)
        usual = self._usual(f"{worst} {signal}")
        return [self._alarm(step, kind, worst, signal, found[worst], usual, hints.get(worst, {}), also)]

    def _is_new(self, event: str, where: str, step: int) -> bool:
        key = f"{event} {where}"
        known = self.last.get(key)
        self.last[key] = step
        return known is None or not 0 <= step - known <= max(self.rules.gap, self.every)

    def _alarm(
        self,
        step: int,
        kind: str,
        where: str,
        signal: str,
        value: float,
        usual: tuple[float, float],
        hints: Mapping[str, Any] | None = None,
        also: Iterable[str] = (),
    ) -> Alarm:
        return Alarm(step, kind, where, signal, value, usual, advise(kind, signal, value, hints or {}), tuple(also))

    def _remember(self, key: str, value: float) -> None:
        """Running means over about one window of finite values."""
        if not math.isfinite(value):
            return
        mean, square, count = self.usual.get(key, (0.0, 0.0, 0.0))
        share = 1 / (min(count, self.rules.window - 1) + 1)
        mean, square = mean + share * (value - mean), square + share * (value * value - square)
        self.usual[key] = [mean, square, count + 1]

    def _usual(self, key: str) -> tuple[float, float]:
        """Two deviations around the mean, never below zero: these are all sizes."""
        mean, square, count = self.usual.get(key, (0.0, 0.0, 0.0))
        if count < 2:
            return NOTHING
        sigma = math.sqrt(max(0.0, square - mean * mean))
        return max(0.0, mean - 2 * sigma), mean + 2 * sigma

    def forget(self, names: Iterable[str]) -> None:
        """Drop what is known of tensors that are gone."""
        gone = {f"{name} {signal}" for name in names for signal in ("rms", "grad_rms", "param_rms")}
        for windows in (self.usual, self.drifts):
            for key in gone & windows.keys():
                del windows[key]


def _copy(x: Any) -> Any:
    """Plain lists and dicts, nothing shared."""
    if isinstance(x, dict):
        return {key: _copy(value) for key, value in x.items()}
    return [_copy(value) for value in x] if isinstance(x, list | tuple) else x
