"""Configs: checked when built, the same after a trip through JSON, and honest about what changed."""

import json
import math
from dataclasses import fields, is_dataclass, replace

import pytest

from tests.train.runs import CONTEXT, off, tiny, tiny_clip
from trimtab.nn import ConfigError
from trimtab.recipes import RECIPES
from trimtab.schedule import BatchWarmup, SeqLenWarmup
from trimtab.train import OptimConfig
from trimtab.train.config import FREE, differences, from_json, kind_of, to_json


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name):
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
        ({"diverged_at": math.nan}, "diverged_at=nan must be above zero"),
        ({"micro_batch": 3}, "micro_batch=3 does not divide batch=4; try 1"),
        ({"micro_batch": 0}, "micro_batch=0 does not divide batch=4; try 4"),
        ({"autocast": "float16"}, "needs a loss scale"),
        ({"autocast": "float8"}, "autocast='float8' is not known; try one of 'off', 'bfloat16'"),
        ({"parallel": "zero"}, "parallel='zero' is not known; try one of 'ddp', 'fsdp2'"),
        ({"batch": 8}, "schedule.batch.end=4 must be batch=8"),
    ],
)
def test_a_wrong_field_is_refused_with_what_would_work(tmp_path, change, message):
    with pytest.raises(ConfigError) as error:
        tiny(tmp_path, **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "optim.lr=0.0 must be above zero"),
        ({"lr": math.nan}, "optim.lr=nan must be above zero"),
        ({"clip_norm": -1.0}, "optim.clip_norm=-1.0 must be above zero"),
        ({"name": "adamm"}, "name='adamm' is not known; try one of 'adamw', 'stable-adamw'"),
        ({"bits": 4}, "bits=4 is not known; try one of 8, 32"),
        ({"name": "adamw", "beta2_power": 0.5}, "beta2_power belongs to stable-adamw"),
        ({"name": "torch-adamw"}, "try optim.bits=32"),
    ],
)
def test_a_wrong_optimizer_is_refused_with_what_would_work(change, message):
    with pytest.raises(ConfigError) as error:
        OptimConfig(**change)
    assert message in str(error.value)


def test_two_warm_ups_are_refused_unless_forced(tmp_path):
    grows = BatchWarmup(start=2, increment=2, samples=8, end=4)
    with pytest.raises(ConfigError, match=r"both warm up.*schedule\.force=True"):
        tiny(tmp_path, start=8, grows=grows)
    schedule = tiny(tmp_path, start=8).schedule
    forced = replace(schedule, batch=grows, force=True)
    assert tiny(tmp_path, schedule=forced).schedule.batch is grows


def test_the_schedule_has_to_end_at_the_context(tmp_path):
    schedule = replace(tiny(tmp_path).schedule, seqlen=SeqLenWarmup(start=8, end=16, steps=4))
    with pytest.raises(ConfigError, match=rf"schedule\.seqlen\.end=16 must be model\.context={CONTEXT}"):
        tiny(tmp_path, schedule=schedule)


def test_captions_are_neither_cut_nor_compared_in_parts(tmp_path):
    run = tiny_clip(tmp_path)
    with pytest.raises(ConfigError, match="captions end with the token that is read out"):
        replace(run, schedule=replace(run.schedule, seqlen=replace(run.schedule.seqlen, start=8)))
    with pytest.raises(ConfigError, match="compared with all others of its batch"):
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
        ({"optim": {"learning_rate": 3}}, "optim.learning_rate is not a field of OptimConfig"),
    ],
)
def test_json_that_is_no_config_is_refused(tmp_path, change, message):
    with pytest.raises(ConfigError) as error:
        from_json(to_json(tiny(tmp_path)) | change)
    assert message in str(error.value)


def test_a_batch_that_never_grows_is_no_warm_up(tmp_path):
    assert tiny(tmp_path, start=8, grows=off(4)).schedule.batch.at(0) == 4
