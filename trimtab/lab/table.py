"""Progress of a sweep: a live table on a terminal, otherwise one line per finished cell.

    ━━━━━━━╺━━━━━━━━━━━━━━━━
    2 of 10 cells, 1 running, about 4 min left
    size  arm       0.003  0.01  0.03   0.1   0.3
    3x64  plain     ✓2.25 ✓2.10 ▸2.35     ·     ·      ✓ complete, ▸ running, ✗ stopped early, ! failed, · waiting
    3x64  steadied      ·     ·     ·     ·     ·

The step of a running cell is read from the end of its log, which takes microseconds.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.lab.study import Cell, Study, number
from trimtab.report.numbers import duration
from trimtab.runs import End, EventKind, RunError, RunFolder

Status = Literal["waiting", "running", "complete", "reused", "failed"]
ENDED = ("complete", "reused", "failed")
MARKS = {"waiting": "·", "running": "▸", "complete": "✓", "reused": "✓", "failed": "!"}
STYLES = {"waiting": "dim", "running": "cyan", "complete": "green", "reused": "green", "failed": "bold red"}
EARLY = "✗"  # a run that was stopped early because it diverged
EVERY_S = 1.0  # between two drawings


@dataclass
class State:
    """The progress of one cell."""

    cell: Cell
    status: Status = "waiting"
    folder: Path | None = None  # of the run; None if its files are on another machine
    loss: float = math.nan  # of the last step while it runs, then the final validation loss
    early: bool = False
    step: int = 0
    begun: float = 0.0
    begun_at: int = 0  # the step it continued from
    seconds: float = math.nan  # of a cell that this sweep ran from its first step to its last
    attempts: int = 0
    raised: int = 0
    losses: int = 0  # workers lost in a row without progress
    furthest: int = 0

    def start(self, folder: Path | None) -> None:
        self.status, self.folder, self.begun, self.step = "running", folder, time.monotonic(), 0
        self.update()
        self.begun_at = self.step

    def update(self) -> None:
        """Read the last step from the log."""
        last = RunFolder(self.folder).read_last_step() if self.folder is not None else None
        if last is not None:
            self.step, loss = int(last.get("step", 0)), last.get("loss")
            self.loss = math.nan if loss is None else float(loss)

    def count_failure(self, *, raised: bool) -> None:
        """Count an attempt that failed. Progress resets the count of lost workers."""
        self.update()
        self.attempts += 1
        self.raised += raised
        self.losses = 0 if self.step > self.furthest else self.losses + (not raised)
        self.furthest = max(self.furthest, self.step)

    def finish(self, folder: Path, *, reused: bool = False) -> None:
        self.status, self.folder = ("reused" if reused else "complete"), folder
        if not reused and self.begun_at == 0:
            self.seconds = time.monotonic() - self.begun
        self.loss, self.early = read_end(folder)

    @property
    def share(self) -> float:
        """The completed share of a running cell."""
        return min(1.0, self.step / self.cell.config.steps)


def read_end(folder: Path) -> tuple[float, bool]:
    """The final validation loss of a complete run, and whether it was stopped before its end."""
    run = RunFolder(folder)
    result = run.read_result()
    if result is None:
        return math.nan, False
    try:
        losses = [event.loss for event in run.read_events() if event.kind == EventKind.EVALUATED]
    except (OSError, RunError):
        losses = []
    return losses[-1] if losses else math.nan, result.why != End.DONE


# --- Time left


def estimate_left(states: Mapping[str, State], slots: int) -> float | None:
    """Seconds until the sweep is complete, from cells of the same size in this sweep; None without any."""
    known: dict[str, list[float]] = {}
    for state in states.values():
        if state.status == "complete" and math.isfinite(state.seconds):
            known.setdefault(state.cell.size, []).append(state.seconds)
        elif state.status == "running" and state.begun_at == 0 and state.share > 0.1:
            known.setdefault(state.cell.size, []).append((time.monotonic() - state.begun) / state.share)
    if not known:
        return None
    typical = {size: median(values) for size, values in known.items()}
    longest = max(typical.values())  # the largest cells run first, so this is an upper bound for the others
    left = [
        typical.get(state.cell.size, longest) * (1 - state.share if state.status == "running" else 1)
        for state in states.values()
        if state.status in ("waiting", "running")
    ]
    return max(sum(left) / max(1, min(slots, len(left))), max(left, default=0.0))


# --- Views


@contextmanager
def open_view(study: Study, console: Console) -> Iterator["LineView"]:
    """A table that is redrawn every second on a terminal, otherwise lines."""
    if not console.is_terminal:
        yield LineView(console)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield TableView(study, live)


class LineView:
    """`[12/42] 3x64 plain lr 0.1 seed 0: loss 2.19 in 21 s, about 4 min left`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.shown: set[str] | None = None

    def show(self, states: Mapping[str, State], slots: int) -> None:
        ended = {name for name, state in states.items() if state.status in ENDED}
        if self.shown is None:
            self.shown = {name for name in ended if states[name].status == "reused"}
            if self.shown:
                self.print(f"{len(self.shown)} of {len(states)} cells are already complete")
        for name in sorted(ended - self.shown):
            self.shown.add(name)
            update_running(states)
            left = describe_left(states, slots)
            self.print(f"[{len(self.shown)}/{len(states)}] {describe(states[name])}{left}")

    def print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


class TableView(LineView):
    """The live table."""

    def __init__(self, study: Study, live: Live) -> None:
        super().__init__(live.console)
        self.study, self.live, self.drawn = study, live, -math.inf

    def show(self, states: Mapping[str, State], slots: int) -> None:
        ended = all(state.status in ENDED for state in states.values())
        if time.monotonic() - self.drawn < EVERY_S and not ended:
            return
        self.drawn = time.monotonic()
        update_running(states)
        self.live.update(draw(self.study, states, slots, self.console.width), refresh=True)


def update_running(states: Mapping[str, State]) -> None:
    for state in states.values():
        if state.status == "running":
            state.update()


def describe(state: State) -> str:
    cell = state.cell
    name = f"{cell.size} {cell.arm} lr {number(cell.lr)} seed {cell.seed}"
    if state.status == "failed":
        return f"{name}: failed"
    loss = f"{state.loss:.2f}" if math.isfinite(state.loss) else "not a finite number"
    early = ", stopped early" if state.early else ""
    took = f" in {duration(state.seconds)}" if math.isfinite(state.seconds) else ""
    return f"{name}: loss {loss}{early}{took}"


def describe_left(states: Mapping[str, State], slots: int) -> str:
    left = estimate_left(states, slots)
    return f", about {duration(left)} left" if left else ""


def draw(study: Study, states: Mapping[str, State], slots: int, width: int) -> Group:
    """Losses if the screen is wide enough for them, otherwise marks only."""
    names = max(len(size.name) for size in study.sizes), max(len(arm.name) for arm in study.arms)
    cell = max(len(study.seeds) + 4, 5)
    wide = sum(names) + 2 + len(study.lrs) * (cell + 1) <= width
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("size", no_wrap=True)
    table.add_column("arm", no_wrap=True, overflow="ellipsis")
    for lr in study.lrs:
        table.add_column(number(lr) if wide else f"{lr:.0e}".replace("e-0", "e-"), justify="right", no_wrap=True)
    places: dict[tuple[str, str, float], list[State]] = {}
    for state in states.values():
        places.setdefault((state.cell.size, state.cell.arm, state.cell.lr), []).append(state)
    for size in reversed(study.sizes):
        for arm in study.arms:
            row = [draw_place(places[size.name, arm.name, lr], wide) for lr in study.lrs]
            table.add_row(Text(size.name), Text(arm.name), *row)
    return Group(*draw_head(states, slots, width), table)  # a screen that is too short cuts off the end


def draw_place(states: list[State], wide: bool) -> Text:
    """The cells of one learning rate: one mark per seed, and the mean of their losses so far."""
    text = Text()
    for state in states:
        text.append(EARLY if state.early else MARKS[state.status], "yellow" if state.early else STYLES[state.status])
    losses = [state.loss for state in states if math.isfinite(state.loss) and state.status != "failed"]
    if wide and losses:
        text.append(f"{min(mean(losses), 99.9):.{2 if mean(losses) < 10 else 1}f}")
    return text


def draw_head(states: Mapping[str, State], slots: int, width: int) -> list[Any]:
    counts = [state.status for state in states.values()]
    ended, failed = sum(status in ENDED for status in counts), counts.count("failed")
    part = ended + sum(state.share for state in states.values() if state.status == "running")
    text = f"{ended} of {len(counts)} cells, {counts.count('running')} running"
    text += (f", {failed} failed" if failed else "") + describe_left(states, slots)
    bar = Table.grid()  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=len(counts), completed=part, width=min(60, width)))
    return [bar, Text(text)]
