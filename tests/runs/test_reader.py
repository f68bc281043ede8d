"""The reader of a run folder: it follows a growing file, skips broken lines, and needs no torch."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.runs.test_records import step_record
from trimtab.runs import (
    End,
    EventKind,
    Lines,
    Result,
    RunError,
    RunFolder,
    RunLog,
    read_lines,
    read_run,
    replace_json,
    require_json,
)
from trimtab.runs.reader import StepLog


def test_broken_lines_are_skipped_and_of_a_step_trained_twice_the_last_counts(tmp_path):
    text = '{"step": 1, "loss": 3.0}\nnot json\n{"step": 2, "loss": 2.0}\n{"step": 2, "loss": 5.0}\n[1]\n{"step": 3, "l'
    RunFolder(tmp_path).log.write_text(text)
    run = read_run(tmp_path)
    assert run.log.steps.tolist() == [1, 2]
    assert run.log.loss.tolist() == [3.0, 5.0]
    assert run.broken == 2
    assert np.isnan(run.log.rms_max).all()


def test_a_series_that_grows_keeps_its_columns_aligned():
    series = StepLog()
    series.add(2, [("a", 2.0)])
    assert series.column("a").tolist() == [2.0]
    series.add(3, [("b", 3.0)])
    series.add(1, [("a", 1.0), ("b", 9.0)])
    series.add(2, [("a", 5.0)])
    assert series.steps.tolist() == [1, 2, 3]
    np.testing.assert_equal(series.column("a"), [1.0, 5.0, np.nan])
    np.testing.assert_equal(series.column("b"), [9.0, np.nan, 3.0])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(RunError, match=r"holds no run \(there is no config.json\)"):
        RunFolder(tmp_path).require_config()
    RunFolder(tmp_path).config.write_text("[]")
    with pytest.raises(RunError, match="is damaged: it holds no JSON object"):
        RunFolder(tmp_path).require_config()


def test_a_growing_file_is_followed_and_a_truncated_one_read_again(tmp_path):
    path = tmp_path / "lines"
    lines = Lines(path)
    assert list(lines.read()) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(lines.read()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert list(lines.read()) == [{"step": 2}]
    assert list(lines.read()) == []
    path.write_text('{"step": 1}\n')
    assert list(lines.read()) == [{"step": 1}]
    assert lines.broken == 0


def test_a_log_that_must_be_intact_is_refused_if_it_is_not(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"step": 1}\nnot json\n')
    with pytest.raises(RunError, match="has a line that is not a JSON object: b'not json"):
        list(read_lines(path))


def test_truncation_removes_the_later_steps_and_the_result(tmp_path):
    log, folder = RunLog(tmp_path), RunFolder(tmp_path)
    for step in range(1, 6):
        log.step(step_record(step))
    folder.result.write_text("{}")
    log.truncate(3)
    assert [line["step"] for line in read_lines(folder.log)] == [1, 2, 3]
    assert not folder.complete
    log.step(step_record(4))
    log.close()
    assert folder.read_last_step() == step_record(4).to_json()


def test_an_unfinished_line_is_removed_by_the_next_writer(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log.write_text(json.dumps(step_record(1).to_json()) + '\n{"step": 2, "lo')
    log = RunLog(tmp_path)
    log.step(step_record(2))
    log.close()
    assert [line["step"] for line in read_lines(folder.log)] == [1, 2]


# --- Formats


def write_config(folder: RunFolder, **changes: object) -> None:
    RunLog(folder.path).create({"kind": "gpt"}, sha256="abc", params=7, torch="2")
    replace_json(folder.config, require_json(folder.config) | changes)


def test_the_config_is_read_as_it_was_written(tmp_path):
    folder = RunFolder(tmp_path / "run")
    write_config(folder)
    saved = folder.require_config()
    assert (saved.format, saved.config, saved.sha256, saved.params) == (2, {"kind": "gpt"}, "abc", 7)
    assert saved.versions["torch"] == "2"


def test_a_newer_format_is_read_for_reports_and_refused_for_the_rest(tmp_path):
    folder = RunFolder(tmp_path / "run")
    write_config(folder, format=3)
    log = RunLog(folder.path)
    log.step(step_record(1))
    log.close()
    run = read_run(folder.path)
    assert run.config is not None
    assert run.config.newer
    assert run.log.steps.tolist() == [1]
    message = r"written by a newer Trimtab \(format 3, this version reads up to 2\).*cannot be resumed or loaded"
    with pytest.raises(RunError, match=message):
        folder.require_config()


@pytest.mark.parametrize("format", [None, "2", 2.5])
def test_a_config_without_a_format_number_has_format_1(tmp_path, format):
    folder = RunFolder(tmp_path / "run")
    write_config(folder, format=format)
    assert folder.require_config().format == 1


def test_reading_a_run_needs_no_torch(tmp_path):
    log = RunLog(tmp_path)
    log.step(step_record(1))
    log.close()
    code = f"import sys, trimtab.runs; trimtab.runs.read_run({str(tmp_path)!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "events.jsonl"])
def test_one_changed_digit_of_a_complete_run_is_found(tmp_path, name):
    log, folder = RunLog(tmp_path / "run"), RunFolder(tmp_path / "run")
    log.create({"kind": "gpt", "seed": 1}, sha256="abc", params=7, torch="2")
    log.step(step_record(1))
    log.event(EventKind.EVALUATED, step=1, loss=2.0)
    log.finish(Result(why=End.DONE, step=1))
    assert folder.intact
    path = folder.path / name
    path.write_text(path.read_text().replace("1", "3", 1))
    assert not folder.intact
    assert folder.damage() == (f"{name} is not what the run wrote: its sha256 differs",)
    assert read_run(folder.path).damage == folder.damage()
