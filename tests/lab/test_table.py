"""The table of a sweep fits its screen, knows where cells are, and says how long it will take."""

import json
import math
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.lab.sweeps import small_study
from trimtab.lab.study import Size, Study
from trimtab.lab.table import State, TableView, describe, draw, estimate_left, open_view, read_end
from trimtab.runs import RunFolder


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return small_study(tmp_path, lrs=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1))


def states_of(study: Study) -> dict[str, State]:
    """Two complete, one of them early; one runs, one failed, the rest waits."""
    states = {cell.name: State(cell) for cell in study.cells()}
    done, early, running, failed = list(states.values())[:4]
    done.status, done.loss, done.seconds = "complete", 2.194, 20.0
    early.status, early.loss, early.early = "reused", 11.5, True
    running.status, running.loss, running.step, running.begun = "running", 3.05, 20, time.monotonic() - 10
    failed.status = "failed"
    return states


def drawn(study: Study, width: int) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    with console.file:
        console.print(draw(study, states_of(study), 2, width))
    return console.export_text().splitlines()


def test_a_wide_screen_has_losses_and_a_narrow_one_marks(study):
    wide, narrow = drawn(study, 100), drawn(study, 50)
    assert next(line for line in wide if line.startswith("1x16")).split()[2:7] == ["✓2.19", "✗11.5", "▸3.05", "!", "·"]
    assert next(line for line in narrow if line.startswith("1x16")).split()[2:7] == ["✓", "✗", "▸", "!", "·"]
    assert "3 of 14 cells, 1 running, 1 failed, about 2 min left" in wide


@pytest.mark.parametrize("width", [24, 40, 60, 100])
def test_no_line_is_wider_than_the_screen(study, width):
    lines = drawn(study, width)
    assert max(map(len, lines)) <= width
    assert any("14 cells" in line for line in lines)


def test_a_terminal_gets_a_picture_and_a_file_gets_lines(study):
    console = Console(force_terminal=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file, open_view(study, console) as view:
        assert isinstance(view, TableView)
        view.show(states_of(study), 2)


def test_the_loss_of_a_complete_run_is_its_last_evaluation(tmp_path):
    (tmp_path / "result.json").write_text('{"why": "done", "validation_loss": 1.5}')
    events = [{"event": "evaluated", "loss": 5.5}, {"event": "evaluated", "loss": 1.75}, {"event": "done"}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert read_end(tmp_path) == (1.75, False)
    (tmp_path / "result.json").write_text('{"why": "diverged"}')
    assert read_end(tmp_path) == (1.75, True)
    loss, early = read_end(tmp_path / "nothing")
    assert math.isnan(loss)
    assert not early


def test_the_time_left_follows_from_cells_of_the_same_size(tmp_path):
    study = small_study(tmp_path, sizes=(Size("a", 1, 16, 1), Size("b", 2, 16, 1)))
    states = {cell.name: State(cell) for cell in study.cells()}
    assert estimate_left(states, 2) is None
    small, large = (next(s for s in states.values() if s.cell.size == size) for size in ("a", "b"))
    large.status, large.seconds = "complete", 30.0
    # Two small ones and a large one, on one core: nothing is known of the small ones but that they are not larger.
    assert estimate_left(states, 1) == pytest.approx(90)
    small.status, small.seconds = "complete", 10.0
    assert estimate_left(states, 1) == pytest.approx(40)
    assert estimate_left(states, 2) == pytest.approx(30)  # the large one alone takes that long


def test_a_line_says_which_cell_with_which_loss(study):
    done, early, _, failed, *_ = states_of(study).values()
    assert describe(done) == "1x16 plain lr 0.0003 seed 0: loss 2.19 in 20 s"
    assert describe(early) == "1x16 plain lr 0.001 seed 0: loss 11.50, stopped early"
    assert describe(failed).endswith("failed")


def test_the_last_step_is_read_from_the_end_of_the_log_and_only_if_it_is_complete(tmp_path):
    run = RunFolder(tmp_path)
    assert run.read_last_step() is None
    run.log.write_text("")
    assert run.read_last_step() is None
    run.log.write_text("".join(json.dumps({"step": i, "loss": 0.5}) + "\n" for i in range(5000)) + '{"step": 99')
    assert run.read_last_step() == {"step": 4999, "loss": 0.5}
