"""A study folder that version 0.1.0 left half-finished is continued, and refused with the reason if it cannot be."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.old import INTERRUPTED, unpack
from tests.train.runs import quiet
from trimtab.lab.executors import Job, Outcome
from trimtab.lab.executors.worker import work
from trimtab.lab.study import Study
from trimtab.lab.study_file import make_study
from trimtab.lab.sweep import sweep
from trimtab.runs import EventKind, RunError, RunFolder, read_json
from trimtab.train.config import differences

STUDY = {
    "name": "old",
    "subject": "gpt-lab",
    "question": "Does this recipe need qk-norm?",
    "sizes": ["1x16", "1x32"],
    "lrs": [1e-2, 1.0],
    "seeds": 1,
    "steps": 120,
    "arms": {"plain": [], "steadied": ["qk-norm", "z-loss=1e-4"]},
    "set": {"data.corpus": "text", "batch": 4, "model.context": 16, "eval_batches": 2},
}


class Here:
    """An executor that runs cells in this process: the corpus is relative to the current folder."""

    shared, slots = True, 1

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.ran: list[str] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def wait(self, timeout_s: float) -> list[Outcome]:
        self.ran += [job.name for job in self.jobs]
        jobs, self.jobs = self.jobs, []
        return [work(job) for job in jobs]

    def close(self) -> None:
        self.jobs.clear()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("old"))


@pytest.fixture
def half(archive, tmp_path, monkeypatch) -> Path:
    """A copy of the half-finished study; its corpus is beside it."""
    shutil.copytree(archive / "text", tmp_path / "text")
    shutil.copytree(archive / "half", tmp_path / "half")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "half"


def test_a_half_finished_study_is_continued(half):
    study, executor = make_study(STUDY), Here()
    complete = [cell.name for cell in study.cells() if RunFolder(half / cell.folder).complete]
    assert len(complete) == 3
    before = {name: RunFolder(half / "cells" / name).result.stat().st_mtime_ns for name in complete}
    summary = sweep(study, half, executor=executor, console=quiet())
    assert (summary.done, summary.reused, summary.failed) == (5, 3, [])
    assert {name: RunFolder(half / "cells" / name).result.stat().st_mtime_ns for name in complete} == before
    resumed = {
        name: any(event.kind == EventKind.RESUMED for event in RunFolder(half / "cells" / name).read_events())
        for name in executor.ran
    }
    # One cell continues from its checkpoint, the other four start anew.
    assert {name for name, is_resumed in resumed.items() if is_resumed} == {INTERRUPTED.removeprefix("half/cells/")}


def test_the_saved_study_is_the_same_in_both_formats(half):
    study = make_study(STUDY)
    saved = read_json(half / "study.json")
    assert saved is not None
    assert "end" in saved["base"]["schedule"]["seqlen"]
    assert Study.from_json(json.loads(json.dumps(study.to_json()))) == study
    old = Study.from_json(saved)
    assert old.identity() == study.identity()
    # Its runs were measured half as often and saved more often, and the recipe had another learning rate, which no cell
    # uses.
    assert (old.base.watch.every, study.base.watch.every) == (5, 2)
    assert {name for name, _, _ in differences(old.base, study.base)} == {"checkpoint_every", "optim.lr", "watch.every"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lrs": [1e-2, 0.1]}, r"holds another study: lrs is \[0.01, 1.0\] there and \[0.01, 0.1\] here"),
        ({"set": {**STUDY["set"], "batch": 8}}, "holds another study: base.batch is 4 there and 8 here"),
    ],
)
def test_another_study_is_refused_with_the_reason(half, changes, reason):
    with pytest.raises(RunError, match=reason):
        sweep(make_study(STUDY | changes), half, executor=Here(), console=quiet())


def test_a_switch_whose_meaning_depends_on_the_learning_rate_of_the_recipe_is_not_continued(half):
    study = make_study(STUDY | {"arms": {"coupled": ["coupled-decay"]}, "name": "coupled"})
    old = replace(study, base=replace(study.base, optim=replace(study.base.optim, lr=0.01)))
    (half / "study.json").write_text(json.dumps(old.to_json()))
    with pytest.raises(
        RunError, match=r"1x16/coupled/lr-0.01/seed-0.optim.weight_decay is 8.3\d* there and 2.7\d* here"
    ):
        sweep(study, half, executor=Here(), console=quiet())


def test_a_study_of_a_newer_version_is_refused_with_the_reason(half):
    saved = make_study(STUDY).to_json() | {"format": 99}
    (half / "study.json").write_text(json.dumps(saved))
    with pytest.raises(RunError, match="format 99, this version reads up to 2; upgrade trimtab"):
        sweep(make_study(STUDY), half, executor=Here(), console=quiet())
