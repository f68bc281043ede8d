"""Run every cell of a study once, and continue after any interruption.

    study --> cells without a result, largest first --> executor --> run folders
                   ^                                        |
                   +--- retry: the cell raised (once), or --+
                        its worker was lost (as long as the cell makes progress)

A complete cell is never run again, unless its files are damaged. A cell with checkpoints continues from the newest one,
exactly. So the same call continues a killed sweep, and the numbers are those of an uninterrupted one. A cell that
cannot be run is recorded in the folder's list of failures and in the summary; the other cells continue.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab.lab.budget import seconds
from trimtab.lab.executors import Executor, Job, Outcome, make_executor
from trimtab.lab.extend import is_extension
from trimtab.lab.store import Store, open_store
from trimtab.lab.study import Cell, Study
from trimtab.lab.table import State, open_view
from trimtab.runs import End, RunError, RunFolder, check_ours, lock_folder, replace_json, require_json
from trimtab.runs.folder import FAILURES, STUDY
from trimtab.runs.log import append_line
from trimtab.screen import open_console
from trimtab.train.config import ConfigError, to_json
from trimtab.train.stopping import catch_signals

TRIES = 2  # of a cell that raises
LOSSES = 5  # workers in a row that a cell may lose without progress
WORKERS = "workers"  # folder for the output of workers
TICK_S = 0.25  # between two checks for signals


@dataclass(frozen=True)
class Summary:
    """Numbers of cells: run by this sweep, complete before, failed, and left to run."""

    done: int
    reused: int
    failed: list[tuple[str, str]]  # cell, error
    seconds: float
    study: Study  # of the folder, which may have more runs than the given one
    left: int = 0
    stopped: End | None = None  # by Ctrl-C or SIGTERM


def sweep(
    study: Study, out: str | Path, *, executor: Executor | None = None, console: Console | None = None
) -> Summary:
    """Run the cells of a study that have no result yet, into a folder or an fsspec address. Closes the executor.

    Sizes and learning rates may be more than those of the study in the folder. If that one has been extended or refined
    (extend.py, refine.py), it is continued with all its runs.
    """
    cells, store = study.cells(), open_store(out)
    console = console or open_console()
    with lock_folder(store.local):
        _check_links(store.local, cells)
        store.pull()
        study = _write_study(study, store)
        cells = study.cells()
        _check_links(store.local, cells)
        executor = executor or make_executor("local")
        try:
            with catch_signals() as signals, open_view(study, console) as view:
                run = _Sweep(cells, store, executor, {cell.name: State(cell) for cell in cells})
                while run.busy and signals.name is None:
                    run.advance()
                    view.show(run.states, executor.slots)
                if signals.name is not None:
                    view.print("stopping: running cells write a checkpoint first (Ctrl-C again to stop at once)")
                    executor.close()
        finally:
            executor.close()
    summary = run.summarize(study, None if signals.name is None else End(signals.name))
    _print_end(summary, console, out)
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
            folder = self.store.local / cell.folder
            if RunFolder(folder).intact:
                self.states[cell.name].finish(folder, reused=True)
                if not self.store.has(cell.folder):  # the last sweep was stopped before it was copied
                    self.store.push_cell(cell.folder)
            else:
                self.waiting.append(cell)
        # Longest first, so that no core is idle for long at the end; of equal ones, those that may fail early.
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
        """The file for a worker's output. Not in the run folder, which must be empty when the run starts."""
        return self.store.local / WORKERS / f"{cell.name.replace('/', '_')}.log"

    def _settle(self, outcome: Outcome) -> None:
        state = self.states[outcome.name]
        cell = state.cell
        if outcome.kind == "complete":
            outcome = self._store_cell(cell, outcome)
        if outcome.kind == "complete":
            state.finish(self.store.local / cell.folder)
            self.errors.pop(cell.name, None)
            with suppress(OSError):
                self.log_of(cell).unlink(missing_ok=True)
            return
        error = outcome.error or "the worker was stopped, but not by this sweep"
        state.count_failure(raised=outcome.kind == "raised")
        if state.raised < TRIES and state.losses < LOSSES:
            state.status = "waiting"
            self.waiting.insert(0, cell)
        else:
            state.status = "failed"
            self.errors[cell.name] = error
        line = {"cell": cell.name, "attempt": state.attempts, "error": error, "time": round(time.time(), 3)}
        append_line(self.store.local / FAILURES, line)
        with suppress(OSError):  # the next failure, or the report, copies it again
            self.store.push(FAILURES)

    def _store_cell(self, cell: Cell, outcome: Outcome) -> Outcome:
        """Copy a complete cell to where it belongs; an outcome with the error if that fails."""
        folder = self.store.local / cell.folder
        try:
            if self.executor.shared:
                self.store.push_cell(cell.folder)
            elif self.store.url is not None:
                self.store.pull_cell(cell.folder)
        except OSError as error:
            return Outcome(cell.name, "raised", f"its files could not be copied: {error}")
        if RunFolder(folder).intact:
            return outcome
        text = f"a worker has completed it, but its files are not in {folder}; use a folder that all machines share"
        return Outcome(cell.name, "raised", f"{text}, or an address such as s3://bucket/folder")

    def summarize(self, study: Study, stopped: End | None) -> Summary:
        statuses = [state.status for state in self.states.values()]
        return Summary(
            done=statuses.count("complete"),
            reused=statuses.count("reused"),
            failed=sorted(self.errors.items()),
            seconds=time.monotonic() - self.begun,
            study=study,
            left=statuses.count("waiting") + statuses.count("running"),
            stopped=stopped,
        )


def cost(cell: Cell) -> float:
    """Relative duration of a cell; the number of samples if the time is unknown."""
    return seconds(cell.config) or cell.config.steps * cell.config.batch


# --- The folder


def _check_links(folder: Path, cells: list[Cell]) -> None:
    """Raise RunError if a path that the sweep writes to is a link: it may lead out of the folder."""
    inner = {Path(STUDY), Path(FAILURES), Path(WORKERS)}
    for cell in cells:
        inner |= {cell.folder, *cell.folder.parents}
    for path in sorted(folder / each for each in inner - {Path()}):
        if path.is_symlink():
            raise RunError(f"{path} is a symbolic link; link the whole folder of the study instead")


def _write_study(study: Study, store: Store) -> Study:
    """Save the study, or check that the folder holds the same one. Earlier formats are read. Returns what to run."""
    path = store.local / STUDY
    check_ours(store.local, STUDY)
    saved = None
    if path.exists():
        try:
            saved = Study.from_json(require_json(path))
        except (ConfigError, RunError) as error:
            raise RunError(f"{path} cannot be read, so the study cannot be continued here: {error}") from None
        if where := _find_difference(saved, study):
            raise RunError(f"{store.local} holds another study: {where}; use another folder")
        study = _joined(saved, study)
    if saved != study:
        replace_json(path, study.to_json())
    store.push(STUDY)
    return study


def _find_difference(saved: Study, study: Study) -> str:
    """Why the runs of a study cannot continue those of the saved one; empty if they can."""
    if saved.identity() != study.identity():
        return _difference(saved.identity(), study.identity())
    if not {*study.lrs} >= {*saved.lrs} and not is_extension(saved.lrs, study.lrs):
        return _difference(list(saved.lrs), list(study.lrs), "lrs")
    if not {size.name for size in study.sizes} >= {size.name for size in saved.sizes}:
        return _difference([size.name for size in saved.sizes], [size.name for size in study.sizes], "sizes")
    # Switches may depend on the learning rate of the base and on the sizes, which are not compared above.
    base = replace(saved.base, watch=study.base.watch, checkpoint_every=study.base.checkpoint_every)
    before = {cell.name: cell.config for cell in replace(saved, base=base).cells()}
    for cell in _joined(saved, study).cells():
        if before.get(cell.name, cell.config) != cell.config:
            return _difference(to_json(before[cell.name]), to_json(cell.config), cell.name)
    return ""


def _joined(saved: Study, study: Study) -> Study:
    """The study with what the saved one has more: learning rates and runs that were added to its grid."""
    lrs = study.lrs if {*study.lrs} >= {*saved.lrs} else saved.lrs
    return replace(study, lrs=lrs, extra=tuple(dict.fromkeys([*saved.extra, *study.extra])))


def _difference(saved: Any, given: Any, name: str = "") -> str:
    """The first field in which two studies differ."""
    if isinstance(saved, dict) and isinstance(given, dict):
        for key in sorted({**given, **saved}, key=lambda key: key != "steps"):  # other fields follow from steps
            if saved.get(key) != given.get(key):
                return _difference(saved.get(key), given.get(key), f"{name}.{key}" if name else key)
    there, here = (text if len(text) <= 80 else f"{text[:77]}..." for text in map(json.dumps, (saved, given)))
    return f"{name} is {there} there and {here} here"


def _print_end(summary: Summary, console: Console, out: str | Path) -> None:
    lines = [f"failed: {cell}: {error}" for cell, error in summary.failed]
    if summary.stopped is not None:
        complete = summary.done + summary.reused
        counts = f"{complete} cells are complete, {summary.left} are left"
        lines.append(f"{summary.stopped.value}: {counts}; the same command continues in {out}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
