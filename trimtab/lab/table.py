"""What a person sees of a sweep: a live table on a terminal, one line per finished cell elsewhere.

    ━━━━━━━╺━━━━━━━━━━━━━━━━
    2 of 10 cells, 1 running, about 4 min left
    size  arm       0.003  0.01  0.03   0.1   0.3
    3x64  plain     ✓2.25 ✓2.10 ▸2.35     ·     ·      ✓ complete, ▸ running, ✗ stopped early, ! failed, · waiting
    3x64  steadied      ·     ·     ·     ·     ·

Where a running cell is, is read from the end of its log: that costs a few microseconds, and the worker nothing.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.lab.study import Cell, Study, number

Status = Literal["waiting", "running", "done", "reused", "failed"]
MARKS = {"waiting": "·", "running": "▸", "done": "✓", "reused": "✓", "failed": "!"}
STYLES = {"waiting": "dim", "running": "cyan", "done": "green", "reused": "green", "failed": "bold red"}
EARLY = "✗"  # a run that was stopped because its loss was beyond hope
EVERY_S = 1.0  # between two pictures
TAIL_BYTES = 4096  # more than a line of a log


@dataclass
class State:
    """Where one cell is."""

    cell: Cell
    status: Status = "waiting"
    folder: Path | None = None  # of the run; None where its files are on another machine
    loss: float = math.nan  # of the last step while it runs, then the final one on validation
    early: bool = False
    step: int = 0
    begun: float = 0.0
    begun_at: int = 0  # the step it went on from
    seconds: float = math.nan  # of a cell that this sweep ran from its first step to its last
    attempts: int = 0
    raised: int = 0
    losses: int = 0  # workers in a row that brought it no further
    furthest: int = 0

    def start(self, folder: Path | None) -> None:
        self.status, self.folder, self.begun, self.step = "running", folder, time.monotonic(), 0
        self.look()
        self.begun_at = self.step

    def look(self) -> None:
        last = read_last(self.folder / "log.jsonl") if self.folder is not None else None
        if last is not None:
            self.step, loss = int(last.get("step", 0)), last.get("loss")
            self.loss = math.nan if loss is None else float(loss)

    def count(self, raised: bool) -> None:
        """An attempt that failed: did it get further than those before?"""
        self.look()
        self.raised += raised
        self.losses = 0 if self.step > self.furthest else self.losses + (not raised)
        self.furthest = max(self.furthest, self.step)

    def finish(self, folder: Path, *, reused: bool = False) -> None:
        self.status, self.folder = ("reused" if reused else "done"), folder
        if not reused and self.begun_at == 0:
            self.seconds = time.monotonic() - self.begun
        self.loss, self.early = read_end(folder)

    @property
    def share(self) -> float:
        """How much of a running cell is done."""
        return min(1.0, self.step / self.cell.config.steps)


def read_last(path: Path) -> dict[str, Any] | None:
    """The last complete line of a .jsonl file, from its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):  # what follows the last line end is not complete
        try:
            found = json.loads(line)
        except ValueError:
            continue
        return found if isinstance(found, dict) else None
    return None


def read_end(folder: Path) -> tuple[float, bool]:
    """The final validation loss of a complete run, and whether it was stopped before its end."""
    loss = math.nan
    try:
        early = json.loads((folder / "result.json").read_text()).get("why") != "done"
        for line in (folder / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event.get("event") == "evaluated":
                loss = math.nan if event["loss"] is None else event["loss"]
    except (OSError, ValueError, KeyError, AttributeError):
        return math.nan, False
    return loss, early


# --- Time left


def guess_left(states: Mapping[str, State], slots: int) -> float | None:
    """Seconds until the sweep is done, from cells of the same size that this sweep ran; None before there is one."""
    known: dict[str, list[float]] = {}
    for state in states.values():
        if state.status == "done" and math.isfinite(state.seconds):
            known.setdefault(state.cell.size, []).append(state.seconds)
        elif state.status == "running" and state.begun_at == 0 and state.share > 0.1:
            known.setdefault(state.cell.size, []).append((time.monotonic() - state.begun) / state.share)
    if not known:
        return None
    typical = {size: median(values) for size, values in known.items()}
    longest = max(typical.values())  # the largest run first, so this is too much rather than too little
    left = [
        typical.get(state.cell.size, longest) * (1 - state.share if state.status == "running" else 1)
        for state in states.values()
        if state.status in ("waiting", "running")
    ]
    return max(sum(left) / max(1, min(slots, len(left))), max(left, default=0.0))


def say_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else _hours(seconds)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h"


# --- Views


class View(Protocol):
    def show(self, states: Mapping[str, State], slots: int) -> None: ...
    def say(self, text: str) -> None: ...


@contextmanager
def open_view(study: Study, console: Console) -> Iterator[View]:
    """A table that is drawn anew every second on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield Picture(study, console, live)


class Lines:
    """`[12/42] 3x64 plain lr 0.1 seed 0: loss 2.19 in 21 s, about 4 min left`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.said: set[str] | None = None

    def show(self, states: Mapping[str, State], slots: int) -> None:
        ended = {name for name, state in states.items() if state.status in ("done", "reused", "failed")}
        if self.said is None:
            self.said = {name for name in ended if states[name].status == "reused"}
            if self.said:
                self.say(f"{len(self.said)} of {len(states)} cells are complete already")
        for name in sorted(ended - self.said):
            self.said.add(name)
            self.say(f"[{len(self.said)}/{len(states)}] {describe(states[name])}{self._left(states, slots)}")

    def _left(self, states: Mapping[str, State], slots: int) -> str:
        for state in states.values():
            if state.status == "running":
                state.look()
        left = guess_left(states, slots)
        return f", about {say_seconds(left)} left" if left else ""

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def describe(state: State) -> str:
    cell = state.cell
    name = f"{cell.size} {cell.arm} lr {number(cell.lr)} seed {cell.seed}"
    if state.status == "failed":
        return f"{name}: failed"
    early = ", stopped early" if state.early else ""
    took = f" in {say_seconds(state.seconds)}" if math.isfinite(state.seconds) else ""
    return f"{name}: loss {say_loss(state.loss)}{early}{took}"


def say_loss(loss: float) -> str:
    return f"{loss:.2f}" if math.isfinite(loss) else "not finite"


class Picture:
    """The live table."""

    def __init__(self, study: Study, console: Console, live: Live) -> None:
        self.study, self.console, self.live = study, console, live
        self.drawn = -math.inf

    def show(self, states: Mapping[str, State], slots: int) -> None:
        ended = all(state.status in ("done", "reused", "failed") for state in states.values())
        if time.monotonic() - self.drawn < EVERY_S and not ended:
            return
        self.drawn = time.monotonic()
        for state in states.values():
            if state.status == "running":
                state.look()
        self.live.update(draw(self.study, states, slots, self.console.width), refresh=True)

    def say(self, text: str) -> None:
        self.live.console.print(text, highlight=False, soft_wrap=True, markup=False)


def draw(study: Study, states: Mapping[str, State], slots: int, width: int) -> Group:
    """Losses where there is room for them, marks alone on a narrow screen."""
    names = max(len(size.name) for size in study.sizes), max(len(arm.name) for arm in study.arms)
    cell = max(len(study.seeds) + 4, 5)
    roomy = sum(names) + 2 + len(study.lrs) * (cell + 1) <= width
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("size", no_wrap=True)
    table.add_column("arm", no_wrap=True, overflow="ellipsis")
    for lr in study.lrs:
        table.add_column(f"{lr:.0e}".replace("e-0", "e-") if not roomy else number(lr), justify="right", no_wrap=True)
    places: dict[tuple[str, str, float], list[State]] = {}
    for state in states.values():
        places.setdefault((state.cell.size, state.cell.arm, state.cell.lr), []).append(state)
    for size in reversed(study.sizes):
        for arm in study.arms:
            row = [draw_place(places[size.name, arm.name, lr], roomy) for lr in study.lrs]
            table.add_row(Text(size.name), Text(arm.name), *row)
    # First what must be seen: a screen that is too short cuts off the end.
    return Group(*draw_head(states, slots, width), table)


def draw_place(states: list[State], roomy: bool) -> Text:
    """The cells of one learning rate, one mark per seed, and the mean of their losses so far."""
    text = Text()
    for state in states:
        text.append(EARLY if state.early else MARKS[state.status], "yellow" if state.early else STYLES[state.status])
    losses = [state.loss for state in states if math.isfinite(state.loss) and state.status != "failed"]
    if roomy and losses:
        text.append(f"{min(mean(losses), 99.9):.{2 if mean(losses) < 10 else 1}f}")
    return text


def draw_head(states: Mapping[str, State], slots: int, width: int) -> list[Any]:
    counts = [state.status for state in states.values()]
    ended = counts.count("done") + counts.count("reused") + counts.count("failed")
    part = ended + sum(state.share for state in states.values() if state.status == "running")
    left, failed = guess_left(states, slots), counts.count("failed")
    text = f"{ended} of {len(counts)} cells, {counts.count('running')} running"
    text += f", {failed} failed" if failed else ""
    text += f", about {say_seconds(left)} left" if left else ""
    bar = Table.grid()  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=len(counts), completed=part, width=min(60, width)))
    return [bar, Text(text)]
