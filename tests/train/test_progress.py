"""Progress: one updated line on a terminal, plain lines elsewhere, nothing from other processes."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.train.runs import tiny
from trimtab.recipes import gpt_tiny
from trimtab.runs import StepRecord
from trimtab.train import train
from trimtab.train.progress import ProgressLine


def record(step: int, *, loss: float = 2.5) -> StepRecord:
    clocks = {"samples": 4 * step, "tokens": 128 * step, "seconds": 0.5 * step, "warmup_steps": 1, "warmup_tokens": 1}
    rest = {"lr": 3e-3, "length": 32, "batch": 4, "grad_norm": 1.0, "step_seconds": 0.5}
    return StepRecord(step=step, **clocks, loss=loss, **rest)


def shown(terminal: bool, *, shows: bool = True, **changes: object) -> tuple[ProgressLine, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    config = replace(gpt_tiny(), **{"steps": 100, "log_every": 10, **changes})
    return ProgressLine(config, shows=shows, console=console), out


def test_without_a_terminal_there_is_a_plain_line_every_few_steps():
    line, out = shown(terminal=False)
    for step in range(1, 31):
        line.show(record(step))
    line.print("step 30  validation loss 2.0000")
    line.close()
    lines = out.getvalue().splitlines()
    assert [text.split("  ")[0] for text in lines] == ["step 1", "step 10", "step 20", "step 30", "step 30"]
    assert "loss 2.5000  lr 3.00e-03  length 32  256 tokens/s" in lines[1]
    assert lines[1].endswith("s left")
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_one_line_is_updated():
    line, out = shown(terminal=True)
    for step in range(1, 31):
        line.show(record(step))
    line.progress.refresh()
    line.print("validation loss 2.0000")
    line.close()
    text = out.getvalue()
    assert "\x1b[" in text  # moved and cleared
    assert "loss 2.5000  lr 3.00e-03  length 32  256 tokens/s" in text
    assert "validation loss 2.0000" in text
    assert text.endswith("\x1b[2K")  # and removed at the end


def test_the_time_left_is_by_tokens_if_they_end_the_run():
    line, _ = shown(terminal=True, tokens=1280)
    line.show(record(5))
    task = line.progress.tasks[0]
    assert (task.completed, task.total) == (640, 1280)
    line.show(record(11))
    assert task.completed == 1280
    line.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_other_processes_show_nothing(terminal):
    line, out = shown(terminal=terminal, shows=False)
    line.show(record(10))
    line.print("hello")
    line.close()
    assert out.getvalue() == ""


def test_a_loss_that_is_nan_can_be_shown():
    line, out = shown(terminal=False, log_every=1)
    line.show(record(2, loss=float("nan")))
    assert "loss nan" in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_shows_its_steps_and_evaluations(tmp_path, terminal):
    out = io.StringIO()
    train(tiny(tmp_path), tmp_path / "run", console=Console(file=out, force_terminal=terminal, width=120))
    assert "step 12  validation loss" in out.getvalue()
    assert ("\x1b[" in out.getvalue()) is terminal
