"""Cells in processes of this machine: a new process with one thread for each cell, one process per core.

    sweep --> fork server (imports torch once, 1-2 s) --fork, 20 ms--> worker: one cell, then it exits

A small model keeps one core busy and gains little from a second, so independent processes use a machine best. A worker
that runs out of memory or is killed does not affect the others. When the sweep's process dies, its workers exit too, so
that they cannot write to a run that the next sweep continues.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
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

from filelock import FileLock

from trimtab.lab.executors import Job, Outcome

PATIENCE_S = 20.0  # for a stopping worker: the rest of its step and a checkpoint
# The first optimizer of a process imports the compiler, which takes about a second; the fork server does it once.
PRELOAD = ["trimtab.lab.executors.worker", "torch._dynamo"]
_SAFE_PATH = "PYTHONSAFEPATH"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class _Running:
    job: Job
    process: BaseProcess
    answer: Connection


class LocalExecutor:
    """Processes of this machine. Can be used again after `close`."""

    shared = True

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots or count_cores()
        self.running: dict[str, _Running] = {}
        methods = multiprocessing.get_all_start_methods()
        self.context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            self.context.set_forkserver_preload(PRELOAD)

    def submit(self, job: Job) -> None:
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_main, args=(json.dumps(asdict(job)), theirs), name=f"cell {job.name}")
        with _without_main(), _without_current_folder():
            self._start_server()
            process.start()
        theirs.close()
        self.running[job.name] = _Running(job, process, ours)

    def _start_server(self) -> None:
        """Start the fork server with Ctrl-C ignored: it imports torch for seconds, and the terminal's Ctrl-C reaches it
        too. Python itself ignores it there only after the imports."""
        if self.context.get_start_method() != "forkserver":
            return
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            if main:
                signal.signal(signal.SIGINT, before)

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
        finally:  # also after a second Ctrl-C
            for each in list(self.running.values()):
                each.process.kill()
                self._collect(each)

    def _collect(self, each: _Running) -> Outcome:
        """The outcome that an ended worker sent; "lost" if it sent none."""
        each.process.join()
        del self.running[each.job.name]
        try:
            outcome = Outcome(**json.loads(each.answer.recv_bytes())) if each.answer.poll() else None
        except (EOFError, OSError, ValueError):
            outcome = None
        each.answer.close()
        code = each.process.exitcode
        each.process.close()
        return outcome or Outcome(each.job.name, "lost", f"{_describe_exit(code)}{_last_output(each.job.log)}")


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module: a worker would import it, and a script that calls `sweep` without
    `if __name__ == "__main__"` would start another sweep in each worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Start Python without the current folder in its path: a file `random.py` there would replace Python's own."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def count_cores() -> int:
    """Cores that this process may use; in a container or a batch job these can be fewer than the machine has."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


# --- In the worker


def _main(text: str, answer: Connection) -> None:
    with contextlib.suppress(OSError):
        os.setsid()  # the terminal's Ctrl-C reaches only the sweep, which then stops each worker once
    threading.Thread(target=_exit_with_parent, name="trimtab-parent", daemon=True).start()
    os.environ.update(_ONE_THREAD)  # for child processes; the config sets torch's own threads
    job = Job(**json.loads(text))
    lock = _redirect(Path(job.log)) if job.log is not None else None
    from trimtab.lab.executors.worker import work

    answer.send_bytes(json.dumps(asdict(work(job))).encode())
    if lock is not None:
        lock.release()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


def _redirect(log: Path) -> FileLock:
    """Send standard output and error to a file. Its lock is held until the worker exits: a worker whose sweep was
    killed a moment ago must be gone before the next worker of the cell starts."""
    log.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(log.with_name(f".{log.name}.lock"))
    with contextlib.suppress(OSError, NotImplementedError):  # some network file systems have no locks
        lock.acquire()
    with contextlib.suppress(OSError):
        log.unlink()  # it may be a link or a pipe of somebody else
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    return lock


# --- The error of a lost worker


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"the worker was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"the worker ended with exit code {code}"


def _last_output(log: str | None) -> str:
    try:
        text = Path(log).read_text(errors="replace") if log else ""
    except OSError:
        return ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return f"; its last output: {lines[-1][:300]}" if lines else ""
