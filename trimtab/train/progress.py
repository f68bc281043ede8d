"""The progress of a run: one line that is updated on a terminal, plain lines elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.runs import StepRecord
from trimtab.screen import open_console
from trimtab.train.config import RunConfig


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
