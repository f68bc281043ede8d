"""Actions that an alarm can start. None by default; all processes take the same action.

    skip           the step is not taken: gradients are dropped before the optimizer reads them
    shorten        the learning rate of this step is divided by the largest RMS_t of its group
    lower_beta2    β₂ is limited to `beta2` for `beta2_steps` steps, so that the second moment adapts faster
    roll_back      `restore(alarm)` is called; it loads the last checkpoint and skips the batch

`skip` and `shorten` are decided before the step, when there is no loss yet. The second moment cannot adapt to gradients
that it never receives, so at most `in_a_row` consecutive steps are skipped or shortened.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.watch.events import NO_RANGE, Alarm

BEFORE = ("rms spike", "non-finite")  # alarms that are known before the step
KINDS = ("rms spike", "loss spike", "explosion", "non-finite", "gradient near eps", "attention logits", "drift")


@dataclass(frozen=True, kw_only=True)
class Actions:
    """The kinds of alarm that start each action.

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
                raise ValueError(f"{name} must be a list of alarm kinds, got {kinds!r}; try {name}=[{kinds!r}]")
            wrong = [kind for kind in kinds if kind not in allowed]
            if wrong:
                raise ValueError(f"{name} cannot be started by alarm {wrong[0]!r}; try one of {', '.join(allowed)}")
        if self.roll_back and self.restore is None:
            raise ValueError("roll_back needs restore=..., a function that loads the last checkpoint")
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 must be in [0, 1), got {self.beta2}")
        if self.beta2_steps < 1 or self.in_a_row < 1:
            raise ValueError(f"beta2_steps and in_a_row must be at least 1, got {self.beta2_steps} and {self.in_a_row}")

    @property
    def before(self) -> bool:
        """Whether something must be decided before the step."""
        return bool(self.skip or self.shorten)


class Actor:
    """Applies actions to the optimizer and reverts them."""

    def __init__(self, actions: Actions, optimizer: torch.optim.Optimizer) -> None:
        self.actions, self.optimizer = actions, optimizer
        if actions.lower_beta2 and not any("betas" in group for group in optimizer.param_groups):
            raise ValueError(f"{type(optimizer).__name__} has no β₂ to lower; leave lower_beta2 out")
        self.streak = 0  # consecutive steps skipped or shortened
        self.until: int | None = None  # last step with a lower β₂
        self.betas: list[Any] = []  # original values
        self._original_lrs: list[tuple[dict[str, Any], Any]] = []

    def before_step(
        self, step: int, spiking: Sequence[str], broken: Sequence[str], worst: Sequence[float]
    ) -> list[Alarm]:
        """Skip or shorten the next step. `worst` is the largest RMS_t of each group.

        All processes call this with the same decision-relevant arguments.
        """
        found = {kind: where for kind, where in (("rms spike", spiking), ("non-finite", broken)) if where}
        skip = next((kind for kind in found if kind in self.actions.skip), None)
        kind = skip or next((kind for kind in found if kind in self.actions.shorten), None)
        if kind is None or self.streak >= self.actions.in_a_row:
            self.streak = 0
            return []
        self.streak += 1
        if skip is not None:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
            return [_action(step, kind, found[kind], "skip", "This step was skipped: no parameter changed")]
        factors = [1 / x if math.isfinite(x) and x > 1 else 1.0 for x in worst]
        for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
            self._original_lrs.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor
        text = f"The learning rate of this step was multiplied by {min(factors):.2g}"
        return [_action(step, kind, found[kind], "shorten", text)]

    def after_step(self) -> None:
        """Restore the learning rates that `before_step` changed."""
        for group, lr in self._original_lrs:
            group["lr"] = lr
        self._original_lrs = []

    def after_alarms(self, step: int, alarms: Sequence[Alarm]) -> list[Alarm]:
        done: list[Alarm] = []
        if self.until is not None and step >= self.until:
            for group, betas in zip(self.optimizer.param_groups, self.betas, strict=False):
                if betas is not None:
                    group["betas"] = tuple(betas)
            self.until, self.betas = None, []
            done.append(_action(step, "lower_beta2", ["optimizer"], "beta2", "β₂ was set back to its original value"))
        for alarm in alarms:
            if alarm.kind in self.actions.lower_beta2:
                if self.until is None:
                    self._lower_beta2()
                    text = f"β₂ is limited to {self.actions.beta2:g} for {self.actions.beta2_steps} steps"
                    done.append(_action(step, alarm.kind, [alarm.where], "lower_beta2", text))
                self.until = step + self.actions.beta2_steps
        cause = next((alarm for alarm in alarms if alarm.kind in self.actions.roll_back), None)
        if cause is not None and self.actions.restore is not None:
            text = "Rolling back to the last checkpoint, if there is one"
            done.append(_action(step, cause.kind, [cause.where], "roll_back", text))
            self.actions.restore(cause)
        return done

    def _lower_beta2(self) -> None:
        self.betas = [group.get("betas") for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            if "betas" in group:
                beta1, beta2, *rest = group["betas"]
                group["betas"] = (beta1, min(float(beta2), self.actions.beta2), *rest)

    def state_dict(self) -> dict[str, Any]:
        betas = [None if x is None else [float(beta) for beta in x] for x in self.betas]
        return {"streak": self.streak, "until": self.until, "betas": betas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.streak, self.until = state["streak"], state["until"]
        self.betas = [None if betas is None else [float(beta) for beta in betas] for betas in state["betas"]]


def _action(step: int, kind: str, where: Sequence[str], action: str, text: str) -> Alarm:
    return Alarm(step, "action", where[0], action, math.nan, NO_RANGE, f"{text} (cause: {kind})", tuple(where[1:]))
