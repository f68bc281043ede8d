"""Around the edge of stability a study gets a learning rate between two of the grid, then seeds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.analysis.runs import Numbers, grid, write_run
from tests.lab.sweeps import run_quietly
from tests.lab.test_extend import Invented
from tests.test_cli import call
from trimtab.analysis.findings import read
from trimtab.lab.executors import Job, Outcome
from trimtab.lab.refine import ROUNDS, SEEDS, refine
from trimtab.lab.study import Extra, Study
from trimtab.runs import RunError
from trimtab.train.config import from_json

LRS = (0.01, 0.03, 0.1, 0.3)


class Cliff(Invented):
    """An executor that writes runs whose loss rises above one learning rate."""

    def __init__(self, edge: float) -> None:
        super().__init__({})
        self.edge = edge

    def wait(self, timeout_s: float) -> list[Outcome]:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            write_run(Path(job.folder), config := from_json(job.config), self.numbers(job, config.optim.lr))
            self.ran.append(job.name)
        return [Outcome(job.name, "complete") for job in jobs]

    def numbers(self, job: Job, lr: float) -> Numbers:
        loss = 2.0 + 0.1 * abs(lr / 0.03 - 1) / 10 if lr < self.edge else 3.0
        return Numbers(loss=loss + 0.001 * from_json(job.config).seed)


def study_of(**changes: object) -> Study:
    study = grid(sizes=("1x16",), lrs=LRS, arms=grid().arms[:1], seeds=(0,), steps=40)
    return replace(study, **({"refined": True} | changes))


def follow(folder: Path, edge: float) -> list[list[Extra]]:
    """The runs that each round adds, until there are none."""
    rounds, study = list[list[Extra]](), study_of()
    while True:
        run_quietly(study, folder, Cliff(edge))
        more = refine(study, read([folder]).curves)
        if more is study:
            return rounds
        rounds.append([*more.extra[len(study.extra) :]])
        study = more


def test_first_a_learning_rate_between_two_then_seeds_on_both_sides(tmp_path):
    middle, seeds = follow(tmp_path, edge=0.08)
    assert middle == [Extra("1x16", "plain", 0.055, 0)]
    assert {(x.lr, x.seed) for x in seeds} == {(0.055, 1), (0.055, 2), (0.1, 1), (0.1, 2)}
    (curve,) = read([tmp_path]).curves
    assert (curve.lrs, curve.seeds) == ((0.01, 0.03, 0.055, 0.1, 0.3), (1, 1, 3, 3, 1))
    assert 0.055 < curve.edge < 0.1


def test_there_are_few_rounds(tmp_path):
    for edge in (0.02, 0.04, 0.08, 0.2):
        assert len(follow(tmp_path / str(edge), edge)) <= ROUNDS


def test_without_a_failure_nothing_is_added(tmp_path):
    assert follow(tmp_path, edge=10.0) == []


def test_sensitivity_is_that_of_the_grid_alone(tmp_path):
    run_quietly(study_of(), tmp_path / "grid", Cliff(0.08))
    follow(tmp_path / "refined", edge=0.08)
    before, after = (read([tmp_path / name]).curves[0] for name in ("grid", "refined"))
    assert after.sensitivity == pytest.approx(before.sensitivity, abs=0.001)  # seeds change a mean
    assert len(after.lrs) == len(before.lrs) + 1


def test_added_runs_are_saved_and_continued(tmp_path):
    more = Extra("1x16", "plain", 0.055, 2)
    run_quietly(study_of(extra=(more,)), tmp_path, Cliff(0.08))
    saved = json.loads((tmp_path / "study.json").read_text())
    assert [cell["name"] for cell in saved["cells"] if cell.get("extra")] == ["1x16/plain/lr-0.055/seed-2"]
    assert Study.from_json(saved).extra == (more,)
    again = run_quietly(study_of(), tmp_path, executor := Cliff(0.08))
    assert (again.study.extra, executor.ran) == ((more,), [])


def test_a_size_can_be_added_to_a_study(tmp_path):
    run_quietly(study_of(), tmp_path, Cliff(0.08))
    larger = replace(study_of(), sizes=grid(sizes=("1x16", "1x32")).sizes)
    summary = run_quietly(larger, tmp_path, Cliff(0.08))
    assert (summary.done, summary.reused) == (4, 4)
    with pytest.raises(RunError, match="holds another study: sizes"):
        run_quietly(replace(study_of(), sizes=grid(sizes=("1x32",)).sizes), tmp_path, Cliff(0.08))


def test_the_command_refines_and_continues_where_it_stopped(tmp_path, monkeypatch, capsys):
    made = list[Cliff]()

    def make(*_: object) -> Cliff:
        made.append(Cliff(0.08))
        return made[-1]

    monkeypatch.setattr("trimtab.lab.executors.make_executor", make)
    words = ("lab", "--sizes", "1x16", "--steps", "40", "--arms", "plain", "--out", str(tmp_path / "out"))
    code, told, _ = call(capsys, *words)
    assert code == 0
    assert "around the edge of stability: 1 more runs" in told
    assert "around the edge of stability: 4 more runs" in told
    assert sum(len(executor.ran) for executor in made) == 7 + 1 + 2 * (SEEDS - 1)
    made.clear()
    assert call(capsys, *words)[0] == 0
    assert not any(executor.ran for executor in made)
    made.clear()
    assert call(capsys, *words[:-1], str(tmp_path / "fixed"), "--seeds", "2")[0] == 0
    assert sum(len(executor.ran) for executor in made) == 14  # the seeds are given: nothing is added
