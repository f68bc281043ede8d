"""Command-line interface. A command is a function; tyro parses its arguments (options.py).

lab.py      lab, report, reproduce, predict, tune-seqlen              studies of many runs
runs.py     train, resume, eval, sample, export, watch, explain, analyze    one run
about.py    recipes, schedule, doctor                      recipes and the installation

Exit codes: 0; 1 if the run failed, and for a bug; 2 for bad input; 130 and 143 after Ctrl-C and SIGTERM.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trimtab.cli import about, lab, options, runs
from trimtab.cli.options import BAD_INPUT, FAILED, INTERRUPTED
from trimtab.screen import Screen, printable

__all__ = ["COMMANDS", "about", "lab", "main", "options", "run", "runs"]

COMMANDS: dict[str, Callable[..., int]] = {
    "lab": lab.lab,
    "report": lab.report,
    "reproduce": lab.reproduce,
    "predict": lab.predict,
    "tune-seqlen": lab.tune_seqlen,
    "train": runs.train,
    "resume": runs.resume,
    "eval": runs.evaluate,
    "sample": runs.sample,
    "export": runs.export,
    "watch": runs.watch,
    "explain": runs.explain,
    "analyze": runs.analyze,
    "recipes": about.recipes,
    "schedule": about.schedule,
    "doctor": about.doctor,
}
# Commands whose text is their result. The others write to a folder, and go on if their text cannot be written.
TEXT_COMMANDS = ("predict", "eval", "sample", "watch", "explain", "analyze", "recipes", "schedule", "doctor")
BUG = "this is a bug in trimtab: please report it with this traceback at the project's issue tracker"


def main(words: Sequence[str] | None = None) -> NoReturn:
    """The `trimtab` command."""
    words = list(sys.argv[1:] if words is None else words)
    with _screens() as (out, err):
        try:
            code: Any = run(lambda: options.parse(COMMANDS, words)())
        except SystemExit as end:
            code = end.code
        out.flush()
        if out.error is not None and out.error.errno != errno.EPIPE:  # `| head` closes its pipe when it has enough
            print(f"error: cannot write the output: {out.error.strerror or out.error}", file=err)
            code = code or (FAILED if words and words[0] in TEXT_COMMANDS else 0)
    sys.exit(code)


def run(call: Callable[[], int]) -> int:
    """Make a call; report its errors, and return the exit code."""
    with _noted_interrupt() as interrupted:
        try:
            return call()
        except (KeyboardInterrupt, Exception) as error:
            # In the middle of an import, Ctrl-C can surface as another exception.
            if not interrupted and not isinstance(error, KeyboardInterrupt):
                return report_error(error)
            print("error: interrupted; nothing was saved", file=sys.stderr)
            return INTERRUPTED


@contextlib.contextmanager
def _screens() -> Iterator[tuple[Screen, Screen]]:
    """Standard output and error that raise no errors. They may be missing, as after `>&-`."""
    before = sys.stdout, sys.stderr
    out, err = (Screen(stream or io.StringIO()) for stream in before)
    sys.stdout, sys.stderr = out, err
    try:
        yield out, err
    finally:
        sys.stdout, sys.stderr = before
        for screen in (out, err):
            if screen.error is not None:  # at its exit, Python would try again to write what is left
                with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), screen.fileno())


@contextlib.contextmanager
def _noted_interrupt() -> Iterator[list[int]]:
    """A list that is no longer empty after Ctrl-C, which still raises KeyboardInterrupt."""
    noted: list[int] = []

    def note(number: int, _: Any) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup and `&` ignore it
    if not usual or threading.current_thread() is not threading.main_thread():
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def report_error(error: Exception) -> int:
    """Print an error in one line if the user or the machine caused it, otherwise as a bug; return the exit code."""
    from trimtab.train import ProcessLost

    bad = is_bad_input(error)
    if bad or isinstance(error, OSError | ProcessLost | MemoryError) or "can't allocate memory" in str(error):
        # The text may come from a file of somebody else, so it is escaped.
        print(f"error: {printable(str(error)) or 'out of memory'}", file=sys.stderr)
        return BAD_INPUT if bad else FAILED
    traceback.print_exception(error)
    print(BUG, file=sys.stderr)
    return FAILED


def is_bad_input(error: Exception) -> bool:
    """Whether a check of Trimtab raised the error. A ValueError from any other place is a bug."""
    from trimtab.hints import MissingExtra
    from trimtab.runs import RunError
    from trimtab.train import CheckpointError
    from trimtab.train.config import ConfigError

    if isinstance(error, ConfigError | RunError | CheckpointError | MissingExtra | PermissionError):
        return True
    raised = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(__file__).parent.parent in Path(raised.filename).parents
    return isinstance(error, ValueError) and ours and (raised.line or "").startswith("raise ")
