"""The loop's watcher: it changes no results, continues after a resume, names the tensor at fault, and rolls back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import assert_same_run, hashes, quiet, read_events, read_log, tiny, trajectory
from tests.train.test_loop import changed_task, go
from trimtab.nn import ConfigError
from trimtab.runs.reader import read_run
from trimtab.train import RunError, loop, read_lines, resume
from trimtab.train.config import WatchConfig

EVERY = WatchConfig(every=1, deep_every=2, record_every=1, ignore=0)


def signals(run: Path) -> list[dict[str, Any]]:
    return list(read_lines(run / "signals.jsonl"))


def test_a_watched_run_is_the_unwatched_run_bit_for_bit(tmp_path):
    go(tiny(tmp_path, watch=EVERY), tmp_path / "watched")
    go(tiny(tmp_path, watch=WatchConfig(every=0)), tmp_path / "alone")
    assert trajectory(tmp_path / "watched") == trajectory(tmp_path / "alone")
    assert hashes(tmp_path / "watched", 12) == hashes(tmp_path / "alone", 12)
    assert not (tmp_path / "alone" / "signals.jsonl").exists()


def test_signals_of_tensors_layers_and_totals_are_recorded(tmp_path):
    go(tiny(tmp_path, watch=EVERY), tmp_path / "run")
    lines = signals(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[3]["tensors"]["transformer.blocks.0.mlp.up.weight"]["grad_rms"] > 0
    assert lines[3]["layers"]["transformer.blocks.0.attention"]["logit_max"] > 0
    assert "logz" in lines[3]["totals"]
    assert not lines[2]["layers"]  # only every second step
    run = read_run(tmp_path / "run")
    assert len(run.signals.tensors("rms")["head.weight"]) == 12


def test_few_lines_are_written_unless_there_is_an_alarm(tmp_path):
    go(tiny(tmp_path, watch=replace(EVERY, record_every=5)), tmp_path / "run")
    alarmed = {alarm["step"] for alarm in read_events(tmp_path / "run", "alarm")}
    assert [line["step"] for line in signals(tmp_path / "run")] == sorted({5, 10} | alarmed)


def test_a_resume_continues_the_watchers_windows(tmp_path):
    config = tiny(tmp_path, watch=EVERY)
    go(config, tmp_path / "whole")
    broken = shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    resume(broken, step=4, console=quiet())
    assert_same_run(broken, tmp_path / "whole", 12)
    assert signals(broken) == signals(tmp_path / "whole")
    states = [
        json.loads((run / "checkpoints/step-00000012/state.json").read_text()) for run in (broken, tmp_path / "whole")
    ]
    assert states[0]["watch"] == states[1]["watch"]


def test_a_checkpoint_from_before_there_was_a_watcher_still_loads(tmp_path):
    go(tiny(tmp_path, watch=WatchConfig(every=0)), tmp_path / "run")
    resume(tmp_path / "run", tiny(tmp_path, watch=EVERY), step=8, console=quiet())
    assert [line["step"] for line in signals(tmp_path / "run")] == [9, 10, 11, 12]


def test_the_size_of_the_model_is_in_the_config_file(tmp_path):
    go(tiny(tmp_path), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["params"] == 12 * 32**2


def breaks_at(step: int, parameter: str) -> Any:
    """A loss whose gradient for one parameter is NaN, once."""
    calls = [0]

    def change(real: Any) -> Any:
        def loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            calls[0] += 1
            found = real(model, batch)
            p = dict(model.named_parameters())[parameter]
            return found + (p * float("nan")).sum() * 0 if calls[0] == step else found

        return loss

    return change


def test_the_tensor_at_fault_is_named_though_the_step_was_skipped(tmp_path, monkeypatch):
    changed_task(monkeypatch, loss=breaks_at(7, "transformer.blocks.0.mlp.up.weight"))
    result = go(tiny(tmp_path, watch=EVERY), tmp_path / "run")
    assert result["skipped"] == 1
    alarms = [
        a for a in read_events(tmp_path / "run", "alarm") if a["kind"] == "non-finite" and a["signal"] == "grad_rms"
    ]
    assert [(a["step"], a["where"]) for a in alarms] == [(7, "transformer.blocks.0.mlp.up.weight")]


def test_it_is_named_at_a_step_that_is_not_measured(tmp_path, monkeypatch):
    changed_task(monkeypatch, loss=breaks_at(7, "head.weight"))
    go(tiny(tmp_path, watch=WatchConfig(every=5, deep_every=5, record_every=5)), tmp_path / "run")
    alarms = [a for a in read_events(tmp_path / "run", "alarm") if a["signal"] == "grad_rms"]
    assert [(a["step"], a["kind"], a["where"]) for a in alarms] == [(7, "non-finite", "head.weight")]
    assert [line["step"] for line in signals(tmp_path / "run")] == [5, 10]


def test_an_alarm_rolls_the_run_back_and_the_batch_is_skipped(tmp_path, monkeypatch):
    """After the rollback other batches follow, and the run completes."""
    changed_task(monkeypatch, loss=breaks_at(7, "head.weight"))
    watch = replace(EVERY, roll_back=("non-finite",))
    result = go(tiny(tmp_path, watch=watch), tmp_path / "run")
    assert (result["why"], result["step"]) == ("done", 12)
    (back,) = read_events(tmp_path / "run", "rolled back")
    assert (back["step"], back["to"]) == (7, 4)
    log = read_log(tmp_path / "run")
    assert [line["step"] for line in log] == list(range(1, 13))
    assert [line["step"] for line in signals(tmp_path / "run")] == list(range(1, 13))
    assert result["skipped"] == 0  # that step is not part of the run any more
    state = json.loads((tmp_path / "run" / "checkpoints/step-00000012/state.json").read_text())
    assert state["data"]["position"] == (12 + 3) * 4  # steps 5, 6 and 7 were given other rows


def test_the_number_of_rollbacks_is_limited(tmp_path, monkeypatch):
    def always(real: Any) -> Any:
        return lambda model, batch: real(model, batch) * (float("nan") if len(seen) > 5 or seen.append(1) else 1.0)

    seen: list[int] = []
    changed_task(monkeypatch, loss=always)
    config = tiny(tmp_path, watch=replace(EVERY, roll_back=("non-finite",)), stop_after_skips=3)
    assert go(config, tmp_path / "run")["why"] == "not finite"
    assert len(read_events(tmp_path / "run", "rolled back")) == loop.MAX_ROLLBACKS


def test_without_a_checkpoint_there_is_nothing_to_roll_back_to(tmp_path, monkeypatch):
    changed_task(monkeypatch, loss=breaks_at(2, "head.weight"))
    result = go(tiny(tmp_path, watch=replace(EVERY, roll_back=("non-finite",))), tmp_path / "run")
    assert (result["why"], result["skipped"]) == ("done", 1)
    (left,) = read_events(tmp_path / "run", "not rolled back")
    assert "there is no checkpoint yet" in left["reason"]


def test_a_resume_may_change_the_intervals_of_the_watcher_but_not_its_actions(tmp_path):
    go(tiny(tmp_path), tmp_path / "run")
    resume(tmp_path / "run", tiny(tmp_path, watch=WatchConfig(every=2)), step=8, console=quiet())
    with pytest.raises(RunError, match=r"watch\.skip was"):
        resume(tmp_path / "run", tiny(tmp_path, watch=WatchConfig(skip=("non-finite",))), step=8, console=quiet())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"every": -1}, "watch.every=-1 is too small; try watch.every=0"),
        ({"record_every": 0}, "watch.record_every=0"),
        ({"skip": ("loss spike",)}, "watch.skip cannot be started by alarm 'loss spike'"),
        ({"roll_back": ("nan",)}, "watch.roll_back cannot be started by alarm 'nan'"),
    ],
)
def test_bad_settings_are_refused(bad, words):
    with pytest.raises(ConfigError, match=words):
        WatchConfig(**bad)
