"""Folders are read in any state; what cannot be used becomes a status or a note, not an exception."""

import json
import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.runs import ARMS, Numbers, grid, planted, write_failures, write_run, write_study
from trimtab.analysis.findings import Findings, Note, Result, clean, read
from trimtab.analysis.results import SNAPSHOT
from trimtab.lab.study import Cell
from trimtab.runs import RunError

SMALL = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,))


def only(findings: Findings, lr: float = 0.1) -> Result:
    (result,) = [result for result in findings.results if result.lr == lr]
    return result


def damaged(folder: Path, damage: Callable[[Path], None], **numbers: object) -> Result:
    """The result of a cell of a study after its folder was damaged."""
    write_study(folder, SMALL, lambda _: replace(Numbers(), **numbers))  # type: ignore[arg-type]
    damage(folder / SMALL.cells()[1].folder)
    return only(read([folder]))


def test_a_result_has_the_numbers_of_its_files(tmp_path: Path) -> None:
    write_study(tmp_path, SMALL, lambda _: Numbers(loss=2.5, first=5.9, logit=40.0, grad_rms=1e-4, logz=6.0))
    result = only(read([tmp_path]))
    assert (result.status, result.why, result.kind, result.study) == ("done", "done", "gpt", "planted")
    assert (result.size, result.params, result.depth, result.width) == ("2x16", 6144, 2, 16)
    assert (result.loss, result.first, result.score, result.eps) == (2.5, 5.9, 2.5, 1e-8)
    assert (result.steps, result.planned, result.tokens) == (100, 100, 102_400)
    assert [step for step, _ in result.evaluations] == [0, 25, 50, 75, 100]
    assert result.logit_max == pytest.approx(40.0)
    assert result.logit_step == SNAPSHOT[1] * 100
    assert result.grad_rms == pytest.approx(1e-4)
    assert (result.out_rms, result.logz[-1], len(result.logits)) == (2.5, (100, 6.0), 50)
    assert (result.outs, result.lengths[-1], result.cosines[-1]) == ((1.5, 2.5), (100, 16.0), (100, 0.1))
    assert not result.bounded


def test_updates_without_decay_are_in_units_of_the_learning_rate(tmp_path: Path) -> None:
    config = SMALL.cells()[1].config
    lr, weight = config.optim.lr, 0.2  # the size of the weights in the planted runs
    for number, (independent, share) in enumerate(((True, 0.3), (False, 0.3 / lr))):  # 0.3 of the weights per step
        optim = replace(config.optim, independent_decay=independent, weight_decay=share)
        result = read([write_run(tmp_path / str(number), replace(config, optim=optim))]).results[0]
        assert result.delta_rms == pytest.approx(math.sqrt(lr**2 - (0.3 * weight) ** 2) / lr)


def test_the_first_matrix_of_a_block_is_that_of_the_model_and_not_of_the_alphabet(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL.cells()[1].config)
    lines = [json.loads(line) for line in (folder / "signals.jsonl").read_text().splitlines()]
    for line in lines:
        parts = ("attention.qkv", "mlp.up", "mlp.down")
        names = [f"blocks.{block}.{part}.weight" for block in (10, 2) for part in parts]
        line["tensors"] = {name: {"grad_rms": float(i)} for i, name in enumerate(names, start=1)}
    (folder / "signals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").unlink()  # it has the checksum of the signals
    result = read([folder]).results[0]
    assert (result.qkv_grad_rms, result.grad_rms) == (4.0, 5.0)


def test_lengths_are_those_of_the_layer_with_the_largest_logit(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL.cells()[1].config, logit=8.0)
    lines = [json.loads(line) for line in (folder / "signals.jsonl").read_text().splitlines()]
    for line in lines[25:]:
        line["layers"]["transformer.blocks.1.attention"] |= {"logit_max": 9.0, "q_norm": 6.0, "cosine": -0.2}
    (folder / "signals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = read([folder]).results[0]
    assert [value for _, value in result.lengths] == [16.0] * 25 + [24.0] * 25
    assert [value for _, value in result.cosines] == [0.1] * 25 + [-0.2] * 25


def test_the_snapshot_is_the_mean_of_early_records(tmp_path: Path) -> None:
    config = replace(SMALL.cells()[1].config, steps=200)
    folder = write_run(tmp_path / "run", config, logit=8.0)
    lines = [json.loads(line) for line in (folder / "signals.jsonl").read_text().splitlines()]
    for line, logit in zip(lines, [*[2.0] * 3, 4.0, 8.0, 16.0, 32.0, 64.0, *[1e6] * 92], strict=True):
        line["layers"]["transformer.blocks.0.attention"]["logit_max"] = logit
    (folder / "signals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = read([folder]).results[0]
    assert (result.logit_max, result.logit_step) == (pytest.approx(16.0), 16)
    assert result.logits[-1] == (200, 1e6)


def test_a_run_that_stopped_before_the_snapshot_uses_its_last_record(tmp_path: Path) -> None:
    config = replace(SMALL.cells()[1].config, steps=1000)
    folder = write_run(tmp_path / "run", config, logit=300.0, why="not finite")
    lines = (folder / "signals.jsonl").read_text().splitlines(keepends=True)
    (folder / "signals.jsonl").write_text("".join(lines[:3]))
    result = read([folder]).results[0]
    assert (result.status, result.logit_max, result.logit_step) == ("stopped", pytest.approx(300.0), 6)
    assert result.loss == math.inf


@pytest.mark.parametrize("why", ["diverged", "not finite"])
def test_a_run_that_was_stopped_has_no_final_loss(tmp_path: Path, why: str) -> None:
    result = damaged(tmp_path, lambda _: None, why=why)
    assert (result.status, result.why, result.loss, result.score) == ("stopped", why, math.inf, result.first)


def test_a_run_that_ended_without_a_finite_loss_scores_the_first(tmp_path: Path) -> None:
    result = damaged(tmp_path, lambda _: None, loss=math.nan)
    assert (result.status, result.loss, result.score) == ("done", math.inf, result.first)


def test_a_run_under_way_is_running(tmp_path: Path) -> None:
    result = damaged(tmp_path, lambda _: None, until=37)
    assert (result.status, result.steps, result.planned) == ("running", 37, 100)
    assert math.isnan(result.loss)
    assert math.isnan(result.score)


def _cut(folder: Path) -> None:
    for name in ("log", "signals", "events"):
        path = folder / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[:-7])
    (folder / "result.json").unlink()


def _not_json(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text("{half")

    return damage


def _all_null(folder: Path) -> None:
    facts = json.loads((folder / "config.json").read_text())
    facts["config"] |= {"model": None, "optim": [], "seed": "x", "steps": None}
    (folder / "config.json").write_text(json.dumps(facts | {"versions": 3, "sha256": None, "params": "many"}))


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_text("")


def _folder_for_a_file(folder: Path) -> None:
    (folder / "log.jsonl").unlink()
    (folder / "log.jsonl").mkdir()


def _gone(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("damage", "status", "why"),
    [
        (_cut, "running", ""),
        (_gone, "missing", ""),
        (_empty, "unreadable", "config.json is damaged: it is not JSON"),
        (_not_json("config.json"), "unreadable", "config.json is damaged: it is not JSON"),
        (_not_json("result.json"), "unreadable", "result.json is damaged: it is not JSON"),
        (_folder_for_a_file, "unreadable", "Is a directory"),
        (_all_null, "unreadable", "config.json is of another cell"),
        (lambda folder: (folder / "config.json").unlink(), "unreadable", "there is no config.json"),
    ],
)
def test_damage_is_a_status_and_a_note(tmp_path: Path, damage: Callable[[Path], None], status: str, why: str) -> None:
    result = damaged(tmp_path, damage)
    assert result.status == status
    assert why in result.why
    findings = read([tmp_path])
    assert len(findings.curves) == 1
    assert Note(kind=status, count=1, of=2, items=(result.name,)) in findings.notes


def _with_leaves(data: Any, value: Any) -> Any:
    """The same JSON with another value wherever there was a number."""
    if isinstance(data, dict):
        return {key: _with_leaves(item, value) for key, item in data.items()}
    if isinstance(data, list):
        return [_with_leaves(item, value) for item in data]
    return value if isinstance(data, int | float) and not isinstance(data, bool) else data


@pytest.mark.parametrize("file", ["config.json", "result.json", "log.jsonl", "signals.jsonl", "events.jsonl"])
def test_no_number_makes_reading_fail(tmp_path: Path, file: str) -> None:
    write_study(tmp_path, SMALL, lambda _: Numbers())
    path = tmp_path / SMALL.cells()[1].folder / file
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    values: list[Any] = [None, 0, -1, 10**30, 1e308, -1e308, math.nan, math.inf, True, "x", [], {}]
    for value in values:
        path.write_text("".join(json.dumps(_with_leaves(line, value)) + "\n" for line in lines))
        findings = read([tmp_path])
        json.dumps(clean(findings), allow_nan=False)
        assert len(findings.results) == 2


def test_broken_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
        (folder / "log.jsonl").write_text("".join([*lines[:50], "not json\n", "[1]\n", *lines[50:]]))

    assert damaged(tmp_path, damage).broken == 2
    assert Note(kind="broken lines", count=1, of=2) in read([tmp_path]).notes


def test_evaluations_that_a_resume_discarded_do_not_count(tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        events = [{"event": "evaluated", "step": step, "loss": loss} for step, loss in ((0, 5.0), (50, 3.0), (75, 9.0))]
        events += [{"event": "resumed", "step": 50}, {"event": "evaluated", "step": 60, "loss": 2.5}]
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    result = damaged(tmp_path, damage)
    assert result.evaluations == ((0, 5.0), (50, 3.0), (60, 2.5))
    assert result.loss == 2.5


def test_a_failed_cell_has_its_error_and_a_retried_one_has_not(tmp_path: Path) -> None:
    first, second = (cell.name for cell in SMALL.cells())
    write_study(tmp_path, SMALL, lambda cell: Numbers() if cell.lr == 0.01 else None)
    write_failures(tmp_path, [(first, "worker lost"), (second, "ValueError: no such corpus")])
    findings = read([tmp_path])
    assert [result.status for result in findings.results] == ["done", "failed"]
    assert only(findings).why == "ValueError: no such corpus"
    assert Note(kind="failed", count=1, of=2, items=(second,)) in findings.notes


def test_a_cell_that_is_tried_again_is_running(tmp_path: Path) -> None:
    write_study(tmp_path, SMALL, lambda _: Numbers(until=20))
    write_failures(tmp_path, [(SMALL.cells()[1].name, "worker lost")], at=time.time() - 60)
    assert only(read([tmp_path])).status == "running"
    write_failures(tmp_path, [(SMALL.cells()[1].name, "worker lost")], at=time.time() + 60)
    assert only(read([tmp_path])).status == "failed"


def test_without_a_finished_run_there_are_results_and_no_curves(tmp_path: Path) -> None:
    findings = read([write_study(tmp_path, SMALL, lambda _: None)])
    assert (findings.curves, findings.forecasts) == ((), ())


def test_nothing_at_all_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere is not a folder"):
        read([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty holds no study and no run"):
        read([tmp_path / "empty"])
    with pytest.raises(RunError, match=r"no folder was given"):
        read([])


def test_a_folder_that_is_not_there_is_a_note_beside_one_that_is(tmp_path: Path) -> None:
    findings = read([write_study(tmp_path / "study", SMALL), tmp_path / "nowhere"])
    assert len(findings.results) == 2
    assert Note(kind="not a folder", where=str(tmp_path / "nowhere")) in findings.notes


def test_loose_runs_become_arms_by_what_their_configs_do_not_share(tmp_path: Path) -> None:
    study = grid(sizes=("2x16", "2x32"), lrs=(0.01, 0.1), seeds=(0,))
    for i, cell in enumerate(study.cells()):
        write_run(tmp_path / "runs" / f"run-{i}", cell.config, planted(cell))
    findings = read([tmp_path / "runs"])
    assert {result.arm for result in findings.results} == {"qk_norm=off, z_loss=0.0", "qk_norm=shared, z_loss=0.0001"}
    assert {result.size for result in findings.results} == {"2x16", "2x32"}
    assert len(findings.curves) == 4
    assert {result.bounded for result in findings.results} == {True, False}


def test_a_folder_above_a_study_and_a_study_given_twice_are_read_once(tmp_path: Path) -> None:
    write_study(tmp_path / "study", SMALL)
    assert len(read([tmp_path, tmp_path]).results) == 2
    assert read([tmp_path]).studies[0].name == "planted"


def test_two_studies_of_the_same_name_are_distinguished(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_study(tmp_path / name, SMALL)
    findings = read([tmp_path / "a", tmp_path / "b"])
    assert len({source.name for source in findings.studies}) == 2
    assert len(findings.curves) == 2


def test_mixed_corpora_versions_and_steps_are_noted(tmp_path: Path) -> None:
    def numbers(cell: Cell) -> Numbers:
        return Numbers() if cell.lr == 0.1 else Numbers(sha256="b" * 64, versions={"trimtab": "9", "torch": "0.1"})

    write_study(tmp_path, SMALL, numbers)
    path = tmp_path / SMALL.cells()[0].folder / "config.json"
    facts = json.loads(path.read_text())
    facts["config"]["steps"] = 50
    path.write_text(json.dumps(facts))
    mixed = {note.where: note.count for note in read([tmp_path]).notes if note.kind == "mixed"}
    kinds = ("corpora (sha256)", "lengths in steps", "versions of trimtab", "versions of torch")
    assert mixed == dict.fromkeys(kinds, 2)


def test_an_unreadable_study_is_read_as_loose_runs(tmp_path: Path) -> None:
    write_study(tmp_path, SMALL)
    (tmp_path / "study.json").write_text('{"name": "x", "cells"')
    findings = read([tmp_path])
    assert len(findings.results) == 2
    assert Note(kind="bad study", where=str(tmp_path / "study.json")) in findings.notes


def test_a_cell_of_a_study_that_is_not_one_is_left_out(tmp_path: Path) -> None:
    write_study(tmp_path, SMALL)
    data = json.loads((tmp_path / "study.json").read_text())
    data["cells"] += [None, {"name": "x"}, {"name": "y", "lr": "fast", "seed": 0}]
    (tmp_path / "study.json").write_text(json.dumps(data))
    findings = read([tmp_path])
    assert len(findings.results) == 2
    assert Note(kind="bad cells", where=str(tmp_path / "study.json"), count=3) in findings.notes


def test_training_curves_are_thinned(tmp_path: Path) -> None:
    config = replace(SMALL.cells()[0].config, steps=2500)
    result = read([write_run(tmp_path / "run", config)]).results[0]
    assert 200 <= len(result.losses) <= 400
    assert (result.losses[0][0], result.losses[-1][0]) == (1, 2500)


def test_sixty_runs_of_500_steps_are_read_in_seconds(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=range(5), steps=500)
    write_study(tmp_path, study)
    read([tmp_path])
    started = time.process_time()
    read([tmp_path])
    assert (time.process_time() - started) * 6 < 6  # 3 s on a quiet machine, twice that on a busy one


def test_a_damaged_count_of_parameters_is_no_count(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL.cells()[0].config)
    text = (folder / "config.json").read_text()
    for wrong in ("-5", "0", "1e400", '"many"'):
        (folder / "config.json").write_text(re.sub(r'"params": \d+', f'"params": {wrong}', text))
        assert read([folder]).results[0].params != -5


def test_a_cell_outside_of_its_study_is_not_read(tmp_path):
    study = grid(lrs=(0.01, 0.1), seeds=(0,), sizes=("2x16",))
    write_study(tmp_path / "other", study)
    write_study(tmp_path / "mine", study)
    first, second, *_ = study.cells()
    folder = tmp_path / "mine" / first.folder
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path / "other" / first.folder)
    data = json.loads((tmp_path / "mine" / "study.json").read_text())
    data["cells"][1]["folder"] = f"../other/{second.folder.as_posix()}"
    data["cells"][2]["folder"] = "\0"
    (tmp_path / "mine" / "study.json").write_text(json.dumps(data))
    findings = read([tmp_path / "mine"])
    assert len(findings.results) == len(study.cells()) - 3
    assert Note(kind="bad cells", where=str(tmp_path / "mine" / "study.json"), count=3) in findings.notes
