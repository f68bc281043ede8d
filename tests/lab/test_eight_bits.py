"""The questions of the 8-bit paper at their smallest: each gives an answer, with figures and tables, within seconds."""

import json
import math
from dataclasses import replace

import pytest
import torch

from tests.lab.test_questions import PAPERS, findings_of
from trimtab.lab import classification
from trimtab.lab.executors.worker import run_cell
from trimtab.lab.interventions import apply
from trimtab.lab.questions.optimizers import (
    ablation,
    adagrad,
    eight_bits,
    eight_bits_classify,
    eight_bits_clip,
    eight_bits_long,
    eight_bits_sensitivity,
    embedding_parts,
    quantization_error,
    state_memory,
)
from trimtab.lab.questions.question import Evidence
from trimtab.lab.reproduce import answer_from
from trimtab.lab.subjects import open_subject
from trimtab.runs import replace_json
from trimtab.runs.folder import STUDY
from trimtab.train.build import build_optimizer

STUDIES = [
    module.QUESTION
    for module in (
        *(eight_bits, ablation, eight_bits_clip, eight_bits_classify, eight_bits_long, eight_bits_sensitivity),
        *(adagrad, embedding_parts),
    )
]


@pytest.mark.parametrize("question", STUDIES, ids=lambda question: question.name)
def test_a_few_steps_give_an_answer(question, tmp_path):
    fewer = {"eval_batches": 1, "watch.every": 0}
    if question.subject == "gpt-lab":
        fewer |= {"batch": 2, "model.context": 16}
    small = replace(question, steps=3, seeds=1, lrs=question.lrs[:1], fields=question.fields | fewer)
    study = small.study()
    for cell in study.cells():
        assert run_cell(tmp_path / cell.folder, cell.config)
    replace_json(tmp_path / STUDY, study.to_json())
    answer = answer_from(small, tmp_path)
    assert answer.checks
    assert all(check.evidence for check in answer.checks)
    assert {table.title for table in answer.tables} or question.figures


@pytest.mark.parametrize("question", STUDIES, ids=lambda question: question.name)
def test_figures_and_tables_show_the_runs_and_survive_without_them(question):
    study = question.study()
    full = Evidence(findings_of(study, PAPERS[question.name]), question.name)
    empty = Evidence(replace(full.findings, results=(), curves=()), question.name)
    for evidence in (full, empty):
        for figure in question.figures(evidence) if question.figures else ():
            lines = [line for panel in figure.panels for line in panel.lines]
            assert lines
            assert all(len(line.x) == len(line.y) for line in lines)
            assert all(line.x for line in lines) or evidence is empty
        for table in question.tables(evidence) if question.tables else ():
            assert all(len(row) == len(table.columns) for row in table.rows)


def test_the_table_of_the_ablation_has_the_shares_of_the_world():
    world = PAPERS["ablation"]
    found = Evidence(findings_of(ablation.QUESTION.study(), world), "ablation")
    (table,) = ablation.tables(found)
    rows = {row[0]: row for row in table.rows}
    assert rows["linear"][1:3] == (18, pytest.approx(100 * 2 / 3))
    assert rows["linear"][3] == pytest.approx(math.exp(3.5))
    assert rows["block-wise"][2:] == (0.0, pytest.approx(math.exp(2.01)), 0, 16.8)


def test_second_moments_become_zero_only_in_the_published_arms():
    for arm, flushes in (("published", True), ("8 bits", False)):
        config = open_subject("gpt-lab")
        for switch in eight_bits.ARMS[arm]:
            config = apply(config, switch)
        p = torch.nn.Linear(64, 64, bias=False)
        optimizer = build_optimizer(p, config.optim)
        gradient = torch.full((64, 64), 1e-6)
        gradient[0, 0] = 1.0
        for _ in range(2):
            p.weight.grad = gradient.clone()
            optimizer.step()
        state = optimizer.state_dict(format="portable")["state"][0]
        assert (state["exp_avg_sq"][1, 1].item() < 1e-20) is flushes


# --- Measurements


def test_the_state_is_counted_and_fits_the_paper():
    numbers = state_memory.measure(None)  # type: ignore[arg-type]
    checks = state_memory.QUESTION.answer(numbers)
    assert [check.passed for check in checks] == [True] * len(checks), checks
    tables = list(state_memory.tables(numbers))
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    # A world in which 8 bits save nothing.
    same = {name: found | {"bytes": 8.0} for name, found in numbers["state"].items()}
    needed = dict.fromkeys(("32", "8"), numbers["needed"]["32"])
    wrong = state_memory.QUESTION.answer({"state": same, "saved": 0.0, "needed": needed})
    assert [check.passed for check in wrong] == [False] * len(wrong)


def test_the_smallest_measurement_of_errors_gives_an_answer():
    numbers = {
        "training": quantization_error.measure_training(3, 1),
        "recursive": quantization_error.measure_recursive(2),
    }
    numbers = json.loads(json.dumps(numbers))
    checks = quantization_error.QUESTION.answer(numbers)
    assert all(check.passed is not None for check in checks)
    assert len(list(quantization_error.figures(numbers))) == 4
    assert all(len(row) == len(table.columns) for table in quantization_error.tables(numbers) for row in table.rows)


def errors(*sizes: float, plain: float = 9.0) -> dict:
    names = ("linear", "dynamic", "block-wise, 2048", "block-wise, 256", "Trimtab's default", "quantile")
    return {
        name: {"absolute": size, "relative": size, "plain mean": plain * size}
        for name, size in zip(names, sizes, strict=True)
    }


def test_the_claims_about_errors_follow_the_numbers():
    expected = {name: {"relative": relative} for name, (relative, _) in quantization_error.EXPECTED.items()}
    right = {"training": errors(5, 4, 3, 2, 1, 1), "recursive": expected}
    assert {check.passed for check in quantization_error.check(right)} == {True}
    alike = {name: {"relative": 1.0} for name in expected}
    wrong = {"training": errors(1, 2, 3, 4, 5, 1, plain=0.5), "recursive": alike}
    assert {check.passed for check in quantization_error.check(wrong)} == {False}


# --- The classification task


def test_windows_of_both_splits_do_not_overlap_and_are_those_of_their_module():
    train, held_out = (classification._split(split) for split in ("train", "validation"))
    for label, name in enumerate(classification.MODULES):
        whole, piece = classification._read(name), classification.PIECE
        pieces = [whole[i : i + piece] for i in range(0, len(whole), piece)]
        assert bytes(held_out[label].tolist()) == b"".join(pieces[4::5])
        assert len(train[label]) + len(held_out[label]) == len(whole)
    batch = next(classification.batches("validation", 0))
    for window, label in zip(batch["window"], batch["module"], strict=True):
        assert bytes(window.tolist()) in bytes(held_out[int(label)].tolist())


def test_batches_follow_from_split_and_seed():
    def first(split: str, seed: int) -> torch.Tensor:
        return next(classification.batches(split, seed))["module"]

    assert torch.equal(first("train", 3), first("train", 3))
    assert not torch.equal(first("train", 3), first("train", 4))
    assert not torch.equal(first("train", 3), first("validation", 3))


def test_an_untrained_classifier_guesses():
    model, batches, digest = classification.build(width=32, depth=1)
    loss = model(**next(batches("train", 0)))
    assert loss.item() == pytest.approx(math.log(len(classification.MODULES)), rel=0.3)
    assert len(digest) == 64
