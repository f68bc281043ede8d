"""What a worker does with one cell: train it, or go on with it, exactly.

    no folder                        train
    complete checkpoints             resume from the newest that is whole
    anything else that is a run      its files are removed, then train
    files that no run has written    refused: they may be somebody's

A worker imports this module and with it torch; nothing here runs a torch operation while it is imported, so a process
may be forked after the import.
"""

import ctypes
import io
import shutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from trimtab.lab.executors import Job, Outcome
from trimtab.train import CheckpointError, Checkpoints, RunConfig, RunError, resume, train
from trimtab.train.config import from_json
from trimtab.train.processes import Processes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
# What a run leaves in its folder; temporary files begin with a dot.
_OURS = {"config.json", "log.jsonl", "signals.jsonl", "events.jsonl", "result.json", "checkpoints", "tensorboard"}


def work(job: Job) -> Outcome:
    """Run a cell; whatever it raises becomes its outcome."""
    keep_memory()
    try:
        why = run_cell(Path(job.folder), from_json(job.config))
        if job.url is not None and why == "done":
            from trimtab.lab.store import push_run

            push_run(Path(job.folder), job.url)
        return Outcome(job.name, "done" if why == "done" else "stopped")
    except Exception as error:
        traceback.print_exc()
        return Outcome(job.name, "raised", _describe(error))


def keep_memory() -> None:
    """Tell glibc to keep what is freed. By default it hands megabytes back to the kernel at every step, and gets them
    again page by page: two workers side by side are 1.3 times as fast without that (docs/log.md)."""
    with suppress(OSError, AttributeError):  # other systems have other allocators
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 64 << 20)):
            mallopt(option, value)


def run_cell(folder: Path, config: RunConfig) -> str:
    """Returns "done", whatever the run's own reason to end was, or "stopped" when somebody asked it to."""
    if (folder / "result.json").exists():
        return "done"
    quiet = Console(file=io.StringIO(), force_terminal=False, force_jupyter=False)
    step = find_checkpoint(folder)
    if step is not None:
        result = resume(folder, config, step=step, console=quiet)
    else:
        clear(folder)
        result = train(config, folder, console=quiet)
    return "stopped" if result["why"] in ("interrupted", "terminated") else "done"


def find_checkpoint(folder: Path) -> int | None:
    """The newest step of a run from which it can go on."""
    try:
        checkpoints = Checkpoints(folder / "checkpoints", 1, Processes())
        (folder / "config.json").read_bytes()
    except OSError:
        return None
    for step in reversed(checkpoints.list_steps()):
        try:
            checkpoints.verify(step)
        except CheckpointError as error:
            print(error, file=sys.stderr)
            continue
        return step
    return None


def clear(folder: Path) -> None:
    """Remove what is left of a run that cannot go on."""
    if not folder.exists():
        return
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in _OURS and path.name[0] != ".")
    if foreign:
        raise RunError(f"{folder} holds {foreign[0]}, which is no file of a run; move it away, or take another folder")
    shutil.rmtree(folder)


def _describe(error: BaseException) -> str:
    """One line: what was raised, and where. What we say of somebody's own model was raised in that model."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"
