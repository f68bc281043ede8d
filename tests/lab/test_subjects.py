"""Subjects: recipes and sizes, and a model of one's own that trains, resumes exactly, and is refused in words."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.runs import assert_same_run, quiet, read_events
from trimtab.analysis.findings import Result
from trimtab.analysis.results import SNAPSHOT, read_result
from trimtab.lab.budget import seconds
from trimtab.lab.sizes import LADDERS, Size, count_heads, ladder, parse_size, parse_sizes, scaled
from trimtab.lab.study import Arm, Study, default_study
from trimtab.lab.study_file import make_study
from trimtab.lab.subjects import (
    EVALUATIONS,
    LOOKS,
    PEAK_DECAY,
    open_subject,
    study_base,
    with_shape,
    with_steps,
)
from trimtab.nn import CLIP, ConfigError
from trimtab.recipes import RECIPES
from trimtab.train import ModuleRun, RunError, evaluate, load_run, resume, sample, train
from trimtab.train.config import RunConfig, from_json, to_json, with_values
from trimtab.train.module import ModuleBatches, build_module, module_run
from trimtab.train.plan import simulate

OWN = "tests.lab.own_model"


def own(function: str = "build", **changes) -> ModuleRun:
    run = module_run(f"{OWN}:{function}", steps=12, batch=8)
    return replace(run, eval_every=4, eval_batches=2, checkpoint_every=4, keep=10, **changes)


# --- Sizes


def test_the_clip_of_studies_needs_no_download_and_scales_as_a_whole():
    base = study_base("clip-lab", 200)
    assert (base.data.corpus, base.optim.bits, base.optim.clip_norm, base.threads) == ("shapes", 32, None, 1)
    at_size = scaled(base, parse_size("2x32"))
    assert at_size == base
    model = scaled(base, parse_size("4x64")).model
    assert (model.depth, model.width, model.text_depth, model.text_width, model.embed) == (4, 64, 2, 64, 64)
    assert 2 < seconds(at_size) < 20
    assert simulate(base).steps == 200


def test_a_size_is_depth_by_width_in_heads_of_sixteen():
    assert parse_size("3x64") == Size("3x64", 3, 64, 4)
    assert parse_size(" 2X32x4 ") == Size("2x32x4", 2, 32, 4)
    assert [count_heads(width) for width in (8, 16, 40, 50, 96)] == [1, 1, 2, 1, 6]
    assert [size.name for size in parse_sizes("joint:2")] == ["2x16", "2x32"]
    assert [size.name for size in parse_sizes("depth")] == list(LADDERS["depth"])


@pytest.mark.parametrize(
    "text", ["", "3", "x64", "0x16", "2x0", "2x32x5", "2x32x0", "-1x16", "joint:9", "joint:x", "tall"]
)
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ConfigError, match="size"):
        parse_sizes(text)


@pytest.mark.parametrize("name", LADDERS)
def test_every_rung_of_every_ladder_is_a_gpt(name):
    for size in ladder(name):
        config = scaled(open_subject("gpt-lab"), size)
        assert config.model.head_width == 16
        assert (config.model.depth, config.model.width) == (size.depth, size.width)


def test_both_towers_of_a_clip_grow():
    small, large = (scaled(RECIPES["clip-tiny"](), parse_size(size)).model for size in ("2x32", "6x96"))
    assert (small.width, small.text_width, small.text_depth, small.embed) == (32, 32, 1, 32)
    assert (large.width, large.text_width, large.text_depth, large.embed) == (96, 96, 3, 96)
    with torch.device("meta"):
        assert CLIP(large).visual is not None


def test_options_are_for_functions_alone():
    with pytest.raises(ConfigError, match="only module:function"):
        scaled(open_subject("gpt-lab"), Size("wide", options={"hidden": 3}))


# --- Recipes


def test_an_unknown_recipe_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ConfigError, match="Did you mean 'gpt-lab'"):
        open_subject("gpt-lap")


def test_a_shorter_run_keeps_its_shape():
    config = open_subject("gpt-lab")
    fifth = with_steps(config, 100)
    assert 5 * fifth.schedule.lr.warmup == config.schedule.lr.warmup
    assert fifth.optim.weight_decay == pytest.approx(5 * config.optim.weight_decay)
    assert 5 * fifth.eval_every == config.eval_every
    assert fifth.watch.every == max(round(config.watch.every / 5), 1)
    assert with_steps(config, config.steps) is config
    for name in RECIPES:
        assert with_steps(RECIPES[name](), 100).steps == 100
    with pytest.raises(ConfigError, match="steps=0"):
        with_steps(config, 0)


def test_decay_that_is_multiplied_by_the_learning_rate_stays_below_one_in_a_short_run():
    for name in RECIPES:
        study = default_study(name)
        optim = study.base.optim
        assert optim.weight_decay * (1 if optim.independent_decay else max(study.lrs)) < 1, name
    assert study_base("gpt3-125m", 400).optim.weight_decay * 2.4e-3 == pytest.approx(PEAK_DECAY)
    large = with_values(open_subject("gpt-tiny"), {"optim.weight_decay": 100.0})
    assert with_steps(large, 40).optim.weight_decay == 100.0  # what it was


def test_smaller_batches_and_shorter_rows_keep_the_schedules():
    config = study_base("gpt3-125m", 400)
    small = with_shape(config, batch=16, context=64)
    assert (small.batch, small.micro_batch, small.model.context, small.steps) == (16, 8, 64, 400)
    share = 16 * 64 / (config.batch * config.model.context)
    for name in ("warmup", "decay"):
        assert getattr(small.schedule.lr, name) == pytest.approx(share * getattr(config.schedule.lr, name), abs=1)
    assert small.tokens == pytest.approx(share * config.tokens, abs=1)
    assert small.schedule.seqlen == replace(config.schedule.seqlen, start=8)
    assert simulate(small).steps == pytest.approx(400, abs=25)  # the first length is larger, relative to the last
    grown = with_values(
        config, {"schedule.seqlen.start": None, "schedule.batch.start": 256, "schedule.batch.samples": 4096}
    )
    sizes = with_shape(with_values(grown, {"schedule.batch.increment": 256}), batch=64, context=64).schedule.batch
    assert (sizes.start, sizes.increment, sizes.samples) == (8, 8, 128)


# --- When runs are measured


def measured(config: RunConfig) -> list[int]:
    """The steps with a record of the layers, as `trimtab.train.watcher` and `trimtab.watch` decide them."""
    watch = config.watch
    due = [step for step in range(watch.every, config.steps + 1, watch.every) if step % watch.deep_every < watch.every]
    return [step for step in due if step % watch.record_every == 0]


def assert_measured_in_the_snapshot(config: RunConfig) -> None:
    steps = measured(config)
    assert sum(SNAPSHOT[0] * config.steps < step <= SNAPSHOT[1] * config.steps for step in steps) >= 3, config.steps
    assert len(steps) <= 2 * LOOKS


@pytest.mark.parametrize("steps", [60, 250, 400, 2000])
@pytest.mark.parametrize("subject", ["gpt-lab", "gpt-tiny", "clip-tiny", "gpt2-117m", f"{OWN}:build"])
def test_every_subject_is_measured_several_times_in_the_part_of_the_run_that_forecasts_use(subject, steps):
    for cell in make_study({"subject": subject, "steps": steps}).cells():
        assert_measured_in_the_snapshot(cell.config)
        assert simulate(cell.config).steps == pytest.approx(steps, rel=0.02)  # also if it ends by tokens
        assert steps // cell.config.eval_every <= EVALUATIONS + 1


def test_arms_with_other_numbers_of_steps_are_measured_there_too():
    arms = {
        "short": "steps=60",
        "long": "steps=2000",
        "large": "batch=64",
        "warm": "seqlen-warmup",
        "grow": "batch-warmup",
    }
    for cell in make_study({"steps": 1000, "arms": arms}).cells():
        assert_measured_in_the_snapshot(cell.config)


def test_what_the_user_sets_wins():
    study = make_study({"subject": f"{OWN}:build", "steps": 400, "set": {"watch.every": 7, "eval_every": 3}})
    assert {(cell.config.watch.every, cell.config.eval_every) for cell in study.cells()} == {(7, 3)}


def test_the_forecast_of_ones_own_model_comes_from_the_beginning_of_the_run(tmp_path):
    study = make_study({"subject": f"{OWN}:build_attending", "steps": 60, "sizes": ["1x8"], "lrs": [0.01], "seeds": 1})
    cell = study.cells()[0]
    train(cell.config, tmp_path / "run", console=quiet())
    result = read_result(Result(folder=tmp_path / "run", name=cell.name, study=study.name, arm=cell.arm))
    assert SNAPSHOT[0] * 60 < result.logit_step <= SNAPSHOT[1] * 60
    assert result.logit_max > 0


# --- A model of one's own


@pytest.mark.parametrize("function", ["build", "build_finite", "build_placed", "build_wrapped"])
def test_ones_own_model_trains_and_a_resume_changes_nothing(tmp_path, function):
    config = own(function)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = train(config, whole, console=quiet())
    assert result["why"] == "done"
    assert result["tokens"] == 12 * 8  # rows of one token each, as nobody said otherwise
    train(config, parts, console=quiet())
    for step in (8, 4):
        resume(parts, step=step, trust=config.model.build, console=quiet())
        assert_same_run(parts, whole, 12)


def test_it_learns(tmp_path):
    config = with_values(with_steps(own(), 150), {"optim.lr": 0.02})
    train(config, tmp_path / "run", console=quiet())
    losses = [event["loss"] for event in read_events(tmp_path / "run", "evaluated")]
    assert losses[-1] < 0.7 * losses[0]


def test_eval_works_and_sample_refuses(tmp_path):
    train(own(), tmp_path / "run", console=quiet())
    trust = own().model.build
    found = evaluate(tmp_path / "run", batches=2, trust=trust)
    last = read_events(tmp_path / "run", "evaluated")[-1]
    assert found == {"step": 12, "loss": pytest.approx(last["loss"])}
    config, model, step = load_run(tmp_path / "run", trust=trust)
    assert (type(config), step, model.training) == (ModuleRun, 12, False)
    with pytest.raises(RunError, match="writes no text"):
        sample(tmp_path / "run", trust=trust)


def test_its_config_goes_to_json_and_comes_back():
    config = with_values(own(), {"model.options.width": 16})
    assert from_json(to_json(config)) == config
    assert config.model.options == {"width": 16}


def test_rows_are_not_cut_unless_somebody_asks(tmp_path):
    assert train(replace(own("build_tokens"), steps=2), tmp_path / "run", console=quiet())["why"] == "done"


def test_two_sizes_of_it_are_a_study(tmp_path):
    study = Study(
        name="own",
        question="?",
        subject=f"{OWN}:build",
        base=own(),
        sizes=(parse_size("1x8"), Size("wide", options={"width": 16})),
        lrs=(1e-3,),
        arms=(Arm("as it is"), Arm("steadied", ("stable-adamw", "warmup=0.25"))),
        seeds=(0,),
    )
    cells = study.cells()
    assert [cell.config.model.options for cell in cells[::2]] == [{"depth": 1, "width": 8}, {"width": 16}]
    assert [cell.config.optim.name for cell in cells[:2]] == ["adamw", "stable-adamw"]
    assert Study.from_json(study.to_json()) == study
    for cell in cells[::3]:
        assert train(cell.config, tmp_path / cell.folder, console=quiet())["why"] == "done"
    with pytest.raises(ConfigError, match=r"cell 2x16x4/as_it_is: .*cannot be called with"):
        replace(study, sizes=(Size("2x16x4", options={"hidden": 4}),)).cells()


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_colon", "unknown recipe"),
        (f"{OWN}:", "not package.file:function"),
        (":build", "not package.file:function"),
        ("a b:build", "not package.file:function"),
        ("../x:build", "not package.file:function"),
        ("no_such_module_at_all:build", "there is no module no_such_module_at_all"),
        (f"{OWN}.deeper:build", "there is no module"),
        (f"{OWN}:no_such", "has no function no_such; it has batches, build"),
        (f"{OWN}:NUMBER", "has no function NUMBER"),
    ],
)
def test_a_bad_reference_is_refused_in_words(reference, words):
    with pytest.raises(ConfigError, match=words):
        open_subject(reference)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", r"own_model:raises\(\) raised KeyError: 'no such thing"),
        ("returns_none", "must return .model, data."),
        ("returns_text", "an nn.Module and a function"),
    ],
)
def test_a_function_that_does_not_do_its_part_is_refused(function, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build_module(module_run(f"{OWN}:{function}").model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises_in_data", "the train data raised OSError: the disk is gone"),
        ("raises_in_model", r"model\(x, y\) raised RuntimeError"),
        ("returns_logits", r"must return the loss, one number.*shape \(2, 3\)"),
        ("has_no_batches", "has no batches"),
        ("has_tuples", "a batch must be a dict"),
    ],
)
def test_what_raises_while_it_runs_is_said_in_one_line(tmp_path, function, words):
    with pytest.raises(RunError, match=words) as caught:
        train(own(function), tmp_path / "run", console=quiet())
    assert "\n" not in str(caught.value)


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    Path(tmp_path / "broken_model.py").write_text("import no_such_package\n")
    Path(tmp_path / "here_model.py").write_text("from tests.lab.own_model import build\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    with pytest.raises(ConfigError, match="cannot import broken_model: ModuleNotFoundError: No module named 'no_such"):
        open_subject("broken_model:build")
    assert open_subject("here_model:build").model.build == "here_model:build"  # the current folder is searched


def test_the_current_folder_comes_before_what_is_installed(tmp_path, monkeypatch):
    for folder, name in (("installed", "theirs"), ("here", "mine")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice_there.py").write_text(f"def {name}(): ...\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("sys.path", [str(tmp_path / "installed"), str(tmp_path / "here"), *sys.path])
    assert open_subject("twice_there:mine").model.build == "twice_there:mine"


def test_batches_go_back_and_forth():
    made = build_module(module_run(f"{OWN}:build_finite").model)
    batches = ModuleBatches("own", made.data, "train", 3)
    first = [batches.next(8)["x"].sum().item() for _ in range(12)]
    assert len(set(first)) == 12  # a second pass draws others
    state = batches.state()
    batches.load(state | {"position": 7})
    assert [batches.next(8)["x"].sum().item() for _ in range(5)] == first[7:]
    with pytest.raises(ValueError, match="seed"):
        batches.load(state | {"seed": 4})


def test_what_does_not_fit_somebodys_own_model_is_refused():
    with pytest.raises(ConfigError, match="as large as it makes them"):
        with_values(own(), {"schedule.batch.start": 4})
