"""The live view shows a growing run, shows every NaN, and needs little memory for a long run."""

import io
import json
import math
import threading
import time

import pytest
from rich.console import Console

from trimtab.report.live import MISSING, POINTS, Curve, View, layer_of, show, sparkline

ALARM = {"event": "alarm", "step": 2, "kind": "rms spike", "where": "head.weight", "signal": "rms", "value": 2.50001}
ALARM |= {"usual": [0.51, 1.2], "advice": "Lower β₂"}
ALARM_WORDS = "step 2  rms spike  head.weight  rms 2.5 (usually 0.51 to 1.2). Lower β₂"


def drawn(view, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(view.render(width))
    return console.file.getvalue()


def append(folder, name, *records):
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def signals(step, rms, logit=3.0):
    tensors = {"blocks.0.mlp.weight": {"rms": rms}, "blocks.0.norm.weight": {"rms": 1.0}, "head.weight": {"rms": 1.0}}
    return {"step": step, "loss": 2.0, "tensors": tensors, "layers": {"blocks.0.attention": {"logit_max": logit}}}


@pytest.mark.parametrize(
    ("values", "width", "picture"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([5, 5, 5], 8, "▁▁▁"),
        ([0, math.nan, 7, math.inf], 8, f"▁{MISSING}█{MISSING}"),
        ([math.nan] * 3, 2, MISSING * 2),
        ([0, 0, 0, 7, 0, 0], 3, "▁█▁"),  # a spike between two columns is not lost
        ([], 5, ""),
    ],
)
def test_sparklines(values, width, picture):
    assert sparkline(values, width) == picture


def test_a_long_curve_keeps_its_spike_and_its_nan_in_little_memory():
    curve = Curve()
    for i in range(20_000):
        curve.add(9.0 if i == 7777 else math.nan if i == 12_345 else 1.0)
        assert len(curve.values) < POINTS
    assert max(v for v in curve.values if v == v) == 9.0
    assert sum(math.isnan(v) for v in curve.values) == 1
    assert "█" in curve.draw(40)
    assert MISSING in curve.draw(40)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer.blocks.11.attention.qkv.weight", "transformer.blocks.11"),
        ("visual.transformer.blocks.0", "visual.transformer.blocks.0"),
        ("visual.conv1.weight", "visual.conv1"),
        ("logit_scale", "logit_scale"),
        ("layers.3.experts.12.weight", "layers.3"),
    ],
)
def test_tensors_belong_to_blocks_or_modules(name, layer):
    assert layer_of(name) == layer


def test_one_frame_shows_loss_layers_and_alarms(tmp_path):
    append(tmp_path, "log", *({"step": i, "loss": 3.0 - i, "grad_norm": 0.5, "lr": 1e-3} for i in (1, 2)))
    append(tmp_path, "signals", signals(1, 1.0), signals(2, 4.25, logit=70.0))
    append(tmp_path, "events", {"event": "evaluated", "step": 1}, ALARM)
    console = Console(file=io.StringIO(), width=120)
    show(tmp_path, console=console)  # not a terminal: one frame, although the run has not ended
    text = console.file.getvalue()
    for part in ("running, step 2, lr 0.001", "loss", "▁", "grad_norm", "1 alarms", ALARM_WORDS):
        assert part in text
    row = next(line for line in text.splitlines() if line.startswith("blocks.0"))
    assert "4.25 ▁█" in row  # the highest of the block's tensors
    assert "70 ▁█" in row
    assert "evaluated" not in text


def test_a_view_reads_on_as_the_run_grows(tmp_path):
    view = View(tmp_path)
    view.update()
    assert "waiting for a step" in drawn(view)
    append(tmp_path, "log", {"step": 1, "loss": 3.5})
    view.update()
    assert "step 1" in drawn(view)
    append(tmp_path, "log", {"step": 2, "loss": None})
    append(tmp_path, "events", {"event": "skipped", "step": 2, "reason": "not finite"})
    view.update()
    assert "NaN" in drawn(view)
    assert "skipped  reason not finite" in drawn(view)
    assert not view.ended


@pytest.mark.parametrize("how", ["done", "stopped", "result"])
def test_a_run_ends_by_its_last_event_or_its_result(tmp_path, how):
    append(tmp_path, "log", {"step": 1, "loss": 3.5})
    view = View(tmp_path)
    view.update()
    assert not view.ended
    if how == "result":
        (tmp_path / "result.json").write_text('{"why": "done"}')
    else:
        append(tmp_path, "events", {"event": how, "step": 1})
    view.update()
    assert view.ended
    if how != "result":
        append(tmp_path, "events", {"event": "resumed", "step": 1})
        view.update()
        assert not view.ended


def test_only_the_most_alarming_layers_are_shown_when_there_are_too_many(tmp_path):
    tensors = {f"blocks.{i}.weight": {"rms": 1.0 + i / 100} for i in range(50)}
    append(tmp_path, "signals", {"step": 1, "tensors": tensors})
    view = View(tmp_path)
    view.update()
    text = drawn(view)
    assert "blocks.49 " in text
    assert "blocks.3 " not in text
    assert "... 20 more" in text


@pytest.mark.parametrize("width", [20, 40, 200])
def test_it_fits_any_terminal(tmp_path, width):
    append(tmp_path, "log", *({"step": i, "loss": float(i)} for i in range(1, 900)))
    append(tmp_path, "signals", *(signals(i, 1.0) for i in range(1, 900)))
    view = View(tmp_path)
    view.update()
    assert max(map(len, drawn(view, width).splitlines())) <= width


@pytest.mark.parametrize("usual", [None, [], [None, None]])
def test_an_alarm_without_numbers_is_shown(tmp_path, usual):
    append(tmp_path, "events", {"event": "alarm", "step": 3, "kind": "non-finite", "value": None, "usual": usual})
    view = View(tmp_path)
    view.update()
    assert "step 3  non-finite" in drawn(view)


def test_values_of_the_wrong_kind_are_no_numbers_and_no_reason_to_fail(tmp_path):
    append(tmp_path, "log", {"step": 1, "loss": "high"})
    append(tmp_path, "signals", {"step": 1, "tensors": {"a.weight": {"rms": None}, "b": 3}, "layers": []})
    view = View(tmp_path)
    view.update()
    assert drawn(view).count("NaN") == 2


def test_on_a_terminal_it_follows_until_the_run_ends(tmp_path):
    append(tmp_path, "log", {"step": 1, "loss": 3.5})
    console = Console(file=io.StringIO(), width=200, height=30, force_terminal=True)
    thread = threading.Thread(target=show, args=(tmp_path,), kwargs={"console": console, "every": 0.01}, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    append(tmp_path, "log", {"step": 2, "loss": 2.5})
    append(tmp_path, "events", {"event": "done", "step": 2})
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert "ended, step 2" in console.file.getvalue()


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        show(tmp_path / "nothing")
