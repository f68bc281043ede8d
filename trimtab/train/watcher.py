"""The watcher of a run: writes signals and alarms to the run's files, and keeps a rollback request for the loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.runs import EventKind, RunLog
from trimtab.train.config import RunConfig
from trimtab.watch import Alarm, Rules, Watch


class Watcher:
    """`trimtab.watch.Watch` with the config of a run. Does nothing if `watch.every` is 0."""

    def __init__(self, config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer, log: RunLog) -> None:
        self.config, self.log = config.watch, log
        self.rollback_alarm: Alarm | None = None  # the alarm that requires a rollback, if there is one
        self.alarms: list[Alarm] = []  # of the last step
        self.watch: Watch | None = None
        if self.config.every:
            ignore = min(Rules().ignore, config.steps // 20) if self.config.ignore is None else self.config.ignore
            self.watch = Watch(
                model,
                optimizer,
                every=self.config.every,
                deep_every=self.config.deep_every,
                taps=not config.compile,  # taps break a compiled graph
                actions=self.config.actions(self._request_rollback),
                rules=Rules(ignore=ignore),
            )

    def skip(self) -> None:
        """Call in place of the optimizer's step: the gradients of a skipped step are measured too."""
        if self.watch is not None:
            self.watch.skip()

    def step(self, loss: Tensor, grad_norm: float) -> None:
        # As a number, so that it is checked at once. The loop reads it at every step anyway.
        self.alarms = self.watch.step(loss.item(), grad_norm=grad_norm) if self.watch is not None else []

    def write(self, step: int, *, totals: bool = False) -> dict[str, Any]:
        """Write signals every `record_every` steps and at alarms; returns the totals of the step, if there are any."""
        for alarm in self.alarms:
            self.log.event(EventKind.ALARM, **alarm.to_json())
        due = bool(self.alarms) or step % self.config.record_every == 0
        # Making a record takes as long as the step of a small layer, so it is made only if it is used.
        if self.watch is None or step % self.config.every or not (due or totals):
            return {}
        record = self.watch.record
        if record.get("step") != step:  # the watch has switched itself off
            return {}
        if due:
            self.log.signals(record)
        return dict(record["totals"])

    def close(self) -> None:
        """Remove all hooks and taps: those of a run that failed would record the next one in this process."""
        if self.watch is not None:
            self.watch.close()

    @property
    def lowers_beta2(self) -> bool:
        """Whether an action on an alarm has lowered β₂ for some steps, which are not over."""
        return self.watch is not None and self.watch.actor.until is not None

    def state(self) -> dict[str, Any] | None:
        return None if self.watch is None else self.watch.state_dict()

    def load(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Continue after `step`. `state` is None if the checkpoint has no detector state."""
        self.rollback_alarm, self.alarms = None, []
        if self.watch is not None:
            self.watch.steps = step
            if state is not None:
                self.watch.load_state_dict(state)

    def _request_rollback(self, alarm: Alarm) -> None:
        self.rollback_alarm = alarm
