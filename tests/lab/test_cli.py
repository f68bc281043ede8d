"""`trimtab lab` and its neighbours, as somebody types them."""

import json
from pathlib import Path

import pytest

from tests.analysis.runs import grid, write_study
from tests.test_cli import call
from tests.train.runs import write_words

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


def test_the_page_is_made_again_from_the_files_alone(tmp_path, capsys):
    write_study(tmp_path / "a", grid())
    code, told, _ = call(capsys, "report", str(tmp_path / "a"), "--out", str(tmp_path / "page.html"))
    assert code == 0
    assert "Plain diverges at learning rate 0.1" in told
    assert (tmp_path / "page.html").exists()


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    for words in (("report", str(tmp_path)), ("report",), ("predict", str(tmp_path / "none"), "--params", "1e9")):
        code, _, error = call(capsys, *words)
        assert code == 2
        assert error.startswith("error: ")


def test_one_size_is_predicted_in_words_and_as_json(tmp_path, capsys):
    write_study(tmp_path / "a", grid())
    code, told, _ = call(capsys, "predict", str(tmp_path / "a"), "--params", "1e7", "--lr", "0.1")
    assert code == 0
    assert "10M parameters" in told
    code, told, _ = call(capsys, "predict", str(tmp_path / "a"), "--params", "1e7", "--lr", "0.1", "--json")
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
