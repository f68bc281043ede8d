"""Studies and runs that version 0.1.0 wrote give the numbers that it computed."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.runs.old import unpack
from trimtab.analysis import predict_size, read
from trimtab.analysis.findings import Status
from trimtab.report import prediction_words, verdict_words, write_report
from trimtab.report.explain import explain
from trimtab.report.files import to_json

WORDS = {"why", "folder", "verdict", "notes"}  # sentences, and where the study was
# Fits and forecasts have other rules since 0.2: what fails, the horizon, the uncertainty.
CHANGED = {"failing_lr", "critical", "forecasts", "fits"}
# Those of the first MLP matrix were those of the second, which comes first in the alphabet.
CHANGED |= {"grad_rms", "update_rms"}


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("old"))


def same(old: Any, new: Any) -> bool:
    """Whether all numbers and names of the old JSON are in the new one."""
    if isinstance(old, dict):
        return all(key in WORDS | CHANGED or same(value, new[key]) for key, value in old.items())
    if isinstance(old, list):
        return len(old) == len(new) and all(same(a, b) for a, b in zip(old, new, strict=True))
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=1e-9)
    return bool(old == new)


def number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def test_the_findings_of_an_old_study_are_the_same(v1: Path) -> None:
    old = json.loads((v1 / "study" / "findings.json").read_text())
    assert len(old["results"]) > 3
    assert same(old, to_json(read([v1 / "study"])))


def test_the_tables_of_an_old_study_have_the_same_columns_and_numbers(v1: Path, tmp_path: Path) -> None:
    write_report(read([v1 / "study"]), tmp_path)
    for name in ("cells.csv", "curves.csv"):
        old, new = (
            list(csv.DictReader((folder / name).read_text().splitlines())) for folder in (v1 / "study", tmp_path)
        )
        assert set(old[0]) <= set(new[0])
        for a, b in zip(old, new, strict=True):
            assert all(same(number(a[key]), number(b[key])) for key in a if key not in WORDS | CHANGED)


def test_an_old_study_that_was_stopped_is_read_with_its_missing_cells(v1: Path) -> None:
    findings = read([v1 / "half"])
    states = {status: sum(result.status == status for result in findings.results) for status in Status}
    assert states[Status.MISSING] > 0
    assert states[Status.DONE] > 0
    assert {note.kind: note.count for note in findings.notes}["missing"] == states[Status.MISSING]
    assert any("have no result" in sentence for sentence in verdict_words(findings))


def test_an_old_study_predicts_a_size_and_an_old_run_is_explained(v1: Path) -> None:
    assert prediction_words(predict_size(read([v1 / "study"]), 1e6))
    found = explain(v1 / "run")
    assert "ended: done" in found.summary
    assert str(found)
