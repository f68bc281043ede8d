"""Configs: checked when built, unchanged by JSON, compared field by field."""

import json
import math
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass, replace

import pytest

from tests.train.runs import tiny, tiny_clip
from trimtab import cli
from trimtab.hints import did_you_mean
from trimtab.nn import ConfigError
from trimtab.recipes import RECIPES
from trimtab.schedule import LearningRate, SeqLenWarmup
from trimtab.train import BatchConfig, ModuleRun, OptimConfig, ScheduleConfig
from trimtab.train.config import FREE, ModuleConfig, differences, from_json, kind_of, to_json, with_values


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_unchanged_by_json(name):
    config = RECIPES[name]()
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_the_kind_of_run_is_saved(tmp_path):
    assert (kind_of(tiny(tmp_path)), kind_of(tiny_clip(tmp_path))) == ("gpt", "clip")
    assert type(from_json(to_json(tiny_clip(tmp_path)))).__name__ == "CLIPRun"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0 is too small; try steps=1"),
        ({"batch": 0}, "batch=0 is too small"),
        ({"keep": 0}, "keep=0 is too small"),
        ({"stop_after_skips": 0}, "stop_after_skips=0 is too small"),
        ({"tokens": 0}, "tokens=0 must be above zero, or None"),
        ({"threads": 0}, "threads=0 must be above zero, or None"),
        ({"threads": 10**6}, "threads=1000000 is more than any machine has; try threads=None"),
        ({"seed": -1}, "seed=-1 is negative; try seed=1"),
        ({"seed": 2**64}, "seed=18446744073709551616 is too large for any machine; try seed=0"),
        ({"steps": 10**20}, "steps=100000000000000000000 is too large for any machine; try steps=1"),
        ({"tokens": 10**20}, "is too large for any machine; try tokens=None"),
        ({"keep": 10**20}, "is too large for any machine; try keep=2"),
        ({"diverged_at": math.nan}, "diverged_at=nan must be above zero"),
        ({"micro_batch": 3}, "micro_batch=3 does not divide batch=4; try 1"),
        ({"micro_batch": 0}, "micro_batch=0 does not divide batch=4; try 4"),
        ({"autocast": "float16"}, "autocast='float16' is not known; try one of 'off', 'bfloat16'"),
        ({"parallel": "zero"}, "parallel='zero' is not known; try one of 'ddp', 'fsdp2'"),
    ],
)
def test_a_wrong_field_is_refused_with_a_remedy(tmp_path, change, message):
    with pytest.raises(ConfigError) as error:
        tiny(tmp_path, **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "optim.lr=0.0 must be above zero"),
        ({"lr": math.nan}, "optim.lr=nan must be above zero"),
        ({"lr": 9e18}, "optim.lr=9e+18 must be above zero and at most 10000; try optim.lr=0.001"),
        ({"eps": 0.0}, "optim.eps=0.0 must be above zero and at most 10000; try optim.eps=1e-08"),
        ({"eps": 1e30}, "optim.eps=1e+30 must be above zero and at most 10000"),
        ({"weight_decay": -0.1}, "optim.weight_decay=-0.1 must be from 0 to 10000; try 0.1"),
        ({"weight_decay": math.inf}, "optim.weight_decay=inf must be from 0 to 10000"),
        ({"betas": (0.9, 1.0)}, "optim.betas=(0.9, 1.0) are not in [0, 1); try optim.betas=(0.9, 0.95)"),
        ({"betas": (-0.1, 0.9)}, "optim.betas=(-0.1, 0.9) are not in [0, 1)"),
        ({"clip_norm": math.inf}, "optim.clip_norm=inf must be finite; try 1.0, or None for no clipping"),
        ({"beta2_power": -1.0}, "optim.beta2_power=-1.0 must be above zero; try optim.beta2_power=0.8"),
        ({"block": 10**19}, "optim.block=10000000000000000000 is too large for any machine; try optim.block=256"),
        ({"clip_norm": -1.0}, "optim.clip_norm=-1.0 must be above zero"),
        ({"name": "adamm"}, "name='adamm' is not known; try one of 'adamw', 'stable-adamw'"),
        ({"bits": 4}, "bits=4 is not known; try one of 8, 32"),
        ({"name": "adamw", "beta2_power": 0.5}, "beta2_power belongs to stable-adamw"),
        ({"name": "torch-adamw"}, "try optim.bits=32"),
        ({"name": "adafactor"}, "try optim.bits=32"),
        ({"bits": 32, "embedding_bits": 8}, "try optim.bits=8"),
    ],
)
def test_a_wrong_optimizer_is_refused_with_a_remedy(change, message):
    with pytest.raises(ConfigError) as error:
        OptimConfig(**change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "sgd", "lr": 3000.0},  # with very small gradients
        {"lr": 1e-12},
        {"eps": 1.0},  # as in Inception's RMSprop
        {"weight_decay": 0.0},
        {"betas": (0.0, 0.0)},
        {"betas": (0.9, 0.9999)},
        {"block": 2**53},
    ],
)
def test_unusual_values_of_an_optimizer_stay_legal(change):
    OptimConfig(**change)


def test_two_warm_ups_are_refused_unless_forced(tmp_path):
    grows = BatchConfig(start=2, increment=2, samples=8)
    with pytest.raises(ConfigError, match=r"both warm up.*schedule\.force=True"):
        tiny(tmp_path, start=8, grows=grows)
    schedule = tiny(tmp_path, start=8).schedule
    forced = replace(schedule, batch=grows, force=True)
    assert tiny(tmp_path, schedule=forced).schedule.batch is grows


def test_the_schedules_end_at_the_context_and_the_batch(tmp_path):
    config = with_values(tiny(tmp_path, start=8), {"model.context": 64, "batch": 8})
    assert (config.seqlen_warmup.start, config.seqlen_warmup.end) == (8, 64)
    assert (config.batch_warmup.start, config.batch_warmup.end) == (8, 8)
    assert with_values(config, {"schedule.seqlen.start": "none"}).seqlen_warmup.start == 64
    assert with_values(config, {"schedule.seqlen.lengths": [16, 64], "schedule.seqlen.start": None}).seqlen_warmup == (
        SeqLenWarmup(start=16, end=64, steps=8, lengths=(16, 64))
    )


def test_captions_are_neither_cut_nor_compared_in_parts(tmp_path):
    run = tiny_clip(tmp_path)
    with pytest.raises(ConfigError, match="captions cannot be cut"):
        replace(run, schedule=replace(run.schedule, seqlen=replace(run.schedule.seqlen, start=8)))
    with pytest.raises(ConfigError, match="compares each caption with all others of its batch"):
        replace(run, micro_batch=4)


def test_differences_are_named_by_their_dotted_fields(tmp_path):
    old = tiny(tmp_path)
    new = replace(old, optim=replace(old.optim, lr=1.0, betas=(0.8, 0.95)), seed=1)
    assert differences(old, new) == [
        ("optim.betas", "[0.9, 0.95]", "[0.8, 0.95]"),
        ("optim.lr", "0.003", "1.0"),
        ("seed", "0", "1"),
    ]
    assert differences(old, old) == []


def test_free_fields_exist():
    config = RECIPES["gpt-tiny"]()
    for name in FREE:
        owner = config
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        assert last in {item.name for item in fields(owner)}
        assert not is_dataclass(getattr(owner, last))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "bert"}, "a config of kind 'bert' is not known; try one of gpt, clip"),
        ({"stepz": 3}, "stepz is not a field of GPTRun"),
        ({"optim": {"learning_rate": 3}}, "optim.learning_rate is not a field of GPTRun. Did you mean 'optim.lr'?"),
        ({"steps": "3"}, "Expected `int`, got `str` - at `steps`"),
        ({"steps": 0}, "steps=0 is too small; try steps=1"),
        ({"steps": 10**20}, "steps=100000000000000000000 is too large for any machine"),
        ({"seed": -1}, "seed=-1 is negative; try seed=1"),
    ],
)
def test_json_that_is_no_config_is_refused(tmp_path, change, message):
    with pytest.raises(ConfigError) as error:
        from_json(to_json(tiny(tmp_path)) | change)
    assert message in str(error.value)


def test_a_batch_that_never_grows_is_no_warm_up(tmp_path):
    assert tiny(tmp_path, start=8, grows=BatchConfig(start=4)).batch_warmup.at(0) == 4


# --- Overrides


def test_overrides_are_typed():
    values = {"batch": 32, "optim": {"betas": [0.9, 0.999]}, "optim.clip-norm": "none", "optim.eps": 1}
    config = with_values(RECIPES["gpt-lab"](), values)
    assert (config.batch, config.optim.betas, config.optim.clip_norm, config.optim.eps) == (32, (0.9, 0.999), None, 1.0)


def test_text_is_parsed_by_the_type_of_the_field():
    text = {"optim.lr": "1e-2", "optim.betas": "0.8,0.9", "optim.bits": "32", "compile": "True", "tokens": "None"}
    text |= {"batch": "8", "data.corpus": "12", "watch.skip": ["non-finite", "rms spike"], "optim.eps": "1"}
    config = with_values(RECIPES["gpt-tiny"](), text)
    assert (config.optim.lr, config.optim.betas, config.optim.bits, config.optim.eps) == (0.01, (0.8, 0.9), 32, 1.0)
    assert (config.compile, config.tokens, config.batch, config.data.corpus) == (True, None, 8, "12")
    assert config.watch.skip == ("non-finite", "rms spike")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim.beta": [0.9, 0.9]}, "optim.beta is not a field of GPTRun. Did you mean 'optim.betas'? optim has name"),
        ({"optim.learning-rate": 1}, "Did you mean 'optim.lr'?"),
        ({"lr": 1}, "Did you mean 'optim.lr'?"),
        ({"steps": "many"}, "steps='many' is not a whole number"),
        ({"steps": True}, "steps=True is not a whole number"),
        ({"steps": 3.0}, "steps=3.0 is not a whole number"),
        ({"micro_batch": "half"}, "micro_batch='half' is not a whole number"),
        ({"optim.betas": 0.9}, "optim.betas=0.9 needs a list of 2 values, each a finite number"),
        ({"optim.betas": [0.9]}, "optim.betas=[0.9] needs a list of 2 values"),
        ({"optim.betas": ["a", "b"]}, "needs a list of 2 values, each a finite number"),
        ({"watch.skip": 3}, "watch.skip=3 needs a list of values, each text"),
        ({"optim.eps": math.nan}, "optim.eps=nan is not a finite number"),
        ({"optim.eps": "inf"}, "optim.eps='inf' is not a finite number"),
        ({"optim.name": "adam8"}, "optim.name='adam8' is not known; try one of 'adamw', 'stable-adamw'"),
        ({"optim.bits": "4"}, "optim.bits='4' is not known; try one of 8, 32"),
        ({"optim": 3}, "optim is a group of fields; set one of them: optim has name, lr"),
        ({"batch.size": 3}, "batch.size: batch has no fields"),
        ({"compile": 1}, "compile=1 is not true or false"),
        ({"data.corpus": 1}, "data.corpus=1 is not text"),
        ({"model.options.width": 1}, "model.options.width is not a field of GPTRun"),
        ({"model.width": 30, "model.heads": 4}, "width=30 does not split into heads=4"),
        ({"schedule.lr.warmup": -1}, "warmup=-1 is too small"),
        (
            {"schedule.seqlen.start": 512},
            "schedule.seqlen: start=512 is above end=64; try start=64 (end is model.context)",
        ),
        ({"schedule.batch.start": 9, "schedule.batch.increment": 2}, "past end=16; try end=15 (end is batch)"),
        ({"schedule.seqlen.end": 64}, "schedule.seqlen.end is not a field: it is always model.context"),
        ({"schedule.batch.end": 16}, "schedule.batch.end is not a field: it is always batch. Set batch instead"),
    ],
)
def test_a_wrong_override_is_refused_with_a_remedy(values, message):
    with pytest.raises(ConfigError) as error:
        with_values(RECIPES["gpt-lab"](), values)
    assert message in str(error.value)


IMPOSSIBLE = [
    "--steps 99999999999999999999",
    "--steps 100000000000000",  # consumes more tokens than can be counted
    "--schedule.lr.warmup 1e30",
    "--schedule.lr.warmup 99999999999999999999",
    "--schedule.lr.decay 99999999999999999999",
    "--schedule.seqlen.steps 99999999999999999999",
    "--schedule.seqlen.lengths 8 99999999999999999999",
    "--schedule.seqlen.degree 1e-9 --schedule.seqlen.kind root",
    "--schedule.batch.samples 99999999999999999999 --schedule.force",
    "--batch 9223372036854775808",
    "--batch 9007199254740992",
    "--seed -1",
    "--seed 99999999999999999999999",
    "--threads 1000000",
    "--eval-every 99999999999999999999",
    "--watch.every 99999999999999999999",
    "--watch.ignore -1",
    "--model.mlp-ratio 99999999999999999999",
    "--model.width 99999999999999999999",
    "--model.depth 1000000000",
    f"--model.norm-eps {'9' * 400}",
    "--optim.block 10000000000000000000",
    "--optim.lr 9e18",
    "--optim.clip-norm inf",
    "--data.prefetch 1000000000",
    f"--steps {'9' * 5000}",
]


@pytest.mark.parametrize("words", IMPOSSIBLE, ids=[words[:40] for words in IMPOSSIBLE])
def test_values_that_no_run_can_mean_are_refused_in_one_line(capsys, words):
    begun = time.perf_counter()
    with pytest.raises(SystemExit) as end:
        cli.main(["schedule", "gpt-tiny", *words.split()])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert time.perf_counter() - begun < 10  # imports included


def test_options_of_a_user_defined_model_are_not_checked():
    config = ModuleRun(
        model=ModuleConfig(build="a:b"),
        optim=OptimConfig(),
        schedule=ScheduleConfig(lr=LearningRate()),
        steps=1,
        batch=1,
    )
    changed = with_values(config, {"model.options.width": 16, "model.options.inner.kind": "x"})
    assert changed.model.options == {"width": 16, "inner": {"kind": "x"}}
    assert from_json(to_json(changed)) == changed
    with pytest.raises(ConfigError, match=r"width has no fields"):
        with_values(changed, {"model.options.width.more": 16})


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("gpt-lap", ["gpt-tiny", "gpt-lab"], "gpt-lab"),
        ("--optim.learning-rate", ["--optim.lr", "--schedule.lr"], "--optim.lr"),
        ("--lr", ["--optim.lr"], "--optim.lr"),
        ("optim.weigth_decay", ["optim.weight_decay"], "optim.weight_decay"),
    ],
)
def test_a_hint_names_what_is_meant(word, known, meant):
    assert did_you_mean(word, known) == f" Did you mean {meant!r}?"
    assert did_you_mean("zzz", known) == ""


def test_models_and_optimizers_are_imported_without_the_config_library():
    code = "import sys, trimtab.nn, trimtab.optim; assert 'msgspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_release_is_refused_with_what_needs_all_gradients(tmp_path):
    release = OptimConfig(clip_norm=None, release=True)
    with pytest.raises(ConfigError, match=r"optim.clip_norm=1.0 needs all gradients at once.*try optim.clip_norm=None"):
        OptimConfig(release=True)
    with pytest.raises(ConfigError, match=r"torch-adamw has no optim.release; try optim.name='adamw'"):
        OptimConfig(name="torch-adamw", bits=32, clip_norm=None, release=True)
    with pytest.raises(ConfigError, match=r"try watch.every=0, or optim.release=False"):
        replace(tiny(tmp_path), optim=release)
    quiet = replace(tiny(tmp_path).watch, every=0)
    with pytest.raises(ConfigError, match=r"updates in every backward pass; try micro_batch=None, got 1"):
        replace(tiny(tmp_path), optim=release, watch=quiet, micro_batch=1)
