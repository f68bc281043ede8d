"""Run every cell of a study: each once, whatever is killed in between.

    study.json --> cells without a result.json, largest first --> executor --> run folders
                        ^                                            |
                        +--- again: it raised (once), or its worker --+
                             was lost (as long as it gets further)

A cell that is complete is never run again; one with checkpoints goes on from there, exactly. So a killed sweep is
continued by the same call, and its numbers are those of a sweep that nobody disturbed. A cell that cannot be run is
reported in failures.jsonl and in the summary and stops nobody else.
"""

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab.lab.executors import Executor, Job, Outcome, make_executor
from trimtab.lab.store import Store, open_store
from trimtab.lab.study import Cell, Study
from trimtab.lab.table import State, open_view
from trimtab.runs import RunError
from trimtab.runs.files import replace_json
from trimtab.train.config import to_json
from trimtab.train.stopping import catch_signals

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

TRIES = 2  # of a cell that raises
LOSSES = 5  # workers in a row that a cell may lose without getting further
TICK_S = 0.25  # between two looks at the signals


@dataclass(frozen=True)
class Summary:
    """What a sweep did: cells that it ran, that were complete before, that failed, and that are still to be run."""

    done: int
    reused: int
    failed: list[tuple[str, str]]  # cell, error
    seconds: float
    left: int = 0
    stopped: str | None = None  # "interrupted" or "terminated"


def sweep(
    study: Study, out: str | Path, *, executor: Executor | None = None, console: Console | None = None
) -> Summary:
    """Run the cells of a study that have no result yet, into a folder or an fsspec address. Closes the executor."""
    cells, store = study.cells(), open_store(out)
    console = console or Console()
    with _claim(store.local):
        store.pull()
        _write_study(study, store)
        executor = executor or make_executor("local")
        try:
            with catch_signals() as asked, open_view(study, console) as view:
                run = _Sweep(cells, store, executor, {cell.name: State(cell) for cell in cells})
                while run.busy and asked.name is None:
                    run.advance()
                    view.show(run.states, executor.slots)
                if asked.name is not None:
                    view.say("stopping: the cells that run write a checkpoint first (Ctrl-C again: at once)")
                    executor.close()
        finally:
            executor.close()
    summary = run.summarize(asked.name)
    _say_end(summary, console, out)
    return summary


@dataclass
class _Sweep:
    cells: list[Cell]
    store: Store
    executor: Executor
    states: dict[str, State]
    waiting: list[Cell] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        for cell in self.cells:
            if (self.store.local / cell.folder / "result.json").exists():
                self.states[cell.name].finish(self.store.local / cell.folder, reused=True)
                if not self.store.has(cell.folder):  # stopped just before it was copied
                    self.store.push_cell(cell.folder)
            else:
                self.waiting.append(cell)
        # The longest first: what is left for the end is short, so no core is idle for long. Failing ones end early.
        order = {size: i for i, size in enumerate(dict.fromkeys(cell.size for cell in self.cells))}
        self.waiting.sort(key=lambda cell: (-cost(cell), -order[cell.size], cell.lr))

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or bool(self.running)

    @property
    def running(self) -> list[State]:
        return [state for state in self.states.values() if state.status == "running"]

    def advance(self) -> None:
        while self.waiting and len(self.running) < self.executor.slots:
            self._start(self.waiting.pop(0))
        for outcome in self.executor.wait(TICK_S):
            self._settle(outcome)

    def _start(self, cell: Cell) -> None:
        state, folder = self.states[cell.name], self.store.local / cell.folder
        config = cell.config if cell.config.threads is not None else replace(cell.config, threads=1)
        url = None if self.executor.shared or self.store.url is None else self.store.join(cell.folder)
        log = str(self.log_of(cell).absolute()) if self.executor.shared else None
        state.start(folder if self.executor.shared or url is None else None)
        self.executor.submit(
            Job(name=cell.name, config=to_json(config), folder=str(folder.absolute()), url=url, log=log)
        )

    def log_of(self, cell: Cell) -> Path:
        """Where a worker prints; not in the folder of the run, which has to be empty when it starts."""
        return self.store.local / "workers" / f"{cell.name.replace('/', '_')}.log"

    def _settle(self, outcome: Outcome) -> None:
        state = self.states[outcome.name]
        cell, folder = state.cell, self.store.local / state.cell.folder
        if outcome.kind == "done":
            outcome = self._bring_home(cell, outcome)
        if outcome.kind == "done":
            state.finish(folder)
            self.errors.pop(cell.name, None)
            with suppress(OSError):
                self.log_of(cell).unlink(missing_ok=True)
            return
        error = outcome.error or "the worker was asked to stop, and not by us"
        state.attempts += 1
        state.count(outcome.kind == "raised")
        if state.raised < TRIES and state.losses < LOSSES:
            state.status = "waiting"
            self.waiting.insert(0, cell)
        else:
            state.status = "failed"
            self.errors[cell.name] = error
        self._record(cell.name, state.attempts, error)

    def _bring_home(self, cell: Cell, outcome: Outcome) -> Outcome:
        """A complete cell in the place where it belongs, or why it is not there."""
        try:
            if self.executor.shared:
                self.store.push_cell(cell.folder)
            elif self.store.url is not None:
                self.store.pull_cell(cell.folder)
        except OSError as error:
            return Outcome(cell.name, "raised", f"its files could not be copied: {error}")
        if (self.store.local / cell.folder / "result.json").exists():
            return outcome
        text = (
            f"a worker has finished it, and its files are not in {self.store.local / cell.folder}; take a folder that "
            "all machines see, or an address such as s3://bucket/folder"
        )
        return Outcome(cell.name, "raised", text)

    def _record(self, cell: str, attempt: int, error: str) -> None:
        line = {"cell": cell, "attempt": attempt, "error": error, "time": round(time.time(), 3)}
        with (self.store.local / "failures.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        with suppress(OSError):  # a copy for those who read elsewhere; the next one, or the report, brings it again
            self.store.push("failures.jsonl")

    def summarize(self, stopped: str | None) -> Summary:
        statuses = [state.status for state in self.states.values()]
        return Summary(
            done=statuses.count("done"),
            reused=statuses.count("reused"),
            failed=sorted(self.errors.items()),
            seconds=time.monotonic() - self.begun,
            left=statuses.count("waiting") + statuses.count("running"),
            stopped=stopped,
        )


def cost(cell: Cell) -> float:
    """How long a cell takes compared with others; 1 for models that we know nothing of."""
    model: Any = getattr(cell.config, "model", None)
    depth, width = getattr(model, "depth", 0), getattr(model, "width", 0)
    # Half of a block's time at these widths is calls and elementwise work, which grow less than its matmuls.
    return cell.config.steps * cell.config.batch * (depth * (10 + width) if depth and width else 1)


# --- The folder


@contextmanager
def _claim(folder: Path) -> Iterator[None]:
    """Be the only sweep in a folder. The lock is the system's: it dies with its process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from None
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    file.seek(0)
                    who = file.read().strip() or "another process"
                    raise RunError(f"{folder} is in use by {who}; wait for it, or take another folder") from None
                # Some network file systems have no locks; then nobody is kept out.
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def _write_study(study: Study, store: Store) -> None:
    path, mine = store.local / "study.json", json.loads(json.dumps(study.to_json()))
    if path.exists():
        try:
            theirs = json.loads(path.read_text())
        except ValueError:
            raise RunError(f"{path} is not JSON, so what the folder holds is unknown; take another folder") from None
        if theirs != mine:
            raise RunError(f"{store.local} holds another study: {_difference(theirs, mine)}; take another folder")
    elif (store.local / "cells").exists():
        raise RunError(f"{store.local} has cells and no study.json; take another folder")
    else:
        replace_json(path, mine)
    store.push("study.json")


def _difference(theirs: Any, mine: Any, name: str = "") -> str:
    """The first thing that two studies do not share."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for key in sorted(dict.fromkeys([*mine, *theirs]), key=lambda key: key != "steps"):  # much follows from steps
            if theirs.get(key) != mine.get(key):
                return _difference(theirs.get(key), mine.get(key), f"{name}.{key}" if name else key)
    return f"{name} is {_short(theirs)} there and {_short(mine)} here"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _say_end(summary: Summary, console: Console, out: str | Path) -> None:
    for cell, error in summary.failed:
        console.print(f"failed: {cell}: {error}", highlight=False, soft_wrap=True, markup=False)
    if summary.stopped is not None:
        whole = summary.done + summary.reused
        text = f"{summary.stopped}: {whole} cells are complete, {summary.left} are left; the same command goes on in "
        console.print(text + str(out), highlight=False, soft_wrap=True, markup=False)
