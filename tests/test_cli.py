"""The command line, as a person types it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.train.runs import write_words
from trimtab import cli
from trimtab.ops import backends, doctor
from trimtab.recipes import gpt_tiny
from trimtab.train.config import flatten, to_json


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trimtab", *words], capture_output=True, text=True)


def test_doctor_names_every_op_and_is_well():
    result = run("doctor")
    assert result.returncode == 0, result.stdout
    for op in backends.OPS:
        assert op in result.stdout
    assert "ok every op matches its reference" in result.stdout
    assert torch.__version__ in result.stdout


def test_every_op_has_a_check():
    assert doctor.CHECKS.keys() == backends.OPS.keys()


def test_doctor_finds_a_wrong_kernel(monkeypatch, capsys):
    assert backends.native is not None

    class Wrong:
        """The native module with a quantizer that does nothing."""

        def __getattr__(self, name: str) -> object:
            return (lambda *_: None) if name == "quantize" else getattr(native, name)

    native = backends.native
    monkeypatch.setattr(backends, "native", Wrong())
    assert cli.about.doctor() == 1
    assert "broken quantize_blockwise on cpu does not agree with its reference" in capsys.readouterr().out


def test_doctor_says_what_is_missing_without_kernels(monkeypatch, capsys):
    monkeypatch.setattr(backends, "native_missing", "not built: no C++ compiler was found")
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert cli.about.doctor() == 0
    assert "missing native CPU kernels: not built: no C++ compiler was found" in capsys.readouterr().out
    # With a compiler at hand, kernels that are not there are a fault and not a choice.
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    assert cli.about.doctor() == 1
    assert "broken native CPU kernels" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--help"]])
def test_help_is_given(words):
    result = run(*words)
    assert result.returncode == 0
    assert "doctor" in result.stdout


def test_unknown_words_are_refused():
    result = run("docter")
    assert result.returncode == 2
    assert (
        result.stderr == "error: unknown command 'docter'. Did you mean 'doctor'? `trimtab --help` lists the commands\n"
    )
    assert result.stdout == ""


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["resume", "--help"], ["recipes"]])
def test_help_answers_at_once(words):
    # A second is the promise, on a machine that does nothing else; the best of three is nearly that.
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        assert run(*words).returncode == 0
        times.append(time.perf_counter() - begun)
    assert min(times) < 1


@pytest.mark.parametrize("words", [[], ["train"], ["resume"], ["schedule"]])
def test_nothing_to_do_is_answered_with_the_usage(words):
    result = run(*words)
    assert result.returncode == 2
    assert "usage: trimtab" in result.stdout


# --- Runs


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The command in this process: its exit code, and what it wrote."""
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    out, err = capsys.readouterr()
    code = end.value.code
    assert isinstance(code, int)
    return code, out, err


def assert_refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """One clear line, exit code 2; returns the line."""
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert "help" not in err or "--help lists the options" in err, err  # tyro's box has a foot, and a head
    assert "---" not in err, err
    return err.removeprefix("error: ").rstrip("\n")


@pytest.fixture
def small(tmp_path, monkeypatch) -> list[str]:
    """Words that make gpt-tiny tiny. What is written without --out is written here."""
    monkeypatch.chdir(tmp_path)
    text = write_words(tmp_path / "words.txt")
    words = ["--data.corpus", str(text), "--data.cache", str(tmp_path / "cache"), "--threads", "1"]
    words += ["--model.depth", "1", "--model.width", "32", "--model.heads", "2", "--model.context", "32"]
    return [*words, "--schedule.seqlen.start", "8", "--batch", "4", "--steps", "6", "--schedule.lr.warmup", "2"]


def test_a_run_from_training_to_text(capsys, small, tmp_path):
    code, out, _ = call(capsys, "train", "gpt-tiny", *small, "--checkpoint-every", "3")
    assert code == 0
    assert "step 6  validation loss" in out
    assert "done: 6 steps" in out
    assert "the run is in runs/gpt-tiny" in out
    config = json.loads((tmp_path / "runs/gpt-tiny/config.json").read_text())["config"]
    assert (config["model"]["width"], config["batch"], config["model"]["context"]) == (32, 4, 32)
    assert call(capsys, "train", "gpt-tiny", *small)[0] == 0
    assert (tmp_path / "runs/gpt-tiny-2/result.json").exists()
    code, out, _ = call(capsys, "resume", "runs/gpt-tiny", "--step", "3", "--log-every=2")
    assert code == 0
    assert "resumed at step 3" in out
    code, out, _ = call(capsys, "eval", "runs/gpt-tiny", "--batches", "2")
    assert code == 0
    assert "perplexity" in out
    code, out, _ = call(capsys, "sample", "runs/gpt-tiny", "--tokens", "5", "--prompt", "abc")
    assert code == 0
    assert out.startswith("abc")


def test_the_schedule_is_printed_and_drawn(capsys, tmp_path):
    code, out, _ = call(capsys, "schedule", "gpt-tiny", "--steps", "300", "--svg", str(tmp_path / "plan.svg"))
    assert code == 0
    assert "300 steps" in out
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_recipes_are_listed_with_what_they_are(capsys):
    from trimtab.recipes import RECIPES

    out = call(capsys, "recipes")[1]
    assert [line.split()[0] for line in out.splitlines()] == list(RECIPES)
    assert "Needs 'trimtab[clip]'" in out


def test_every_field_of_a_recipe_has_an_option(capsys):
    code, out, _ = call(capsys, "train", "gpt-tiny", "--help")
    assert code == 0
    for option in flatten(to_json(gpt_tiny())):
        assert option == "kind" or f"--{option.replace('_', '-')} " in out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--optim.learning-rate", "--optim.lr"),
        ("--lr", "--optim.lr"),
        ("--optim.beta", "--optim.betas"),
        ("--model.widht=64", "--model.width"),
        ("--model.qk_nrom", "--model.qk-norm"),
        ("--width", "--model.width"),
        ("--stesp", "--steps"),
        ("--sched.lr.warmup", "--schedule.lr.warmup"),
        ("--schedule.seqlen.strat", "--schedule.seqlen.start"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_the_one_that_was_meant(capsys, tmp_path, typed, meant):
    said = assert_refused(capsys, "train", "gpt-tiny", "--out", str(tmp_path / "run"), typed, "3")
    assert said == f"unrecognized option {typed.split('=')[0]}. Did you mean '{meant}'?"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps"], "missing value for --steps"),
        (["--optim.lr", "fast"], "optim.lr='fast' is not a finite number"),
        (["--optim.name", "adamm"], "optim.name='adamm' is not known; try one of"),
        (["--optim.lr", "-1"], "optim.lr=-1.0 must be above zero"),
        (["--model.width", "33"], "width=33 does not split into heads=2; try width="),
        (["--autocast", "float16"], "autocast='float16' is not known; try one of 'off', 'bfloat16'"),
        (["--micro-batch", "3"], "micro_batch=3 does not divide batch=4"),
        (["stray"], "unexpected 'stray' after --schedule.lr.warmup 2"),
        (["--schedule.seqlen.end", "16"], "it is always model.context. Set model.context instead"),
        (["--zzzzzzzz", "1"], "unrecognized option --zzzzzzzz; --help lists the options"),
        (["--data.corpus", "nowhere"], "no corpus at nowhere"),
        (["--data.corpus", "empty.txt"], "empty.txt"),
        (["--data.corpus", "binary.txt"], "binary.txt"),
        (["--data.corpus", "short.txt"], "shorter than one window of context=32"),
        (["--data.tokenizer", "words"], "words"),
        (["--model.vocab", "256"], "model.vocab=256 is too small for the 257 tokens"),
        (["--data.corpus", "big.bin"], "is too small for the 60001 tokens of big.bin"),
        (["--schedule.lr.warmup", "100", "--schedule.lr.decay-unit", "steps"], "ends before warmup=100"),
        (["--optim.betas", "0.9", "1.5"], "beta"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_written(capsys, small, tmp_path, words, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "short.txt").write_text("brief")
    (tmp_path / "big.bin").write_bytes(b"\x60\xea" * 5000)  # token 60,000, in two bytes each
    assert message in assert_refused(capsys, "train", "gpt-tiny", *small, *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "gpt-tyni"], "unknown recipe 'gpt-tyni'. Did you mean 'gpt-tiny'?"),
        (["train", "--steps", "3"], "the recipe comes first"),
        (["train", "gpt-tiny", "--out"], "Missing value for argument '--out'"),
        (["schedule", "gpt3"], "unknown recipe 'gpt3'. Did you mean 'gpt3-125m'?"),
        (["resume", "nowhere"], "nowhere holds no run"),
        (["resume", "nowhere", "--step", "x"], "--step: 'x' is not INT"),
        (["eval", "nowhere"], "nowhere holds no run"),
        (["eval"], "Missing"),
        (["sample", "nowhere", "--temprature", "1"], "Did you mean '--temperature'?"),
        (["doctor", "--fix"], "unrecognized option --fix"),
        (["recipes", "--all"], "unrecognized option --all"),
    ],
)
def test_other_commands_refuse_in_one_line_too(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in assert_refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten_nor_changed_without_force(capsys, small):
    assert call(capsys, "train", "gpt-tiny", *small, "--out=here")[0] == 0
    assert "here already holds a run; `trimtab resume here`" in assert_refused(
        capsys, "train", "gpt-tiny", *small, "--out", "here"
    )
    assert "optim.lr was 0.003 and is now 0.01" in assert_refused(capsys, "resume", "here", "--optim.lr", "0.01")
    assert "--step: 'x' is not INT" in assert_refused(capsys, "resume", "here", "--step", "x")
    assert "there is no checkpoint of step 5; there are 6" in assert_refused(capsys, "resume", "here", "--step", "5")
    assert call(capsys, "resume", "here", "--force", "--steps", "8")[0] == 0
    assert json.loads(Path("here/result.json").read_text())["step"] == 8


def test_a_run_that_diverges_ends_with_exit_code_1(capsys, small):
    words = ["--diverged-at", "0.01", "--eval-every", "1"]
    code, out, _ = call(capsys, "train", "gpt-tiny", *small, *words)
    assert code == 1
    assert "diverged: 2 steps" in out


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_refusal_is_one_line_whatever_the_terminal_can_draw(tmp_path, encoding):
    words = ["train", "gpt-tiny", "--out", str(tmp_path / "run"), "--autocast", "float16"]
    result = subprocess.run(
        [sys.executable, "-m", "trimtab", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "40"},
    )
    assert result.returncode == 2
    expected = "autocast='float16' is not known; try one of 'off', 'bfloat16'"
    assert result.stderr == f"error: {expected}\n"


# --- Errors of the user, and bugs


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken() -> int:
        raise error

    monkeypatch.setattr(cli, "COMMANDS", cli.COMMANDS | {"recipes": broken})


@pytest.mark.parametrize("error", [TypeError("unexpected None"), KeyError("lr"), ValueError("shapes (2,) (3,)")])
def test_a_bug_is_reported_with_its_traceback(capsys, monkeypatch, error):
    fail(monkeypatch, error)  # also a ValueError, if no check of Trimtab raised it
    code, out, err = call(capsys, "recipes")
    assert (code, out) == (1, "")
    assert err.startswith("Traceback (most recent call last)")
    assert "in broken" in err
    assert err.endswith(f"{cli.BUG}\n")


def test_a_value_error_of_a_library_inside_trimtab_is_a_bug(capsys, monkeypatch):
    monkeypatch.setattr(cli.options, "list_recipes", lambda: int("many"))
    monkeypatch.setattr(cli.about, "list_recipes", lambda: int("many"))
    code, _, err = call(capsys, "recipes")
    assert code == 1
    assert "invalid literal for int()" in err
    assert err.endswith(f"{cli.BUG}\n")


def test_what_a_check_refuses_is_one_line(capsys, tmp_path):
    (tmp_path / "plan.svg").mkdir()
    message = assert_refused(capsys, "sample", str(tmp_path))
    assert message.startswith(f"{tmp_path} holds no run")


def test_what_the_machine_refuses_is_one_line_with_exit_code_1(capsys, tmp_path):
    code, _, err = call(capsys, "schedule", "gpt-tiny", "--svg", str(tmp_path))
    assert code == 1
    assert err.count("\n") == 1
    assert "Is a directory" in err


def test_analyze_counts_loss_ratios_and_correlates_them_with_the_variance(capsys, small, tmp_path):
    assert (
        call(
            capsys,
            "train",
            "gpt-tiny",
            *small,
            "--watch.deep-every",
            "1",
            "--watch.record-every",
            "1",
            "--watch.every",
            "1",
        )[0]
        == 0
    )
    folders = [str(path.parent) for path in tmp_path.rglob("result.json")]
    code, out, _ = call(capsys, "analyze", *folders)
    assert code == 0
    assert "loss ratio: " in out
    assert "loss ratio and var_l1: Pearson" in out
    assert "var_max " in out
    assert_refused(capsys, "analyze")
