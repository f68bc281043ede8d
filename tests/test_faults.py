"""Damage: every file of a run, a study and a cache, damaged in every way, under every command.

The commands run in this process, as the command line calls them. In each case:

    no traceback            an error is one line, with exit code 1 or 2, and everything stays as it was
    nothing lost            readers change nothing; what `resume` and `lab` complete is the undamaged run, bit for bit
    no silent difference    the output is that of the undamaged files, or it says what is damaged

Processes that are killed are in tests/train/test_faults.py and tests/lab/test_sweep.py.
"""

import functools
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.lab.sweeps import numbers
from tests.train.runs import assert_same_run, quiet, tiny, tiny_clip
from trimtab import cli
from trimtab.lab import executors
from trimtab.lab.executors import Job, Outcome
from trimtab.lab.executors.worker import work
from trimtab.lab.study_file import read_study
from trimtab.runs import replace_json, require_json
from trimtab.runs.files import sha256_of
from trimtab.train import train
from trimtab.train.config import WatchConfig

STEPS = 4
LAST = f"checkpoints/step-{STEPS:08d}"
RUN_FILES = ("config.json", "log.jsonl", "signals.jsonl", "events.jsonl", "result.json")
CHECKPOINT = (
    f"{LAST}/manifest.json",
    f"{LAST}/state.json",
    f"{LAST}/model.safetensors",
    f"{LAST}/optimizer.safetensors",
)
SAYS = re.compile("damaged|not as the run wrote it|cannot be read|could not be read|not finished|cells were not run")


class Done(NamedTuple):
    code: int
    out: str
    err: str


def call(*words: str) -> Done:
    """A command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main(words)
    return Done(int(end.value.code or 0), out.getvalue(), err.getvalue())


def assert_clean(done: Done, case: str) -> None:
    assert "Traceback" not in done.err, f"{case}: {done.err}"
    assert done.code in (0, 1, 2), case
    if done.code:
        assert re.fullmatch(r"error: [^\n]+\n", done.err), f"{case}: {done.err!r}"


@pytest.fixture(autouse=True, scope="module")
def _small_pages() -> Iterator[None]:
    """Pages without the five megabytes of plotly: hundreds of them are written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "")
        yield


# --- Damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]  # a digit stays a digit: the hardest case
    place = digits[len(digits) // 2] if digits and path.suffix.startswith(".json") else len(data) // 2
    data[place] ^= 1
    path.write_bytes(data)


def replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flip,
    "deleted": Path.unlink,
    "a folder": lambda path: replace(path, Path.mkdir),
}
MORE_DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a list": lambda path: path.write_text("[1]\n"),
    "a link in a circle": lambda path: replace(path, lambda link: link.symlink_to(link.name)),
    "a number": lambda path: path.write_text("3\n"),
    "null": lambda path: path.write_text("null\n"),
    "an empty object": lambda path: path.write_text("{}\n"),
    "deep nesting": lambda path: path.write_text('{"config":' * 100_000),
    "a pipe": lambda path: replace(path, os.mkfifo),
}


@pytest.fixture(params=[DAMAGES, pytest.param(MORE_DAMAGES, marks=pytest.mark.slow)], ids=["four", "more"])
def damages(request: pytest.FixtureRequest) -> dict[str, Callable[[Path], Any]]:
    return request.param


def look(folder: Path) -> dict[str, Any]:
    """Everything in a folder; links and pipes as they are."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else os.lstat(path).st_mode
        for path in sorted(folder.rglob("*"))
    }


@dataclass
class Table:
    """The cases of one kind of folder: its files x damages. `folder` is made anew for each case."""

    pristine: Path
    folder: Path
    files: tuple[str, ...]

    def cases(self, damages: dict[str, Callable[[Path], Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
        for file, damage in itertools.product(self.files, damages):
            self.renew()
            damages[damage](self.folder / file)
            yield f"{file}: {damage}", look(self.folder)

    def renew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.pristine, self.folder, symlinks=True)


def check_readers(table: Table, damages: dict[str, Callable[[Path], Any]], *words: str) -> int:
    """A command that only reads, on every case: it refuses, says what is damaged, or is not affected. Counts them."""
    table.renew()
    usual, count = call(*words), 0
    assert usual.code == 0, usual
    for case, before in table.cases(damages):
        done = call(*words)
        assert_clean(done, case)
        assert done.code or done.out == usual.out or SAYS.search(done.out), f"{case}: silent difference\n{done.out}"
        assert look(table.folder) == before, case
        count += 1
    return count


# --- A run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder = tmp_path_factory.mktemp("run")
    often = WatchConfig(every=2, deep_every=2, record_every=2)
    config = tiny(folder, steps=STEPS, eval_every=2, checkpoint_every=2, eval_batches=1, watch=often)
    train(config, folder / "pristine", console=quiet())
    return Table(folder / "pristine", folder / "run", RUN_FILES + CHECKPOINT)


READERS: dict[str, tuple[str, ...]] = {
    "eval": ("--batches", "1"),
    "sample": ("--tokens", "3"),
    "watch": ("--once",),
    "explain": (),
    "report": ("--out", "page.html"),
    "predict": ("--params", "1e6"),
}


@pytest.mark.parametrize("command", READERS)
def test_a_damaged_run_is_refused_or_reported_and_stays_as_it_is(
    run, damages, command, tmp_path, monkeypatch, record_property
):
    monkeypatch.chdir(tmp_path)
    record_property("damaged files", check_readers(run, damages, command, str(run.folder), *READERS[command]))


def test_a_damaged_run_is_resumed_exactly_or_refused_and_left_as_it_is(run, damages, record_property):
    codes = {0: 0, 1: 0, 2: 0}
    for case, before in run.cases(damages):
        done = call("resume", str(run.folder))
        assert_clean(done, case)
        codes[done.code] += 1
        # A complete run is not continued, so a damaged checkpoint stays as it is.
        if look(run.folder) != before:
            assert done.code == 0, case
            assert_same_run(run.folder, run.pristine, STEPS)
    assert codes[0] > 0
    assert codes[2] > 0
    assert codes[1] == 0
    record_property("damaged files", sum(codes.values()))


def test_an_unfinished_run_is_resumed_exactly_or_refused_and_left_as_it_is(run, damages, record_property):
    """The same, for a run that was killed after its first checkpoint."""
    first = "checkpoints/step-00000002"
    files = ("config.json", "log.jsonl", "events.jsonl", *(f"{first}/{Path(name).name}" for name in CHECKPOINT))
    resumed, count = 0, 0
    for file, damage in itertools.product(files, damages):
        run.renew()
        (run.folder / "result.json").unlink()
        shutil.rmtree(run.folder / LAST)
        damages[damage](run.folder / file)
        before = look(run.folder)
        done = call("resume", str(run.folder))
        assert_clean(done, f"{file}: {damage}")
        if done.code:
            assert look(run.folder) == before, f"{file}: {damage}"
        else:
            assert_same_run(run.folder, run.pristine, STEPS)
            resumed += 1
        count += 1
    assert resumed < count
    record_property("damaged files", count)


# --- A state that somebody has made


def find_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    children = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, child in children:
        yield from find_places(child, (*place, key)) if len(place) < 4 else ()


@pytest.mark.parametrize(
    "shapes", [("text", 10**30), pytest.param(([], None, {}, -3, 1e300), marks=pytest.mark.slow)], ids=["two", "more"]
)
def test_a_state_of_another_shape_with_the_right_hashes_is_no_bug(run, shapes, record_property):
    folder, count = run.folder / "checkpoints" / "step-00000002", 0
    state = json.loads((run.pristine / "checkpoints" / "step-00000002" / "state.json").read_text())
    for place, shape in itertools.product(find_places(state), shapes):
        run.renew()
        changed = {"": json.loads(json.dumps(state))}
        inner = functools.reduce(lambda value, key: value[key], ("", *place)[:-1], changed)
        inner[("", *place)[-1]] = shape
        (folder / "state.json").write_text(json.dumps(changed[""]))
        manifest = require_json(folder / "manifest.json")
        size, sha256 = (folder / "state.json").stat().st_size, sha256_of(folder / "state.json")
        manifest["files"]["state.json"] = {"bytes": size, "sha256": sha256}
        replace_json(folder / "manifest.json", manifest)
        before = look(run.folder)
        done = call("resume", str(run.folder), "--step", "2")
        assert "Traceback" not in done.err, f"{place}: {shape!r}: {done.err}"
        if done.code == 2:  # otherwise it trains, perhaps to a bad end
            assert_clean(done, f"{place}: {shape!r}")
            assert look(run.folder) == before, f"{place}: {shape!r}"
        count += 1
    record_property("damaged files", count)


# --- A study


class Inline:
    """An executor that runs each cell at once, in this process."""

    shared, slots = True, 1

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def submit(self, job: Job) -> None:
        with redirect_stderr(io.StringIO()):  # as a worker writes it to its own log
            self.outcomes.append(work(job))

    def wait(self, timeout_s: float) -> list[Outcome]:
        found, self.outcomes = self.outcomes, []
        return found

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    folder = tmp_path_factory.mktemp("study")
    data = tiny(folder).data
    settings = f'"data.corpus" = "{data.corpus}"\n"data.cache" = "{data.cache}"\neval_batches = 1\nthreads = 1\n'
    settings += '"model.context" = 16\nbatch = 2\n"watch.record_every" = 2\n'
    text = f'steps = {STEPS}\nseeds = 1\nsizes = ["1x16"]\nlrs = [0.01, 0.1]\n[arms]\nplain = []\n[set]\n{settings}'
    (folder / "mine.toml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "make_executor", lambda *_: Inline())
        out = folder / "study"
        assert call("lab", "--config", str(folder / "mine.toml"), "--out", str(out)).code == 0
        (out / "failures.jsonl").write_text('{"cell": "other", "attempt": 1, "error": "none", "time": 0}\n')
        assert call("report", str(out)).code == 0
        out.rename(folder / "pristine")
        cell = "cells/1x16/plain/lr-0.01/seed-0"
        beside = ("study.json", "failures.jsonl", "report.html", "findings.json", "cells.csv")
        last = next(path.name for path in (folder / "pristine" / cell / "checkpoints").iterdir())
        files = (*beside, *(f"{cell}/{name}" for name in (*RUN_FILES, f"checkpoints/{last}/manifest.json")))
        yield Table(folder / "pristine", out, files)


@pytest.mark.parametrize("command", ["report", "predict"])
def test_a_damaged_study_is_reported_with_a_note_or_refused(study, damages, command, record_property):
    options = ("--params", "1e6") if command == "predict" else ("--out", str(study.folder.parent / "page.html"))
    record_property("damaged files", check_readers(study, damages, command, str(study.folder), *options))


def test_a_damaged_study_is_completed_exactly_or_refused_and_left_as_it_is(study, damages, record_property):
    toml = study.folder.parent / "mine.toml"
    cells = read_study(toml)
    expected, count = numbers(cells, study.pristine), 0
    for case, before in study.cases(damages):
        done = call("lab", "--config", str(toml), "--out", str(study.folder))
        assert_clean(done, case)
        if done.code == 2:
            assert look(study.folder) == before, case
        else:
            assert numbers(cells, study.folder) == expected, f"{case}: {done}"
        assert done.code == 0 or "cells/" not in case, f"{case}: {done.err}"  # the damage of a cell is repaired
        count += 1
    record_property("damaged files", count)


# --- The cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """The cache of a text and of pairs, and a run of each."""
    folder = tmp_path_factory.mktemp("cache")
    for name, config in (("text", tiny(folder, steps=2)), ("pairs", tiny_clip(folder, steps=2))):
        train(config, folder / name, console=quiet())
    (folder / "cache").rename(folder / "pristine")
    files = tuple(str(path.relative_to(folder / "pristine")) for path in (folder / "pristine").rglob("*"))
    kept = [name for name in files if name.endswith((".json", ".bin", ".npy"))]
    assert len(kept) == 7, kept
    return Table(folder / "pristine", folder / "cache", tuple(kept))


def test_a_damaged_cache_is_made_again(cache, damages, record_property):
    folder, count = cache.folder.parent, 0
    cache.renew()
    usual = {name: call("eval", str(folder / name), "--batches", "1") for name in ("text", "pairs")}
    assert [done.code for done in usual.values()] == [0, 0]
    for case, _ in cache.cases(damages):
        name = "pairs" if case.startswith("pairs") else "text"
        assert call("eval", str(folder / name), "--batches", "1") == usual[name], case
        count += 1
    record_property("damaged files", count)
