"""What a person sees of a run: one line that stays in place on a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.runs import StepRecord


class Line:
    """Shows where a run is. Only the first process has something to show."""

    def __init__(
        self, *, steps: int, tokens: int | None, every: int, shows: bool, console: Console | None = None
    ) -> None:
        self.console = console or Console()
        self.total, self.unit = (tokens, "tokens") if tokens is not None else (steps, "step")
        self.every, self.shows = every, shows
        self.first: tuple[float, int] | None = None
        self.rate = 0.0
        self.live: Progress | None = None
        if shows and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn(compact=True))
            self.live = Progress(*columns, console=self.console, transient=True)
            self.task = self.live.add_task("starting", total=self.total)
            self.live.start()

    def show(self, record: StepRecord) -> None:
        if not self.shows:
            return
        seconds = max(record.step_seconds, 1e-9)
        speed = record.batch * record.length / seconds
        self.rate = speed if self.rate == 0 else 0.9 * self.rate + 0.1 * speed
        text = (
            f"step {record.step}  loss {record.loss:.4f}  lr {record.lr:.2e}  length {record.length}  "
            f"{self.rate:,.0f} tokens/s"
        )
        if self.live is not None:
            self.live.update(self.task, description=text, completed=min(getattr(record, self.unit), self.total))
        elif record.step % self.every == 0 or record.step == 1:
            self.console.print(f"{text}  {self._left(record)}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        if self.shows:
            (self.live.console if self.live is not None else self.console).print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _left(self, record: StepRecord) -> str:
        done = getattr(record, self.unit)
        if self.first is None:
            self.first = (time.perf_counter(), done)
            return ""
        seconds = (time.perf_counter() - self.first[0]) / max(1, done - self.first[1]) * (self.total - done)
        return f"{seconds / 60:.1f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
