"""The progress of a run: one line that is updated on a terminal, plain lines elsewhere, and scalars for TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.extras import load_extra
from trimtab.runs import StepRecord
from trimtab.train.config import RunConfig

_NOT_PLOTTED = ("step", "warmup_steps", "warmup_tokens")  # the axis, and constants


class ProgressLine:
    """Prints steps and messages; with `shows=False`, as on all processes but the first, it prints nothing."""

    def __init__(self, config: RunConfig, *, shows: bool, console: Console | None = None) -> None:
        self.console = console or Console()
        self.total, self.unit = (config.steps, "step") if config.tokens is None else (config.tokens, "tokens")
        self.every, self.shows = config.log_every, shows
        self.first: tuple[float, int] | None = None  # time and position of the first line
        self.tokens_per_s = 0.0
        self.live: Progress | None = None
        if shows and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn(compact=True))
            self.live = Progress(*columns, console=self.console, transient=True)
            self.task = self.live.add_task("starting", total=self.total)
            self.live.start()

    def show(self, record: StepRecord) -> None:
        if not self.shows:
            return
        speed = record.batch * record.length / max(record.step_seconds, 1e-9)
        self.tokens_per_s = speed if self.tokens_per_s == 0 else 0.9 * self.tokens_per_s + 0.1 * speed
        text = f"step {record.step}  loss {record.loss:.4f}  lr {record.lr:.2e}  length {record.length}  "
        text += f"{self.tokens_per_s:,.0f} tokens/s"
        if self.live is not None:
            self.live.update(self.task, description=text, completed=min(getattr(record, self.unit), self.total))
        elif record.step % self.every == 0 or record.step == 1:
            self.print(f"{text}  {self._time_left(getattr(record, self.unit))}")

    def print(self, text: str) -> None:
        if self.shows:
            (self.live.console if self.live is not None else self.console).print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _time_left(self, done: int) -> str:
        if self.first is None:
            self.first = (time.perf_counter(), done)
            return ""
        seconds = (time.perf_counter() - self.first[0]) / max(1, done - self.first[1]) * (self.total - done)
        return f"{seconds / 60:.1f} min left" if seconds >= 90 else f"{seconds:.0f} s left"


class TensorBoard:
    """Writes scalars for TensorBoard (extra `tensorboard`), unless it is disabled."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.writer: Any = None
        if enabled:
            load_extra("tensorboard", extra="tensorboard", purpose="tensorboard=True")

    def open(self, folder: Path, step: int) -> None:
        """Write to the run's folder, after this step; what an earlier process wrote after it is removed."""
        if self.enabled:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, name: str, values: Mapping[str, Any], step: int) -> None:
        for key, value in values.items() if self.writer is not None else ():
            if isinstance(value, int | float) and key not in _NOT_PLOTTED:
                self.writer.add_scalar(f"{name}/{key}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
