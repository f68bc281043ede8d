"""The watcher of a run: what it sees goes to the run's files, and a wish to go back waits until the step is written.

signals.jsonl   every `watch.record_every` steps, and at every step with an alarm
events.jsonl    the alarms, and what was done about them
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.runs import EventKind, RunLog
from trimtab.train.config import RunConfig
from trimtab.watch import Alarm, Rules, Watch

IGNORED = Rules().ignore


class Watcher:
    """`trimtab.watch.Watch` as a run has it, or nothing where `watch.every` is 0."""

    def __init__(self, config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer, log: RunLog) -> None:
        self.config, self.log = config.watch, log
        self.wants_back: Alarm | None = None  # roll back, and why
        self.alarms: list[Alarm] = []  # of the last step
        self.watch: Watch | None = None
        if self.config.every:
            ignore = min(IGNORED, config.steps // 20) if self.config.ignore is None else self.config.ignore
            self.watch = Watch(
                model,
                optimizer,
                every=self.config.every,
                deep_every=self.config.deep_every,
                taps=not config.compile,  # listening breaks a compiled graph
                actions=self.config.actions(self._ask),
                rules=Rules(ignore=ignore),
            )

    def skip(self) -> None:
        """Instead of the optimizer's step: the gradients that were left out are looked at all the same."""
        if self.watch is not None:
            self.watch.skip()

    def step(self, loss: Tensor, grad_norm: float) -> None:
        self.alarms = self.watch.step(loss, grad_norm=grad_norm) if self.watch is not None else []

    def write(self, step: int, *, totals: bool = False) -> dict[str, Any]:
        """Put the step on record; returns its totals, if they are asked for and there was a look."""
        for alarm in self.alarms:
            self.log.event(EventKind.ALARM, **alarm.to_json())
        due = bool(self.alarms) or step % self.config.record_every == 0
        # Asked for only where there is one: cleaning a record takes as long as a small layer's step.
        if self.watch is None or step % self.config.every or not (due or totals):
            return {}
        record = self.watch.record
        if record.get("step") != step:  # it has switched itself off
            return {}
        if due:
            self.log.signals(record)
        return dict(record["totals"])

    def state(self) -> dict[str, Any] | None:
        return None if self.watch is None else self.watch.state_dict()

    def load(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Go on after `step`. A checkpoint of a run that nobody watched has no windows to go on with."""
        self.wants_back, self.alarms = None, []
        if self.watch is not None:
            self.watch.steps = step
            if state is not None:
                self.watch.load_state_dict(state)

    def _ask(self, alarm: Alarm) -> None:
        self.wants_back = alarm
