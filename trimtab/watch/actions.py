"""What a watcher may do about an alarm. Nothing, unless it is told to; and then all processes do the same.

    skip           the step is not taken: gradients are dropped before the optimizer sees them
    shorten        the learning rate of this one step is divided by the largest RMS_t of its group
    lower_beta2    β₂ is at most `beta2` for `beta2_steps` steps, so that the second moment catches up
    roll_back      `restore(alarm)` is called, which loads the last checkpoint and leaves the batch out

Each names the kinds of alarm that set it off. The first two must be decided before the step, when there is no loss
yet. A second moment that never sees a gradient cannot catch up with it, so no more than `in_a_row` steps are skipped or
shortened one after the other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.watch.events import NOTHING, Alarm

BEFORE = ("rms spike", "non-finite")  # known before the step
KINDS = ("rms spike", "loss spike", "non-finite", "gradient near eps", "attention logits", "drift")


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Kinds of alarm, by what they set off.

    >>> Actions(skip=["non-finite"], shorten=["rms spike"])
    """

    skip: Sequence[str] = ()
    shorten: Sequence[str] = ()
    lower_beta2: Sequence[str] = ()
    roll_back: Sequence[str] = ()
    beta2: float = 0.9
    beta2_steps: int = 100
    in_a_row: int = 3
    restore: Callable[[Alarm], None] | None = None

    def __post_init__(self) -> None:
        for name in ("skip", "shorten", "lower_beta2", "roll_back"):
            kinds, allowed = getattr(self, name), BEFORE if name in ("skip", "shorten") else KINDS
            if isinstance(kinds, str):
                raise ValueError(f"{name} takes a list of alarms, got {kinds!r}; try {name}=[{kinds!r}]")
            wrong = [kind for kind in kinds if kind not in allowed]
            if wrong:
                raise ValueError(f"{name} cannot be set off by {wrong[0]!r}; it can by {', '.join(allowed)}")
        if self.roll_back and self.restore is None:
            raise ValueError("roll_back needs restore: a function that loads the last checkpoint")
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 must be in [0, 1), got {self.beta2}")
        if self.beta2_steps < 1 or self.in_a_row < 1:
            raise ValueError(f"beta2_steps and in_a_row must be at least 1, got {self.beta2_steps} and {self.in_a_row}")

    @property
    def before(self) -> bool:
        """Is there something to decide before the step?"""
        return bool(self.skip or self.shorten)

    @property
    def any(self) -> bool:
        return self.before or bool(self.lower_beta2 or self.roll_back)


class Actor:
    """Carries actions out, and takes them back."""

    def __init__(self, actions: Actions, optimizer: torch.optim.Optimizer) -> None:
        self.actions, self.optimizer = actions, optimizer
        if actions.lower_beta2 and not any("betas" in group for group in optimizer.param_groups):
            raise ValueError(f"{type(optimizer).__name__} has no β₂ to lower; leave lower_beta2 out")
        self.streak = 0  # steps skipped or shortened in a row
        self.until: int | None = None  # the last step with a lower β₂
        self.betas: list[Any] = []  # what they were
        self._rates: list[tuple[dict[str, Any], Any]] = []

    def before_step(
        self, step: int, spiking: Mapping[str, float], broken: Sequence[str], worst: list[float]
    ) -> list[Alarm]:
        """`worst` is the largest RMS_t of each group. All processes call this with the same arguments."""
        found = {kind: where for kind, where in (("rms spike", list(spiking)), ("non-finite", list(broken))) if where}
        skip = next((kind for kind in found if kind in self.actions.skip), None)
        shorten = next((kind for kind in found if kind in self.actions.shorten), None)
        kind = skip or shorten
        if kind is None or self.streak >= self.actions.in_a_row:
            self.streak = 0
            return []
        self.streak += 1
        if skip is not None:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
            return [_log(step, kind, found[kind], "skip", "The step was not taken")]
        factors = [1 / x if math.isfinite(x) and x > 1 else 1.0 for x in worst]
        for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
            self._rates.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor
        return [_log(step, kind, found[kind], "shorten", f"The step was shortened to {min(factors):.2g} of its length")]

    def after_step(self) -> None:
        """The learning rate of one step goes with it."""
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def after_alarms(self, step: int, alarms: Sequence[Alarm]) -> list[Alarm]:
        done: list[Alarm] = []
        if self.until is not None and step >= self.until:
            self._give_back()
            done.append(_log(step, "lower_beta2", ["optimizer"], "beta2", "β₂ is what it was"))
        for alarm in alarms:
            if alarm.kind in self.actions.lower_beta2:
                if self.until is None:
                    self._lower()
                    text = f"β₂ is at most {self.actions.beta2:g} for {self.actions.beta2_steps} steps"
                    done.append(_log(step, alarm.kind, [alarm.where], "lower_beta2", text))
                self.until = step + self.actions.beta2_steps
        worst = next((alarm for alarm in alarms if alarm.kind in self.actions.roll_back), None)
        if worst is not None and self.actions.restore is not None:
            done.append(
                _log(step, worst.kind, [worst.where], "roll_back", "Back to the last checkpoint, if there is one")
            )
            self.actions.restore(worst)
        return done

    def _lower(self) -> None:
        self.betas = [group.get("betas") for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            if "betas" in group:
                beta1, beta2, *rest = group["betas"]
                group["betas"] = (beta1, min(float(beta2), self.actions.beta2), *rest)

    def _give_back(self) -> None:
        for group, betas in zip(self.optimizer.param_groups, self.betas, strict=False):
            if betas is not None:
                group["betas"] = tuple(betas)
        self.until, self.betas = None, []

    def state_dict(self) -> dict[str, Any]:
        betas = [None if x is None else [float(beta) for beta in x] for x in self.betas]
        return {"streak": self.streak, "until": self.until, "betas": betas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.streak, self.until, self.betas = state["streak"], state["until"], list(state["betas"])


def _log(step: int, kind: str, where: Sequence[str], action: str, text: str) -> Alarm:
    return Alarm(step, "action", where[0], action, math.nan, NOTHING, f"{text} ({kind})", tuple(where[1:]))
