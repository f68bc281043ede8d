"""Cells on this machine: one fresh process with one thread for each, as many at a time as there are cores.

    sweep --> fork server (imported torch once, 1-2 s) --fork, 20 ms--> worker: one cell, then it is gone

A model of a few layers keeps one core busy and gains little from a second, so cells side by side are what fills a
machine. A worker that runs out of memory or is killed takes nobody with it. When the sweep dies, whatever the way, its
workers die too: nobody may write to a run that the next sweep goes on with.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trimtab.lab.executors import Job, Outcome

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

PATIENCE_S = 20.0  # for a worker that was asked to stop: the end of its step, and a checkpoint
# The compiler and its algebra are imported by the first optimizer of a process, for nothing, in about a second.
PRELOAD = ["trimtab.lab.executors.worker", "torch._dynamo"]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class _Running:
    job: Job
    process: BaseProcess
    answer: Connection


class LocalExecutor:
    """Processes of this machine. Can be used again after it was closed."""

    shared = True

    def __init__(self, slots: int | None = None) -> None:
        self._slots = slots or count_cores()
        self.running: dict[str, _Running] = {}
        methods = multiprocessing.get_all_start_methods()
        self.context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            self.context.set_forkserver_preload(PRELOAD)

    @property
    def slots(self) -> int:
        return self._slots

    def submit(self, job: Job) -> None:
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_main, args=(json.dumps(asdict(job)), theirs), name=f"cell {job.name}")
        with _without_main():
            process.start()
        theirs.close()
        self.running[job.name] = _Running(job, process, ours)

    def wait(self, timeout_s: float) -> list[Outcome]:
        if not self.running:
            return []
        ended = set(wait([each.process.sentinel for each in self.running.values()], timeout_s))
        return [self._collect(each) for each in list(self.running.values()) if each.process.sentinel in ended]

    def close(self) -> None:
        for each in self.running.values():
            each.process.terminate()
        deadline = time.monotonic() + PATIENCE_S
        try:
            for each in self.running.values():
                each.process.join(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C comes here at once
            for each in list(self.running.values()):
                each.process.kill()
                self._collect(each)

    def _collect(self, each: _Running) -> Outcome:
        """What an ended worker answered, or that it could not."""
        each.process.join()
        del self.running[each.job.name]
        try:
            outcome = Outcome(**json.loads(each.answer.recv_bytes())) if each.answer.poll() else None
        except (EOFError, OSError, ValueError):
            outcome = None
        each.answer.close()
        code = each.process.exitcode
        each.process.close()
        return outcome or Outcome(each.job.name, "lost", f"{_name_exit(code)}{_read_end(each.job.log)}")


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Python's workers import the main module of their parent: for nothing here, and without end where it is a script
    that starts a sweep and has no `if __name__ == "__main__"`. What they do not see they do not import."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def count_cores() -> int:
    """Cores that this process may use, which in a container or a batch job can be fewer than the machine has."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


# --- In the worker


def _main(text: str, answer: Connection) -> None:
    with contextlib.suppress(OSError):
        os.setsid()  # Ctrl-C in the terminal is for the sweep, which then asks each worker once
    threading.Thread(target=_die_with_parent, name="trimtab-parent", daemon=True).start()
    os.environ.update(_ONE_THREAD)  # for what it starts; torch has been told by the config
    job = Job(**json.loads(text))
    if job.log is not None:
        _redirect(Path(job.log))
    from trimtab.lab.executors.worker import work

    outcome = work(job)
    answer.send_bytes(json.dumps(asdict(outcome)).encode())


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


def _redirect(log: Path) -> None:
    """Standard output and error into a file, which also is the lock of the cell: a worker whose sweep was killed a
    moment ago is gone before the next one starts."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if fcntl is not None:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.ftruncate(descriptor, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


# --- What is said of a worker that is gone


def _name_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"the worker was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"the worker ended with exit code {code}"


def _read_end(log: str | None) -> str:
    """The last line that a worker printed."""
    try:
        lines = Path(log).read_text(errors="replace").split("\n") if log else []
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return f"; it said: {said[-1][:300]}" if said else ""
