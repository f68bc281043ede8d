"""The loop: a resume changes nothing, the four clocks agree with the plan, faults are detected."""

import functools
import itertools
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import (
    BATCH,
    CONTEXT,
    assert_same_run,
    hashes,
    quiet,
    read_events,
    read_log,
    tiny,
    tiny_clip,
    trajectory,
    write_words,
)
from trimtab.nn import ConfigError
from trimtab.schedule import LearningRate
from trimtab.train import (
    BatchConfig,
    OptimConfig,
    RunError,
    evaluate,
    load_run,
    loop,
    resume,
    sample,
    train,
)
from trimtab.train.build import build_task
from trimtab.train.compilations import count_shapes
from trimtab.train.config import WatchConfig, load_config
from trimtab.train.evaluate import zero_shot
from trimtab.train.plan import simulate
from trimtab.train.processes import Processes

GROWS = BatchConfig(start=2, increment=2, samples=12)


def go(config: Any, folder: Path) -> dict[str, Any]:
    return train(config, folder, console=quiet())


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run)]


def changed_task(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Every run from now on has another loss or evaluation: `name=function(original)`."""
    real = loop.build_task

    def build(*args: Any) -> Any:
        task = real(*args)
        return replace(task, **{name: change(getattr(task, name)) for name, change in changes.items()})

    monkeypatch.setattr(loop, "build_task", build)


# --- Exact resumes

RUNS = {
    "plain": tiny,
    "accumulated": functools.partial(tiny, micro_batch=2),
    "longer and longer": functools.partial(tiny, start=8),
    "larger and larger": functools.partial(tiny, grows=GROWS),
    "both at once, in parts": functools.partial(tiny, grows=GROWS, micro_batch=1),
    "32 bits": functools.partial(tiny, optim=OptimConfig(name="adamw", bits=32, lr=3e-3)),
    "torch's own": functools.partial(tiny, optim=OptimConfig(name="torch-adamw", bits=32, lr=3e-3)),
    "lion": functools.partial(tiny, optim=OptimConfig(name="lion", lr=3e-4)),
    "moving beta2": functools.partial(tiny, optim=OptimConfig(beta2_power=0.5, lr=3e-3)),
    "bfloat16": functools.partial(tiny, autocast="bfloat16"),
    "clip": tiny_clip,
}


@pytest.mark.parametrize("name", RUNS)
def test_resuming_from_a_checkpoint_changes_nothing(tmp_path, name):
    config = RUNS[name](tmp_path)
    go(config, tmp_path / "whole")
    middle = config.checkpoint_every
    broken = shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    assert resume(broken, step=middle, console=quiet())["step"] == config.steps
    assert read_events(broken, "resumed")[0]["step"] == middle
    assert_same_run(broken, tmp_path / "whole", config.steps)


def test_two_runs_from_one_seed_are_one_run_and_another_seed_is_another(tmp_path):
    config = tiny(tmp_path, steps=4)
    go(config, tmp_path / "a")
    go(config, tmp_path / "b")
    go(replace(config, seed=1), tmp_path / "c")
    assert_same_run(tmp_path / "a", tmp_path / "b", 4)
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_training_lowers_the_loss(tmp_path):
    result = go(tiny(tmp_path, steps=60, eval_every=30), tmp_path / "run")
    first, *_, last = (event["loss"] for event in read_events(tmp_path / "run", "evaluated"))
    assert last < first - 1.5
    assert result["validation_loss"] == last


def test_micro_batches_add_up_to_the_batch(tmp_path):
    go(tiny(tmp_path), tmp_path / "whole")
    go(tiny(tmp_path, micro_batch=1), tmp_path / "parts")
    # The same sums in another order; 8-bit state may round a value that lies between two codes the other way.
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    first, second = (read_log(tmp_path / name)[0]["grad_norm"] for name in ("whole", "parts"))
    assert second == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("bits", [8, 32])
def test_gradient_release_changes_nothing_and_resumes_exactly(tmp_path, bits):
    """The norms are sums in another order, and need not agree to the last bit."""
    plain = tiny(tmp_path, optim=OptimConfig(lr=3e-3, bits=bits, clip_norm=None), watch=WatchConfig(every=0))
    released = replace(plain, optim=replace(plain.optim, release=True))
    for name, config in (("plain", plain), ("released", released)):
        go(config, tmp_path / name)
    assert losses(tmp_path / "released") == losses(tmp_path / "plain")
    norms = [[line["grad_norm"] for line in read_log(tmp_path / name)] for name in ("plain", "released")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "released", half)
    resume(half, step=8, console=quiet())
    assert losses(half) == losses(tmp_path / "plain")


def test_release_skips_a_step_whose_loss_is_not_finite(tmp_path, monkeypatch):
    config = tiny(tmp_path, optim=OptimConfig(clip_norm=None, release=True), watch=WatchConfig(every=0), steps=4)
    count = itertools.count()

    def spoil(loss: Any) -> Any:
        return lambda model, batch: loss(model, batch) * (math.nan if next(count) == 1 else 1.0)

    changed_task(monkeypatch, loss=spoil)
    result = go(config, tmp_path / "run")
    assert (result["why"], result["skipped"]) == ("done", 1)


def test_an_evaluation_uses_micro_batches_too(tmp_path):
    whole, parts = (build_task(tiny(tmp_path, micro_batch=rows), Processes()) for rows in (None, 1))
    rows, evaluate = [], parts.evaluate
    parts.evaluate = lambda model, batch: rows.append(len(batch["tokens"])) or evaluate(model, batch)
    found = parts.validate(parts.model, 2)["loss"]
    assert set(rows) == {1}
    assert len(rows) == 2 * parts.eval_batch
    torch.testing.assert_close(found, whole.validate(whole.model, 2)["loss"])


# --- What may change at a resume


def test_a_changed_schedule_is_refused_unless_forced(tmp_path):
    config = tiny(tmp_path, start=8)
    go(config, tmp_path / "run")
    slower = replace(config, schedule=replace(config.schedule, seqlen=replace(config.schedule.seqlen, steps=11)))
    with pytest.raises(RunError, match=r"schedule\.seqlen\.steps was 8 and is now 11.*--force"):
        resume(tmp_path / "run", slower, step=4, console=quiet())
    assert len(read_log(tmp_path / "run")) == 12  # refused before anything was touched
    resume(tmp_path / "run", slower, step=4, force=True, console=quiet())
    assert read_events(tmp_path / "run", "forced")[0]["changed"] == {"schedule.seqlen.steps": ["8", "11"]}
    # The run has the new config from now on.
    assert load_config(tmp_path / "run")[0] == slower
    assert resume(tmp_path / "run", console=quiet())["why"] == "done"


@pytest.mark.parametrize(
    "change", [{"steps": 20}, {"seed": 3}, {"tokens": 500}, {"micro_batch": 2}, {"autocast": "bfloat16"}]
)
def test_a_change_of_what_is_computed_is_refused(tmp_path, change):
    config = tiny(tmp_path, steps=4)
    go(config, tmp_path / "run")
    with pytest.raises(RunError, match=f"{next(iter(change))} was .* and is now"):
        resume(tmp_path / "run", replace(config, **change), console=quiet())


def test_fields_that_do_not_change_the_result_may_change(tmp_path):
    config = tiny(tmp_path)
    go(config, tmp_path / "whole")
    broken = shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    resume(broken, replace(config, keep=1, eval_every=3, checkpoint_every=5, log_every=1), step=4, console=quiet())
    assert trajectory(broken) == trajectory(tmp_path / "whole")


def test_other_data_is_refused_unless_forced(tmp_path):
    config = tiny(tmp_path, steps=4)
    go(config, tmp_path / "run")
    write_words(tmp_path / "words.txt", seed=1)
    with pytest.raises(RunError, match="the data has changed: its sha256 is"):
        resume(tmp_path / "run", step=4, console=quiet())
    longer = replace(config, steps=6)
    assert resume(tmp_path / "run", longer, force=True, console=quiet())["samples"] == 6 * BATCH
    # From now on it is a run on this data, and needs no force, not even from a checkpoint before the change.
    assert resume(tmp_path / "run", step=4, console=quiet())["samples"] == 6 * BATCH


def test_a_forced_change_of_the_optimizer_is_used(tmp_path):
    config = tiny(tmp_path)
    go(config, tmp_path / "run")
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    decayed = replace(config, optim=replace(config.optim, weight_decay=5.0, betas=(0.5, 0.6)))
    for folder, changed in ((tmp_path / "run", decayed), (copy, config)):
        resume(folder, changed, step=4, force=True, console=quiet())
    assert trajectory(tmp_path / "run")[:4] == trajectory(copy)[:4]
    assert hashes(tmp_path / "run", 8) != hashes(copy, 8)


def test_other_data_alone_can_be_forced(tmp_path):
    go(tiny(tmp_path, steps=8), tmp_path / "run")
    write_words(tmp_path / "words.txt", seed=1)
    assert resume(tmp_path / "run", step=4, force=True, console=quiet())["step"] == 8
    assert resume(tmp_path / "run", console=quiet())["why"] == "done"


# --- Clocks


@pytest.mark.parametrize(
    "config",
    [
        functools.partial(tiny, start=8),
        functools.partial(tiny, grows=GROWS),
        functools.partial(tiny, start=8, tokens=900),
    ],
    ids=["length", "batch", "tokens"],
)
def test_the_clocks_are_those_of_the_simulation(tmp_path, config):
    config = config(tmp_path)
    result = go(config, tmp_path / "run")
    future, log = simulate(config), read_log(tmp_path / "run")
    assert len(log) == future.steps == result["step"]
    before = {"samples": 0, "tokens": 0}
    for moment, line in zip(future.moments, log, strict=True):
        assert (line["step"], line["length"], line["batch"], line["lr"]) == (
            moment.step,
            moment.length,
            moment.batch,
            moment.lr,
        )
        assert (moment.samples, moment.tokens) == (before["samples"], before["tokens"])
        before = line
    assert (result["samples"], result["tokens"]) == (future.samples, future.tokens)
    assert result["warmup_tokens"] == future.warmup_tokens


def test_only_tokens_that_survive_the_cut_are_counted(tmp_path):
    go(tiny(tmp_path, start=8), tmp_path / "run")
    log = read_log(tmp_path / "run")
    assert log[0]["length"] == 8
    assert log[-1]["length"] == CONTEXT
    assert log[-1]["tokens"] == sum(BATCH * line["length"] for line in log) < 12 * BATCH * CONTEXT
    assert log[-1]["samples"] == 12 * BATCH


def test_the_learning_rate_falls_by_tokens(tmp_path):
    config = tiny(tmp_path, start=8)
    go(config, tmp_path / "run")
    log = read_log(tmp_path / "run")
    rate, tokens = config.schedule.lr, log[-1]["tokens"]
    warm = log[2]["tokens"]  # the warm-up takes three steps
    for before, line in itertools.pairwise(log[3:]):
        r = (before["tokens"] - warm) / (tokens - warm)
        assert line["lr"] == pytest.approx(rate.floor + (3e-3 - rate.floor) * (1 + math.cos(math.pi * r)) / 2)


def test_a_run_by_tokens_ends_with_the_step_that_reaches_them(tmp_path):
    step = BATCH * CONTEXT
    result = go(tiny(tmp_path, tokens=3 * step + 1), tmp_path / "run")
    assert (result["why"], result["step"], result["tokens"]) == ("done", 4, 4 * step)


def test_seconds_continue_after_a_resume(tmp_path):
    go(tiny(tmp_path), tmp_path / "run")
    resume(tmp_path / "run", step=4, console=quiet())
    seconds = [line["seconds"] for line in read_log(tmp_path / "run")]
    assert seconds == sorted(seconds)


# --- Evaluation


def test_evaluation_is_always_at_full_length(tmp_path, monkeypatch):
    trained, evaluated = [], []
    changed_task(
        monkeypatch,
        loss=lambda real: lambda run, batch: (trained.append(batch["tokens"].shape[1]), real(run, batch))[1],
        evaluate=lambda real: lambda run, batch: (evaluated.append(batch["tokens"].shape[1]), real(run, batch))[1],
    )
    go(tiny(tmp_path, start=8), tmp_path / "run")
    assert min(trained) == 8
    assert set(evaluated) == {CONTEXT}


def test_every_evaluation_sees_the_same_rows(tmp_path, monkeypatch):
    seen = []
    changed_task(
        monkeypatch,
        evaluate=lambda real: lambda run, batch: (seen.append(batch["tokens"].sum().item()), real(run, batch))[1],
    )
    go(tiny(tmp_path), tmp_path / "run")
    assert len(seen) == 8
    assert seen[:2] * 4 == seen


def test_a_clip_is_evaluated_on_no_more_pairs_than_there_are(tmp_path):
    go(tiny_clip(tmp_path, steps=2, batch=64), tmp_path / "run")
    assert read_events(tmp_path / "run", "evaluated")[-1].keys() >= {"loss", "image_accuracy", "text_accuracy"}


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Validation losses that are given, two batches each."""
    left = iter([value for value in values for _ in range(2)])
    changed_task(monkeypatch, evaluate=lambda _: lambda run, batch: {"loss": torch.tensor(next(left))})


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path, monkeypatch):
    scripted(monkeypatch, [9.0, 5.0, 3.0, 4.0, 4.5, 4.6, 4.7])
    result = go(tiny(tmp_path, eval_every=2, checkpoint_every=2, keep=2), tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000010", "step-00000012"]
    assert result["validation_loss"] == 3.0
    assert load_run(tmp_path / "run", -1)[2] == 4


def test_a_checkpoint_is_not_the_best_by_an_older_evaluation(tmp_path, monkeypatch):
    scripted(monkeypatch, [9.0, 1.0, 8.0, 7.0])
    go(tiny(tmp_path, steps=10, eval_every=4, checkpoint_every=5), tmp_path / "run")
    # Step 4 had the 1.0 and was not saved; step 10 was evaluated at its end.
    assert load_run(tmp_path / "run", -1)[2] == 10


def test_three_bad_evaluations_in_a_row_end_the_run(tmp_path, monkeypatch):
    scripted(monkeypatch, [2.0, 4.1, 3.9, 4.1, float("nan"), 5.0])
    result = go(tiny(tmp_path, steps=30, eval_every=2), tmp_path / "run")
    assert (result["why"], result["step"]) == ("diverged", 10)
    assert read_events(tmp_path / "run", "stopped")[0]["reason"].startswith("3 evaluations in a row above 2.0")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["why"] == "diverged"


def test_many_bad_steps_in_a_row_end_the_run_before_its_evaluations_do(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "DIVERGED_STEPS", 5)
    scripted(monkeypatch, [0.5] * 9)  # training is at 5 and more, all the time
    result = go(tiny(tmp_path, steps=30, eval_every=30), tmp_path / "run")
    assert (result["why"], result["step"]) == ("diverged", 5)
    broken = go(tiny(tmp_path, steps=4, checkpoint_every=4), tmp_path / "half")
    assert broken["why"] == "done"
    state = json.loads((tmp_path / "half/checkpoints/step-00000004/state.json").read_text())
    assert state["progress"]["bad_steps"] == 4


def test_the_check_for_divergence_can_be_disabled(tmp_path, monkeypatch):
    scripted(monkeypatch, [2.0, *[99.0] * 6])
    assert go(tiny(tmp_path, eval_every=2, diverged_at=None), tmp_path / "run")["why"] == "done"


# --- Losses that are not finite


def not_finite_at(monkeypatch: pytest.MonkeyPatch, steps: set[int], how: str = "loss") -> None:
    """At these steps the loss, or only its gradient, is not finite."""
    calls = iter(range(1, 10_000))

    def poison(real: Any) -> Any:
        def loss(run: Any, batch: Any) -> Any:
            value = real(run, batch)
            if next(calls) not in steps:
                return value
            if how == "loss":
                return value * float("nan")
            return value + (next(run.parameters()).sum() * 0).sqrt()  # 0 with a slope of 0 times infinity

        return loss

    changed_task(monkeypatch, loss=poison)


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_counted_and_logged(tmp_path, monkeypatch, how):
    config = tiny(tmp_path, steps=5, checkpoint_every=1, optim=OptimConfig(lr=3e-3, clip_norm=1.0))
    not_finite_at(monkeypatch, {3}, how)
    result = go(config, tmp_path / "run")
    assert (result["why"], result["step"], result["skipped"]) == ("done", 5, 1)
    assert [event["step"] for event in read_events(tmp_path / "run", "skipped")] == [3]
    assert hashes(tmp_path / "run", 3) == hashes(tmp_path / "run", 2) != hashes(tmp_path / "run", 4)
    log = read_log(tmp_path / "run")
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5]
    assert (log[2]["loss"] if how == "loss" else log[2]["grad_norm"]) is None  # NaN is not JSON
    assert log[4]["loss"] is not None


def test_many_in_a_row_end_the_run(tmp_path, monkeypatch):
    not_finite_at(monkeypatch, {2, 3, 5, 6, 7})
    result = go(tiny(tmp_path, stop_after_skips=3), tmp_path / "run")
    assert (result["why"], result["step"], result["skipped"]) == ("not finite", 7, 5)
    assert read_events(tmp_path / "run", "stopped")[0]["reason"] == "3 steps in a row without a finite loss"


def test_skips_are_counted_over_a_resume(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        not_finite_at(patch, {2})
        go(tiny(tmp_path), tmp_path / "run")
    assert resume(tmp_path / "run", step=4, console=quiet())["skipped"] == 1


# --- Precision and compilation


def test_autocast_computes_in_bfloat16(tmp_path):
    go(tiny(tmp_path), tmp_path / "float")
    go(tiny(tmp_path, autocast="bfloat16"), tmp_path / "bfloat")
    assert losses(tmp_path / "bfloat") != losses(tmp_path / "float")
    assert losses(tmp_path / "bfloat") == pytest.approx(losses(tmp_path / "float"), rel=0.02)  # eight bits of mantissa


# Importing the compiler raises DeprecationWarnings inside torch.
warns = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def compiled(monkeypatch) -> Iterator[None]:
    """torch.compile without code generation, which is slow; dynamo alone decides how many compilations there are.

    Its limit is lowered from 8 to 2, so that four lengths are beyond it.
    """
    torch._dynamo.reset()  # what other tests have compiled in this process counts too
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


@warns
def test_there_is_one_compilation_per_length_however_many(tmp_path, compiled):
    config = tiny(tmp_path, start=8)
    result = go(replace(config, compile=True), tmp_path / "run")
    lengths = {line["length"] for line in read_log(tmp_path / "run")}
    assert result["compilations"] == len(lengths) == result["most_compilations"] == 4
    assert torch._dynamo.config.recompile_limit == 2  # restored
    go(config, tmp_path / "plain")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


@warns
def test_compilations_beyond_what_was_expected_are_an_error_and_not_a_fallback(tmp_path, monkeypatch, compiled):
    monkeypatch.setattr(loop, "count_shapes", lambda config: 1)
    with pytest.raises(Exception, match="recompile_limit"):
        go(tiny(tmp_path, start=8, compile=True), tmp_path / "run")


def test_shapes_are_lengths_times_batches(tmp_path):
    assert count_shapes(tiny(tmp_path)) == 1
    assert count_shapes(tiny(tmp_path, start=8)) == 4
    assert count_shapes(tiny(tmp_path, grows=GROWS)) == 2
    assert count_shapes(tiny(tmp_path, grows=GROWS, micro_batch=1)) == 1


@pytest.mark.slow
@warns
def test_the_real_compiler_agrees(tmp_path):
    go(tiny(tmp_path, start=16), tmp_path / "plain")
    result = go(tiny(tmp_path, start=16, compile=True), tmp_path / "run")
    assert result["compilations"] == result["most_compilations"] == 3
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


# --- Bad input leaves no files


def text(folder: Path, data: bytes) -> dict[str, Any]:
    (folder / "bad.txt").write_bytes(data)
    return {"data": replace(tiny(folder).data, corpus=str(folder / "bad.txt"))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: text(folder, b""), "empty|no text|0 "),
        (lambda folder: text(folder, bytes(range(256)) * 40), "not text|binary|UTF-8"),
        (lambda folder: text(folder, b"too short"), "shorter than one window"),
        (lambda folder: {"data": replace(tiny(folder).data, corpus=str(folder / "nowhere"))}, "no corpus at"),
        (
            lambda folder: {"model": replace(tiny(folder).model, vocab=256)},
            r"model\.vocab=256 is too small for the 257",
        ),
        (
            lambda folder: {"optim": OptimConfig(name="torch-adamw", bits=32, independent_decay=True)},
            r"torch-adamw has no optim\.independent_decay",
        ),
        (
            lambda folder: {"micro_batch": 4, "schedule": tiny(folder, grows=GROWS).schedule},
            "a batch of 2 does not split",
        ),
    ],
    ids=["empty", "binary", "short", "missing", "vocabulary", "optimizer", "micro-batch"],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, change, message):
    config = tiny(tmp_path, **change(tmp_path))
    with pytest.raises(ValueError, match=message):
        go(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_of_more_pairs_than_there_are_is_refused(tmp_path):
    config = tiny_clip(tmp_path, batch=441)
    with pytest.raises(ConfigError, match="batch=441 is more than the 440 pairs of shapes; try 440"):
        go(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_another_run_is_left_alone(tmp_path):
    go(tiny(tmp_path, steps=4), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="already holds a run; `trimtab resume"):
        go(tiny(tmp_path), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_folder_with_something_else_and_a_file_are_left_alone(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no run"):
        go(tiny(tmp_path), tmp_path / "full")
    with pytest.raises(RunError, match=r"cannot write to .*/run: .*/thesis\.tex is not a folder"):
        go(tiny(tmp_path), tmp_path / "full" / "thesis.tex" / "run")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_an_empty_folder_is_fine(tmp_path):
    (tmp_path / "run").mkdir()
    assert go(tiny(tmp_path, steps=1), tmp_path / "run")["step"] == 1


# --- The end of a run


def test_sampling_is_text_from_a_seed(tmp_path):
    go(tiny(tmp_path, steps=12), tmp_path / "run")
    one = sample(tmp_path / "run", prompt="the", tokens=12)
    assert one == sample(tmp_path / "run", prompt="the", tokens=12)
    assert one != sample(tmp_path / "run", prompt="the", tokens=12, seed=1)
    assert one.startswith("the")
    likeliest = sample(tmp_path / "run", tokens=10, temperature=0)
    assert likeliest == sample(tmp_path / "run", tokens=10, temperature=0, seed=1)
    with pytest.raises(RunError, match="temperature must be a number of at least 0"):
        sample(tmp_path / "run", temperature=-1.0)


def test_a_clip_writes_no_text_but_names_pictures(tmp_path):
    go(tiny_clip(tmp_path, steps=2), tmp_path / "run")
    with pytest.raises(RunError, match="holds a CLIP, which writes no text"):
        sample(tmp_path / "run")
    found = evaluate(tmp_path / "run", batches=1)
    assert 0 <= found["caption_top1"] <= found["caption_top5"] <= 1
    assert 0 <= found["zero_shot_one_prompt"] <= 1
    assert found["chance"] == 1 / found["classes"]
    assert zero_shot(tmp_path / "run").top1 == found["zero_shot_top1"]
    go(tiny(tmp_path, steps=1), tmp_path / "gpt")
    with pytest.raises(RunError, match="not the run of a CLIP"):
        zero_shot(tmp_path / "gpt")


def test_config_json_holds_config_hash_and_versions(tmp_path):
    config = tiny(tmp_path, steps=1)
    go(config, tmp_path / "run")
    read, facts = load_config(tmp_path / "run")
    assert read == config
    assert len(facts.sha256) == 64
    assert facts.versions["torch"] == torch.__version__
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["why"] == "done"


def test_a_constant_rate_needs_no_end(tmp_path):
    plain = tiny(tmp_path, steps=3)
    go(replace(plain, schedule=replace(plain.schedule, lr=LearningRate(kind="constant"))), tmp_path / "run")
    assert {line["lr"] for line in read_log(tmp_path / "run")} == {3e-3}
