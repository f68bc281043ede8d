"""Records: what is written is read back; what is missing, broken or unknown does not stop the reader."""

import json
import math
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.runs import End, Event, EventKind, Failure, Result, RunFolder, RunLog, SignalRecord, StepRecord
from trimtab.runs.records import LayerSignal, TensorSignal

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("why", "step", "loss", "event", "time", "reason", "usual", "value", "kind", "tensors", "layers", "totals")
KEYS += ("validation_loss", "seconds", "skipped", "cell", "error")


def step_record(step: int, **changes: float) -> StepRecord:
    values = {"samples": 4 * step, "tokens": 128 * step, "seconds": 0.5 * step, "warmup_steps": None}
    values |= {"warmup_tokens": None, "step_seconds": 0.5, "loss": 2.5, "lr": 1e-3, "length": 32, "batch": 4}
    return StepRecord(step=step, **(values | {"grad_norm": 1.0} | changes))


def test_a_result_is_unchanged_by_json():
    result = Result(why=End.DIVERGED, step=7, samples=28, tokens=100, seconds=1.5, validation_loss=2.0, waited_s=0.1)
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result
    compiled = Result(why=End.DONE, step=1, seconds=1.0, compilations=2, most_compilations=3)
    assert Result.from_json(compiled.to_json()) == compiled
    assert "compilations" not in result.to_json()


def test_steps_events_and_signals_are_read_as_they_were_written(tmp_path):
    log, folder = RunLog(tmp_path), RunFolder(tmp_path)
    log.step(step_record(1))
    log.step(step_record(2, rms_max=1.5, loss=math.nan))
    log.signals({"step": 2, "loss": 1.23456789, "tensors": {"w": {"rms": 2.0}}, "layers": {}, "totals": {"logz": 3.0}})
    log.event(EventKind.EVALUATED, step=2, loss=2.25, tokens=256)
    log.event(EventKind.STOPPED, reason="interrupted")
    log.close()
    assert folder.read_last_step() == step_record(2, rms_max=1.5).to_json() | {"loss": None}
    evaluated, stopped = folder.read_events()
    assert (evaluated.kind, evaluated.step, evaluated.loss) == (EventKind.EVALUATED, 2, 2.25)
    assert evaluated.values == {"tokens": 256}
    assert (stopped.kind, stopped.reason, stopped.step) == (EventKind.STOPPED, "interrupted", None)
    line = SignalRecord.from_json(json.loads(folder.signals.read_text()))
    assert line == SignalRecord(2, 1.2346, {"w": {"rms": 2.0}}, {}, {"logz": 3.0})


def test_an_alarm_is_read_from_its_event():
    fields = {"kind": "rms spike", "where": "head", "signal": "rms", "value": 3.0, "usual": [1.0, 2.0], "advice": "a"}
    alarm = Event.from_json({"event": "alarm", "step": 3, **fields}).alarm
    assert (alarm.kind, alarm.where, alarm.value, alarm.usual) == ("rms spike", "head", 3.0, (1.0, 2.0))
    assert math.isnan(Event.from_json({"event": "alarm", "usual": 3}).alarm.usual[0])


def test_an_unknown_end_or_event_keeps_its_text():
    result = Result.from_json({"why": "out of memory", "step": 3})
    assert result.why == "out of memory"
    assert result.to_json()["why"] == "out of memory"
    assert type(Result.from_json({"why": "not finite"}).why) is End
    assert Event.from_json({"event": "merged", "step": 1, "with": 2}).kind == "merged"
    assert "merged" not in set(EventKind)


def test_a_run_that_was_stopped_from_outside_or_could_not_be_saved_is_resumable():
    assert [end for end in End if end.resumable] == [End.INTERRUPTED, End.TERMINATED, End.NOT_SAVED]


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first example includes the imports
@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_reading_accepts_any_json(record):
    for kind in (Result, Event, SignalRecord, Failure):
        kind.from_json(record)
    assert isinstance(Event.from_json(record).alarm.kind, str)
    assert isinstance(Result.from_json(record).step, int)


@pytest.mark.parametrize("value", [None, "3", True, [3], {}])
def test_what_is_not_a_number_is_nan_or_none(value):
    assert math.isnan(Event.from_json({"loss": value}).loss)
    assert Event.from_json({"step": value}).step is None
    assert Result.from_json({"step": value}).step == 0


def test_the_watcher_computes_the_signals_that_records_name():
    from trimtab.watch.signals import NAMES

    assert set(get_args(TensorSignal)) == set(NAMES)


def test_the_watcher_computes_the_layer_signals_that_records_name():
    import torch

    from trimtab.nn import GPT, GPTConfig
    from trimtab.optim import AdamW
    from trimtab.watch import Watch

    model = GPT(GPTConfig(depth=1, width=32, heads=2, vocab=17, context=8, linear="switchback"))
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    watch = Watch(model, optimizer, every=1, deep_every=1)
    tokens = torch.arange(16).view(2, 8)
    for _ in range(2):
        loss = model(tokens, tokens).loss
        loss.backward()
        optimizer.step()
        watch.step(loss)
    found = {name for signals in watch.record["layers"].values() for name in signals}
    assert found == set(get_args(LayerSignal))
