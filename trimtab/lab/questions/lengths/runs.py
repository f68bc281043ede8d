"""Runs of a measurement: configs that are no grid, side by side on the cores of this machine."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from trimtab.lab.executors import Job, make_executor
from trimtab.runs import RunError, RunFolder
from trimtab.train.config import RunConfig, to_json


def train_all(configs: Mapping[str, RunConfig], folder: Path) -> dict[str, Path]:
    """Train each config in a folder of its name; complete runs are not run again. Returns the folders.

    Raises KeyboardInterrupt if a run was stopped from outside, and RunError if one failed.
    """
    folders = {name: folder / name for name in configs}
    waiting = [name for name in configs if not RunFolder(folders[name]).intact]
    executor, running = make_executor("local"), 0
    with closing(executor):
        while waiting or running:
            while waiting and running < executor.slots:
                name = waiting.pop(0)
                executor.submit(Job(name=name, config=to_json(configs[name]), folder=str(folders[name])))
                running += 1
            for outcome in executor.wait(1.0):
                running -= 1
                if outcome.kind == "stopped":
                    raise KeyboardInterrupt
                if outcome.kind != "complete":
                    raise RunError(f"{folders[outcome.name]}: {outcome.kind} {outcome.error}; try again to continue")
    return folders
