"""`trimtab lab` and its neighbours, as somebody types them."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.analysis.runs import Numbers, grid, write_study
from tests.test_cli import call
from tests.train.runs import write_words
from trimtab.lab.study import Study
from trimtab.runs import End, lock_folder

SMALL = ("--sizes", "1x16", "2x16", "--lrs", "0.01", "0.1", "--arms", "plain", "qk-norm+z-loss", "--seeds", "1")


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study file over words made up here, eight cells of a few steps."""
    words = write_words(tmp_path / "words.txt")
    settings = f'"data.corpus" = "{words}"\n"data.cache" = "{tmp_path / "cache"}"\neval_batches = 1\n'
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nquestion = "Does <it> hold?"\nsteps = 20\n[set]\n{settings}')
    return path


def test_a_study_ends_with_the_verdict_and_the_page_and_is_not_run_twice(tmp_path, study, capsys):
    out = tmp_path / "out"
    words = ("lab", "--config", str(study), *SMALL, "--out", str(out))
    code, told, _ = call(capsys, *words)
    assert code == 0
    assert "8 runs" in told
    assert "[8/8]" in told
    assert f"the page: {out / 'report.html'}" in told
    page = (out / "report.html").read_text()
    assert "trimtab lab --config" in page
    assert "Does &lt;it&gt; hold?" in page
    times = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert len(times) == 8
    assert call(capsys, *words)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("result.json")} == times
    code, _, complaint = call(capsys, *words, "--steps", "30")
    assert code == 2
    assert "another study" in complaint or "different" in complaint, complaint


def test_questions_switches_and_subjects_are_listed(capsys):
    code, told, _ = call(capsys, "lab", "--list")
    assert code == 0
    assert all(word in told for word in ("qk-norm", "z-loss", "switchback", "seqlen-warmup", "gpt-lab", "min)"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--quick", "--study", "kappa"), "--quick and --study are different studies"),
        (("--study", "kapa"), "Did you mean 'kappa'?"),
        (("gpt-tiny", "--study", "kappa"), "--study and --config have their own subject"),
        (("gpt-tinny",), "Did you mean 'gpt-tiny'?"),
        (("--config", "nowhere.toml"), "nowhere.toml"),
        (("--arms", "qk-nrom"), "Did you mean 'qk-norm'?"),
        (("--sizes", "big"), "'big' is neither depth x width nor a ladder"),
        (("--seeds", "0"), "has no seeds"),
        (("--steps", "0"), "--steps 0 is too few"),
        (("--lrs", "-1"), "is not a learning rate"),
        (("--lrs", "1e300"), "is not a learning rate"),
        (("--workers", "0"), "--workers 0 is too few"),
        (("--minutes", "0"), "--minutes 0 is not a time; try --minutes 60"),
        (("--minutes", "nan"), "--minutes nan is not a time"),
        (("gpt-tiny", "--minutes", "0.5"), "the limit is 0.5 min; try fewer --steps, --seeds or --lrs, or --minutes"),
        (("gpt2-117m", "--sizes", "joint"), "the limit is 90 min; try --sizes joint:3 (61 min), or --minutes"),
        (("--study", "kappa", "--minutes", "1"), "and the limit is 1 min; try"),
        (("tests.lab.own_model:build", "--minutes", "5"), "--minutes is for recipes"),
        (("--executor", "slurm"), "slurm"),
        (("nobody:nothing",), "nobody"),
        (("--lr", "0.1"), "Did you mean '--lrs'?"),
    ],
)
def test_an_impossible_study_costs_nothing_and_is_refused_in_one_line(words, complaint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = call(capsys, "lab", *words)
    assert code == 2
    assert complaint in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_data_that_cannot_be_opened_is_reported_once_and_before_any_run(tmp_path, study, capsys):
    study.write_text(study.read_text().replace("words.txt", "nowhere.txt"))
    code, told, error = call(capsys, "lab", "--config", str(study), *SMALL, "--out", str(tmp_path / "out"))
    assert (code, error.count("\n")) == (2, 1)
    assert "nowhere.txt" in error
    assert "failed" not in told
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_is_too_large_is_scaled_down_and_the_page_says_so(tmp_path, monkeypatch, capsys):
    ran: list[Study] = []
    monkeypatch.setattr("trimtab.cli.lab._prepare_data", lambda study: None)
    monkeypatch.setattr("trimtab.cli.lab._sweep", lambda study, *_, **__: ran.append(study) or Stopped())
    code, told, _ = call(capsys, "lab", "gpt2-117m", "--out", str(tmp_path / "out"))
    assert code == 130
    assert "Scaled down to fit: batch 4096 -> 16, context 1024 -> 64" in told.splitlines()[0]
    assert {(cell.config.batch, cell.config.model.context) for cell in ran[0].cells()} == {(16, 64)}
    write_study(tmp_path / "page", replace(ran[0], sizes=ran[0].sizes[:1]), lambda cell: Numbers())
    assert call(capsys, "report", str(tmp_path / "page"))[0] == 0
    assert "Scaled down to fit: batch 4096" in (tmp_path / "page" / "report.html").read_text()


class Stopped:
    stopped = End.INTERRUPTED


def test_the_page_is_made_again_from_the_files_alone(tmp_path, capsys):
    write_study(tmp_path / "a", grid())
    code, told, _ = call(capsys, "report", str(tmp_path / "a"), "--out", str(tmp_path / "page.html"))
    assert code == 0
    assert "Plain fails above learning rate 0.03" in told
    assert (tmp_path / "page.html").exists()


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    for words in (("report", str(tmp_path)), ("report",), ("predict", str(tmp_path / "none"), "--params", "1e9")):
        code, _, error = call(capsys, *words)
        assert code == 2
        assert error.startswith("error: ")


def test_one_size_is_predicted_in_words_and_as_json(tmp_path, capsys):
    write_study(tmp_path / "a", grid())
    code, told, _ = call(capsys, "predict", str(tmp_path / "a"), "--params", "1e6", "--lr", "0.1")
    assert code == 0
    assert "1M parameters" in told
    code, told, _ = call(capsys, "predict", str(tmp_path / "a"), "--params", "1e6", "--lr", "0.1", "--json")
    assert json.loads(told)["outcome"] == "fails"
    code, _, error = call(capsys, "predict", str(tmp_path / "a"), "--params", "-1")
    assert code == 2
    assert "must be a number above zero" in error


def test_tuning_says_what_it_takes_and_refuses_what_it_cannot(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "tune-seqlen", "--help")[0] == 0
    for words in (("clip-tiny",), ("gpt-lab", "--limit", "x"), ("gpt-lab", "--multiples", "1.5")):
        code, _, error = call(capsys, "tune-seqlen", *words)
        assert code == 2
        assert error.count("\n") == 1


# --- Files of others


OURS = ("report.html", "findings.json", "cells.csv", "curves.csv", "fits.csv")


def test_a_folder_of_somebody_else_is_left_alone(tmp_path, study, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    code, _, complaint = call(capsys, "lab", "--config", str(study), *SMALL, "--out", str(out))
    assert (code, [path.name for path in out.iterdir()]) == (2, ["thesis.tex"])
    assert f"{out} holds thesis.tex and no study.json, so it is not ours; use an empty folder" in complaint


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("command", ["lab", "report", "report --out"])
def test_a_page_of_somebody_else_is_not_replaced(tmp_path, study, capsys, command, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    runs = write_study(tmp_path / "runs", grid(lrs=(0.01, 0.1), seeds=(0,)))
    words = {
        "lab": ("lab", "--config", str(study), *SMALL, "--out", str(out)),
        "report": ("report", str(out)),
        "report --out": ("report", str(runs), "--out", str(out)),
    }[command]
    if command == "report":  # a folder of runs that has another report.html
        shutil.copytree(runs / "cells", out / "runs")
    code, _, complaint = call(capsys, *words)
    assert code == 2, complaint
    assert "was not written with this page" in complaint or "so it is not ours" in complaint
    assert (out / name).read_text() == "mine"


@pytest.mark.parametrize("name", OURS)
def test_a_link_in_place_of_a_page_is_not_followed(tmp_path, capsys, name):
    runs, mine = write_study(tmp_path / "runs", grid(lrs=(0.01, 0.1), seeds=(0,))), tmp_path / "mine"
    mine.write_text("mine")
    (runs / name).symlink_to(mine)
    code, _, complaint = call(capsys, "report", str(runs))
    assert (code, mine.read_text()) == (2, "mine")
    assert f"{runs / name} is a link or not a file" in complaint


def test_a_page_of_ours_is_replaced(tmp_path, capsys):
    runs = write_study(tmp_path / "runs", grid(lrs=(0.01, 0.1), seeds=(0,)))
    pages = tmp_path / "pages"
    for _ in range(2):
        assert call(capsys, "report", str(runs), "--out", str(pages))[0] == 0
        assert {path.name for path in pages.iterdir()} == {*OURS}
        (pages / "findings.json").unlink()  # as if killed after the page
    assert call(capsys, "report", str(runs), "--out", str(pages / "other.html"))[0] == 2  # its numbers are of the first


def test_predict_prints_its_notes(tmp_path, capsys):
    runs = write_study(tmp_path / "runs", grid(lrs=(0.01, 0.1), seeds=(0,)))
    cell = next(runs.glob("cells/**/config.json"))
    cell.write_text("{")
    words = ("predict", str(runs), "--params", "1e9")
    assert "note: 1 of 12 cells cannot be read" in call(capsys, *words)[1]
    assert "1 of 12 cells cannot be read" in json.loads(call(capsys, *words, "--json")[1])["notes"][0]


def test_files_in_the_current_folder_do_not_replace_modules(tmp_path, study):
    for module in ("random", "json", "torch", "numpy", "worker", "msgspec", "trimtab"):
        (tmp_path / f"{module}.py").write_text(f"open('harm-{module}', 'w')\nraise SystemExit('{module}')\n")
    command = Path(sys.executable).with_name("trimtab")
    words = ["lab", "--config", str(study), "--sizes", "1x16", "--lrs", "0.01", "--arms", "plain", "--seeds", "1"]
    done = subprocess.run([command, *words, "--steps", "2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("harm-*"))


# --- Tuning


def test_two_searches_do_not_use_one_folder(tmp_path, capsys):
    words = ["tune-seqlen", "gpt-tiny", "--data.corpus", str(write_words(tmp_path / "words.txt"))]
    words += ["--data.cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    with lock_folder(tmp_path / "out"):
        code, _, complaint = call(capsys, *words)
    assert code == 2
    assert "is in use by process" in complaint
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    code, _, complaint = call(capsys, *words)
    assert code == 2
    assert "holds notes.txt and no trials" in complaint
