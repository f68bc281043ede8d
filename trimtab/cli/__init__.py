"""Command-line interface. A command is a function; tyro parses its arguments (options.py).

lab.py      lab, report, predict, tune-seqlen              studies of many runs
runs.py     train, resume, eval, sample, watch, explain    one run
about.py    recipes, schedule, doctor                      recipes and the installation

Exit codes: 0; 1 if the run failed, and for a bug; 2 for bad input; 130 and 143 after Ctrl-C and SIGTERM.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from trimtab.cli import about, lab, options, runs
from trimtab.cli.options import BAD_INPUT, FAILED, INTERRUPTED

__all__ = ["COMMANDS", "about", "lab", "main", "options", "run", "runs"]

COMMANDS: dict[str, Callable[..., int]] = {
    "lab": lab.lab,
    "report": lab.report,
    "predict": lab.predict,
    "tune-seqlen": lab.tune_seqlen,
    "train": runs.train,
    "resume": runs.resume,
    "eval": runs.evaluate,
    "sample": runs.sample,
    "watch": runs.watch,
    "explain": runs.explain,
    "recipes": about.recipes,
    "schedule": about.schedule,
    "doctor": about.doctor,
}
BUG = "this is a bug in trimtab: please report it with this traceback at the project's issue tracker"


def main(words: Sequence[str] | None = None) -> NoReturn:
    """The `trimtab` command."""
    sys.exit(run(options.parse(COMMANDS, list(sys.argv[1:] if words is None else words))))


def run(call: Callable[[], int]) -> int:
    """Make a call; report its errors, and return the exit code."""
    try:
        return call()
    except KeyboardInterrupt:
        print("error: interrupted; nothing was saved", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return report_error(error)


def report_error(error: Exception) -> int:
    """Print an error in one line if the user or the machine caused it, otherwise as a bug; return the exit code."""
    from trimtab.train import ProcessLost

    if is_bad_input(error) or isinstance(error, OSError | ProcessLost):
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT if is_bad_input(error) else FAILED
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
