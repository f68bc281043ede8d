"""Cells as tasks of a Ray cluster, one core each.

An existing cluster is used if there is one (RAY_ADDRESS, or `ray start` on this machine); otherwise a local one is
started and stopped again. The machines need Trimtab, and a folder that all of them share or an fsspec address: then
each worker runs in its own scratch folder and copies the run when it is complete.

    trimtab lab --executor ray --out /shared/lab          RAY_ADDRESS=... trimtab lab --executor ray --out s3://...

Ray's own retries are off; the sweep retries, because it can see whether a cell makes progress.
"""

import json
import logging
import os
from dataclasses import asdict, replace
from typing import Any

from trimtab.hints import load_extra
from trimtab.lab.executors import Job, Outcome

PATIENCE_S = 20.0  # for workers that are stopping


class RayExecutor:
    """Tasks of a Ray cluster. A cluster that was already running keeps running after `close`."""

    shared = False

    def __init__(self, slots: int | None = None, *, address: str | None = None) -> None:
        self.ray: Any = load_extra("ray", extra="ray", purpose="executor ray")
        self._slots = slots
        self.running: dict[Any, Job] = {}
        self.started = not self.ray.is_initialized()
        if self.started:
            self._connect(address or os.environ.get("RAY_ADDRESS"), slots)
        # Ray reuses worker processes: importing torch takes seconds, and a cell leaves no state behind.
        self.task = self.ray.remote(num_cpus=1, max_retries=0)(_run)

    @property
    def slots(self) -> int:
        """Cores of the cluster as it is now; it may grow."""
        return self._slots or max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def submit(self, job: Job) -> None:
        self.running[self.task.remote(json.dumps(asdict(job)))] = job

    def wait(self, timeout_s: float) -> list[Outcome]:
        if not self.running:
            return []
        ended, _ = self.ray.wait(list(self.running), num_returns=1, timeout=timeout_s)
        return [self._collect(each) for each in ended]

    def close(self) -> None:
        try:
            for each in self.running:
                self.ray.cancel(each, force=False)  # KeyboardInterrupt in the worker: it writes a checkpoint
            if self.running:
                self.ray.wait(list(self.running), num_returns=len(self.running), timeout=PATIENCE_S)
        finally:
            for each in self.running:
                self.ray.cancel(each, force=True)
            self.running.clear()
            if self.started and self.ray.is_initialized():
                self.ray.shutdown()

    def _collect(self, each: Any) -> Outcome:
        job, errors = self.running.pop(each), self.ray.exceptions
        try:
            return Outcome(**json.loads(self.ray.get(each)))
        except errors.TaskCancelledError:
            return Outcome(job.name, "stopped")
        except errors.RayTaskError as error:
            return Outcome(job.name, "raised", _first_line(error.cause or error))
        except errors.RayError as error:
            return Outcome(job.name, "lost", _first_line(error))

    def _connect(self, address: str | None, slots: int | None) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            self.ray.init(address=address or "auto", **quiet)
        except ConnectionError as error:
            if address not in (None, "auto", "local"):
                raise ValueError(f"there is no Ray cluster at {address}: {_first_line(error)}") from None
            self.ray.init(address="local", num_cpus=slots, include_dashboard=False, **quiet)


def _run(text: str) -> str:
    """Run a job in a worker of the cluster."""
    from trimtab.lab.executors.worker import work
    from trimtab.lab.store import open_store

    job = Job(**json.loads(text))
    if job.url is not None:  # the worker's disk may be another one than the sweep's
        job = replace(job, folder=str(open_store(job.url).local))
    return json.dumps(asdict(work(job)))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
