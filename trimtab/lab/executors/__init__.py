"""Executors run cells: processes of this machine, or tasks of a Ray cluster.

    sweep  --submit(Job)-->  executor  -->  a worker: one cell, one thread
           <--wait()-------  Outcome        complete, stopped, raised or lost

A job and its outcome are plain JSON; all results of a cell are in its run folder. Executors never retry: the sweep
decides which cells to run again.
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
    url: str | None = None  # address to which the worker copies the complete run, if it has another disk
    log: str | None = None  # file for the worker's output


@dataclass(frozen=True)
class Outcome:
    """How a job ended: complete, stopped by request (with a checkpoint), by an exception, or with its worker lost."""

    name: str
    kind: Literal["complete", "stopped", "raised", "lost"]
    error: str = ""


class Executor(Protocol):
    shared: bool  # whether workers write to the disk that the sweep reads

    @property
    def slots(self) -> int:
        """Number of cells that can run at the same time."""

    def submit(self, job: Job) -> None:
        """Start a cell. Never called for more cells than there are slots."""

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Return the jobs that have ended, as soon as there is one; an empty list after the timeout."""

    def close(self) -> None:
        """Stop the running workers: request a checkpoint, wait a limited time, then kill."""


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
    raise ValueError(f"unknown executor {name!r}; try one of {', '.join(NAMES)}")
