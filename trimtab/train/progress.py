"""The progress of a run: one line that is updated on a terminal, plain lines elsewhere, and scalars for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.hints import load_extra
from trimtab.runs import StepRecord
from trimtab.screen import open_console
from trimtab.train.config import RunConfig

_NOT_PLOTTED = ("step", "warmup_steps", "warmup_tokens")  # the axis, and constants


class ProgressLine:
    """Prints steps and messages; with `shows=False`, as on all processes but the first, it prints nothing."""

    def __init__(self, config: RunConfig, *, shows: bool, console: Console | None = None) -> None:
        self.console = console or open_console()
        self.unit, total = ("step", config.steps) if config.tokens is None else ("tokens", config.tokens)
        self.every, self.shows, self.tokens_per_s = config.log_every, shows, 0.0
        self.live = shows and self.console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn(compact=True))
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.live)
        self.progress.add_task("starting", total=total)
        self.progress.start()

    def show(self, record: StepRecord) -> None:
        if not self.shows:
            return
        speed = record.batch * record.length / max(record.step_seconds, 1e-9)
        self.tokens_per_s = speed if self.tokens_per_s == 0 else 0.9 * self.tokens_per_s + 0.1 * speed
        text = f"step {record.step}  loss {record.loss:.4f}  lr {record.lr:.2e}  length {record.length}  "
        text += f"{self.tokens_per_s:,.0f} tokens/s"
        (task,) = self.progress.tasks
        self.progress.update(task.id, description=text, completed=min(getattr(record, self.unit), task.total or 0))
        if not self.live and (record.step % self.every == 0 or record.step == 1):
            if (seconds := task.time_remaining) is not None:
                text += f"  {seconds / 60:.1f} min left" if seconds >= 90 else f"  {seconds:.0f} s left"
            self.print(text)

    def print(self, text: str) -> None:
        if self.shows:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        if self.live:
            self.progress.stop()


class TensorBoard:
    """Writes scalars for TensorBoard (extra `tensorboard`), unless it is disabled."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.writer: Any = None
        if enabled:
            load_extra("tensorboard", extra="tensorboard", purpose="tensorboard=True")

    def open(self, folder: Path, step: int) -> None:
        """Write to a folder, after this step; what an earlier process wrote after it is removed."""
        if self.enabled:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, name: str, values: Mapping[str, Any], step: int) -> None:
        for key, value in values.items() if self.writer is not None else ():
            if isinstance(value, int | float) and key not in _NOT_PLOTTED:
                self.writer.add_scalar(f"{name}/{key}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
