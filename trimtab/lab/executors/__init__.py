"""Where cells run: on this machine, or on a Ray cluster, behind four methods.

    sweep  --submit(Job)-->  executor  -->  a worker: one cell, one thread
           <--wait()-------  Outcome        "done", "stopped", "raised" or "lost"

A job is plain JSON and a worker answers in plain JSON; everything else that a cell has to say it says in the files of
its run. Executors never retry: what is worth another try is for the sweep to decide, the same way everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

NAMES = ("local", "ray")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One cell to run."""

    name: str
    config: Mapping[str, Any]  # a RunConfig as JSON
    folder: str  # of the run
    url: str | None = None  # where the worker puts the files when they are complete, if it does not share our disk
    log: str | None = None  # file for what a worker prints


@dataclass(frozen=True)
class Outcome:
    """How a job ended: complete, asked to stop (with a checkpoint), with an exception, or its worker is gone."""

    name: str
    kind: Literal["done", "stopped", "raised", "lost"]
    error: str = ""


class Executor(Protocol):
    shared: bool  # whether workers write to the disk that we read

    @property
    def slots(self) -> int:
        """Cells that can run at the same time."""

    def submit(self, job: Job) -> None:
        """Start a cell. Never called for more cells than there are slots."""

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Those that have ended, as soon as there is one; none after the timeout."""

    def close(self) -> None:
        """Ask the workers that still run to stop with a checkpoint, and wait for that, but not for long."""


def make_executor(name: str, slots: int | None = None) -> Executor:
    """An executor by name: "local" or "ray". `slots` is the number of cells at a time; None: one per core."""
    if slots is not None and slots < 1:
        raise ValueError(f"slots={slots} is too small; try 1, or None for one per core")
    if name == "local":
        from trimtab.lab.executors.local import LocalExecutor

        return LocalExecutor(slots)
    if name == "ray":
        from trimtab.lab.executors.ray import RayExecutor

        return RayExecutor(slots)
    raise ValueError(f"executor {name!r} is not known; try one of {', '.join(NAMES)}")
