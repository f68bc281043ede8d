"""A small sweep for tests: four cells of a few layers, over words made up here; and a sweep in a process to kill."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.train.runs import quiet, read_events, tiny, trajectory
from trimtab.lab.executors import Executor
from trimtab.lab.study import Arm, Cell, Size, Study
from trimtab.lab.sweep import Summary, sweep
from trimtab.train.config import WatchConfig

SIZES = (Size("1x16", 1, 16, 1), Size("2x16", 2, 16, 1))


def small_study(
    folder: Path, *, lrs: Sequence[float] = (0.01, 0.1), sizes: Sequence[Size] = SIZES, **changes: Any
) -> Study:
    changes = {"steps": 40, "checkpoint_every": 10, "eval_every": 20, "keep": 2} | changes
    base = replace(tiny(folder), watch=WatchConfig(every=0), **changes)
    return Study(
        name="small",
        question="does it come out the same?",
        subject="gpt-tiny",
        base=base,
        sizes=tuple(sizes),
        lrs=tuple(lrs),
        arms=(Arm("plain"),),
        seeds=(0,),
    )


def run_quietly(study: Study, out: str | Path, executor: Executor | None = None) -> Summary:
    return sweep(study, out, executor=executor, console=quiet())


def numbers(study: Study, out: Path) -> dict[str, Any]:
    """Everything of a sweep that must not depend on who was killed: each step, and the final validation loss."""
    return {cell.name: (trajectory(out / cell.folder), final_loss(out, cell)) for cell in study.cells()}


def final_loss(out: Path, cell: Cell) -> float:
    return float(read_events(out / cell.folder, "evaluated")[-1]["loss"])


def sweep_in_process(folder: str, out: str, changes: dict[str, Any]) -> None:
    """For processes that are killed: what it says goes to their standard output."""
    print(sweep(small_study(Path(folder), **changes), out, console=Console(width=200)), flush=True)
