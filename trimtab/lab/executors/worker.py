"""A worker trains one cell, or continues it exactly.

    no folder                          train
    checkpoints                        resume from the newest one that is intact, with the log up to it
    other files of a run               remove them, then train
    files that no run writes           refuse: they may belong to the user

Importing this module imports torch but runs no torch operation, so a process may be forked after the import.
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
from trimtab.runs import End, RunError, RunFolder, RunLog
from trimtab.runs.folder import CHECKPOINTS, FILES, TENSORBOARD
from trimtab.train import CheckpointError, Checkpoints, RunConfig, resume, train
from trimtab.train.config import from_json, load_config
from trimtab.train.processes import Processes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_OURS = {*FILES, CHECKPOINTS, TENSORBOARD}  # what a run leaves in its folder; temporary files begin with a dot


def work(job: Job) -> Outcome:
    """Run a cell. An exception becomes its outcome."""
    keep_memory()
    try:
        complete = run_cell(Path(job.folder), from_json(job.config))
        if job.url is not None and complete:
            from trimtab.lab.store import push_run

            push_run(Path(job.folder), job.url)
        return Outcome(job.name, "complete" if complete else "stopped")
    except Exception as error:
        traceback.print_exc()
        return Outcome(job.name, "raised", _describe(error))


def keep_memory() -> None:
    """Set glibc to keep freed memory. By default it returns megabytes to the kernel at every step and requests them
    again page by page; without that, two workers side by side are 1.3 times as fast (docs/log.md)."""
    with suppress(OSError, AttributeError):  # other systems have other allocators
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 64 << 20)):
            mallopt(option, value)


def run_cell(folder: Path, config: RunConfig) -> bool:
    """Whether the run is complete, for any reason; False if it was stopped from outside and can be resumed."""
    if RunFolder(folder).intact:
        return True
    quiet = Console(file=io.StringIO(), force_terminal=False, force_jupyter=False)
    step = find_checkpoint(folder, config)
    if step is not None:
        result = resume(folder, config, step=step, console=quiet)
    else:
        clear(folder)
        result = train(config, folder, console=quiet)
    return not End(result["why"]).resumable


def find_checkpoint(folder: Path, config: RunConfig) -> int | None:
    """The step of the newest checkpoint that is intact, with the log up to it; None if the run cannot be resumed."""
    run = RunFolder(folder)
    checkpoints = Checkpoints(run.checkpoints, 1, Processes())
    if checkpoints.empty:
        return None
    try:
        load_config(folder, trust=getattr(config.model, "build", None))
        RunLog(folder).check_files()
    except RunError as error:
        print(error, file=sys.stderr)
        return None
    for step in reversed(checkpoints.list_steps()):
        try:
            checkpoints.verify(step)
            damage = run.compare(checkpoints.log_records(step), prefix=True)
        except CheckpointError as error:
            damage = (str(error),)
        if not damage:
            return step
        print(damage[0], file=sys.stderr)
    return None


def clear(folder: Path) -> None:
    """Remove the files of a run that cannot be resumed."""
    if not folder.exists():
        return
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in _OURS and path.name[0] != ".")
    if foreign:
        raise RunError(f"{folder} holds {foreign[0]}, which is no file of a run; move it away, or use another folder")
    shutil.rmtree(folder)


def _describe(error: BaseException) -> str:
    """One line: the error and where it was raised; for an error in the user's own model, where in that model."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"
