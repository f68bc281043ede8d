"""Runs of version 0.1.0 can be resumed, evaluated and sampled from; runs of a later version are refused."""

import pytest

from tests.runs.old import INTERRUPTED, unpack
from tests.train.runs import quiet, read_log, tiny
from trimtab.recipes import gpt_tiny
from trimtab.runs import RunError, RunFolder, read_run, replace_json, require_json
from trimtab.train import BatchConfig, SeqLenConfig, evaluate, resume, sample, train
from trimtab.train.config import ConfigError, flatten, from_json, load_config, to_json, upgrade


@pytest.fixture
def v1(tmp_path, monkeypatch):
    folder = unpack(tmp_path)
    monkeypatch.chdir(folder)
    return folder


def test_old_configs_load_with_schedules_that_end_at_the_context_and_the_batch(v1):
    config, saved = load_config(v1 / "run")
    old = saved.config["schedule"]
    assert (old["seqlen"]["end"], old["batch"]["end"]) == (16, 4)
    assert config.schedule.seqlen == SeqLenConfig(start=8, steps=133)
    assert config.schedule.batch == BatchConfig()
    assert (config.seqlen_warmup.end, config.batch_warmup.end) == (16, 4)
    constant, _ = load_config(v1 / INTERRUPTED)
    assert constant.schedule.seqlen.start is None
    for path in v1.glob("*/cells/**/config.json"):
        load_config(path.parent)


def test_the_upgrade_keeps_every_other_field_and_a_new_config_as_it_is(v1):
    config, saved = load_config(v1 / "run")
    old, new = flatten(upgrade(saved.config)), flatten(to_json(config))
    assert {name: new.get(name) for name in old} == old
    defaults = flatten(to_json(gpt_tiny()))
    assert all(new[name] == defaults[name] for name in new.keys() - old.keys())  # fields that came later
    assert upgrade(to_json(config)) == to_json(config)


def test_the_upgrade_of_a_user_defined_model_keeps_the_length_of_a_row(v1):
    _, saved = load_config(v1 / "run")
    schedule = {**saved.config["schedule"], "seqlen": saved.config["schedule"]["seqlen"] | {"start": 16}}
    own = {**saved.config, "kind": "module", "model": {"build": "a:b", "options": {}}, "schedule": schedule}
    config = from_json(upgrade(own))
    assert (config.model.context, config.schedule.seqlen.start) == (16, None)
    with pytest.raises(ConfigError, match=r"schedule\.seqlen\.end=16 is not model\.context=8"):
        upgrade({**saved.config, "model": saved.config["model"] | {"context": 8}})


def test_an_interrupted_run_continues_to_its_end(v1):
    folder = v1 / INTERRUPTED
    before = read_log(folder)
    result = resume(folder, console=quiet())
    assert result["why"] == "done"
    assert read_log(folder)[:22] == before
    assert [line["step"] for line in read_log(folder)] == list(range(1, 121))
    assert RunFolder(folder).complete


def test_a_complete_run_is_evaluated_and_sampled_from(v1):
    evaluated = [event.loss for event in read_run("run").events if event.kind == "evaluated"]
    found = evaluate(v1 / "run", batches=2)
    assert found["loss"] == pytest.approx(evaluated[-1], rel=1e-4)
    assert len(sample(v1 / "run", prompt="the", tokens=5)) >= 3


def test_a_run_of_a_later_version_can_only_be_reported(tmp_path):
    folder = RunFolder(tmp_path / "run")
    train(tiny(tmp_path, steps=2), folder.path, console=quiet())
    replace_json(folder.config, require_json(folder.config) | {"format": 3})
    assert read_run(folder.path).log.steps.tolist() == [1, 2]
    for use in (resume, evaluate, sample):
        with pytest.raises(RunError, match=r"newer Trimtab \(format 3.*logs can be reported"):
            use(folder.path)
