"""What the watchers of all hosts share: options, the loss of a step, alarms, and what is logged."""

import logging
from collections import Counter
from typing import Any

from torch import Tensor

from trimtab.watch import Alarm, Watch

_log = logging.getLogger(__name__)


class Watching:
    """A `trimtab.Watch` that lives as long as a training of its host."""

    # At every step, `Watch` takes 3 to 7 % of the time of a small step; every four, as in `trimtab train`, 1 to 2 %.
    def __init__(self, *, log_tensors: bool = False, every: int = 4, deep_every: int = 50, **options: Any) -> None:
        self.log_tensors, self.options = log_tensors, {**options, "every": every, "deep_every": deep_every}
        self.watch: Watch | None = None
        self.alarms: list[Alarm] = []  # of this run
        self._losses: list[Tensor] = []  # of the batches of this step

    def _start(self, model: Any, optimizer: Any, step: int) -> Watch:
        self._close()
        self._losses, self.alarms = [], []
        self.watch = Watch(model, optimizer, **self.options)
        self.watch.steps = step
        return self.watch

    def _step(self, *, mean: bool) -> None:
        """After an optimizer step: its loss is the mean or the sum of those of its batches."""
        assert self.watch is not None
        losses, self._losses = self._losses, []
        total = sum(losses[1:], losses[0]) if losses else None
        alarms = self.watch.step(total / len(losses) if total is not None and mean else total)
        self.alarms += alarms
        for alarm in alarms:
            _log.warning("%s", alarm)

    def _scalars(self) -> dict[str, float]:
        """Signals as "watch/<signal>", of tensors as "watch/<signal>/<name>"; alarms so far as "alarms/<kind>"."""
        assert self.watch is not None
        signals = self.watch.scalars()
        shown = {f"watch/{name}": x for name, x in signals.items() if self.log_tensors or "/" not in name}
        return shown | {f"alarms/{kind}": n for kind, n in Counter(alarm.kind for alarm in self.alarms).items()}

    def _close(self) -> None:
        if self.watch is not None:
            self.watch.close()
