"""Random command lines: whatever is typed ends in a result or in one line that says what is wrong.

Real commands on a real run. Only the work itself is left out: training steps, the cells of a study, the self-test.
"""

import functools
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_faults import Inline, call
from tests.train.runs import quiet, tiny, write_words
from trimtab import cli
from trimtab.data.sources import find_files
from trimtab.lab import executors
from trimtab.recipes import RECIPES, gpt_tiny
from trimtab.runs import RunError
from trimtab.train import loop, train
from trimtab.train.config import flatten, to_json

NUMBERS = ("0", "1", "2", "-1", "0.1", "nan", "inf", "-inf", "1e400", "1e-400", "9e18", "99999999999999999999", "1_0")
WORDS = ("", " ", "None", "true", "off", "[/red]", "\x1b[31mred", "é☃", "\udcff", "{}", "[1", "-", "'", "=", "a" * 5000)
PLACES = ("../..", "/", "/dev/null", "/dev/full", "~nobody/x", "s3://b/x", "os:system", "no.such:thing", "nowhere", ".")
SUBJECTS = ("gpt-tiny", "clip-tiny", "gpt-lab", *sorted(RECIPES)[:3], "gpt-tinny", "RUN", "RUN/config.json", "STUDY")
FIELDS = [f"--{name.replace('_', '-')}" for name in flatten(to_json(gpt_tiny())) if name != "kind"]
ODD = st.sampled_from([*NUMBERS, *WORDS, *PLACES, *SUBJECTS])
RARE = ("doctor",)  # only its options: the self-test takes seconds


@functools.cache
def options_of(command: str) -> list[str]:
    parameters = inspect.signature(cli.COMMANDS[command]).parameters
    own = [f"--{name.replace('_', '-')}" for name in parameters if name not in ("fields", "command")]
    return own + (FIELDS if "fields" in parameters else []) or ["--all"]


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from([*cli.COMMANDS]))
    words = [command, *draw(st.lists(st.sampled_from(SUBJECTS) | ODD, max_size=2))]
    known = st.sampled_from(options_of(command))
    invented = known.map(lambda name: name + "x") | st.sampled_from(["--", "--=", "-x", "--help", "-h", "--no-force"])
    for _ in range(draw(st.integers(1 if command in RARE else 0, 3))):
        option, values = draw(known | known | known | invented), draw(st.lists(ODD, max_size=2))
        words += [f"{option}={values[0]}"] if values and draw(st.booleans()) else [option, *values]
    return words


class Left(RunError):
    """In place of the work."""


def leave_out(*_: Any, **__: Any) -> Any:
    raise Left("the work is left out")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, deep enough for ../.. to stay inside of it."""
    folder = tmp_path_factory.mktemp("fuzz") / "a" / "b" / "c"
    folder.mkdir(parents=True)
    config = tiny(folder, steps=2, eval_every=2, checkpoint_every=2, eval_batches=1)
    train(config, folder / "RUN", console=quiet())
    write_words(folder / "words.txt")
    return folder


def assert_answered(words: list[str]) -> None:
    done = call(*words)
    assert "Traceback" not in done.err + done.out, (words, done.err)
    assert done.code in (0, 1, 2), (words, done)
    if done.code and not done.out.startswith("usage: "):
        assert re.fullmatch(r"error: [^\n]+\n", done.err), (words, done)
    assert "\x1b" not in done.err, words


def fuzz(place: Path, examples: int) -> int:
    count = 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(command_lines())
    def check(words: list[str]) -> None:
        nonlocal count
        count += 1
        assert_answered(words)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setattr(loop._Run, "run", leave_out)
        patch.setattr(import_module("trimtab.lab.sweep"), "sweep", leave_out)
        patch.setattr(import_module("trimtab.lab.reproduce"), "sweep", leave_out)
        patch.setattr(import_module("trimtab.lab.tune_seqlen"), "run_cell", leave_out)
        patch.setattr(executors, "make_executor", lambda *_: Inline())
        # The standard library takes seconds to read.
        patch.setattr("trimtab.data.corpus.find_stdlib", lambda: find_files(place / "words.txt"))
        check()
    return count


def test_some_random_command_lines_are_answered(place, record_property):
    count = fuzz(place, 60)
    assert count >= 50
    record_property("command lines", count)


@pytest.mark.slow
def test_many_random_command_lines_are_answered(place, record_property):
    count = fuzz(place, 600)
    assert count >= 500
    record_property("command lines", count)
