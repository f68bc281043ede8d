"""Faults: killed at any moment, stopped by a signal, a full disk. The processes are real."""

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train.runs import (
    assert_same_run,
    count_steps,
    end,
    quiet,
    read_config,
    read_events,
    read_log,
    start,
    tiny,
    trajectory,
    wait_for,
    write_config,
)
from trimtab import cli
from trimtab.runs import RunLog, StepRecord, files, lock_folder, log
from trimtab.train import Checkpoints, RunError, checkpoint, read_lines, resume, train
from trimtab.train.processes import Processes

LONG = 40  # steps of a run that is killed on the way


def complete(run: Path) -> list[int]:
    return Checkpoints(run / "checkpoints", 1, Processes()).list_steps()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run without faults."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny(folder, start=8, steps=LONG, eval_every=20, checkpoint_every=5, keep=2)
    write_config(folder / "config.json", config)
    train(config, folder / "run", console=quiet())
    return folder


# --- Functions that run in separate processes


def begin(config: Path, run: Path) -> None:
    train(read_config(config), run)


def continue_run(run: Path) -> None:
    resume(run)


def begin_slowly(config: Path, run: Path) -> None:
    """A run whose steps leave time to interrupt it."""
    real = log.RunLog.step

    def step(*args, **kwargs):
        time.sleep(0.02)
        real(*args, **kwargs)

    log.RunLog.step = step
    sys.exit(cli.run(lambda: cli.runs.report_end(train(read_config(config), run), run)))


def stop_in_the_middle(config: Path, run: Path, reached: Path, nth: int) -> None:
    """Write half of the nth piece of the second checkpoint, then wait to be killed."""
    real, count = files.HashedWriter.write, 0

    def write(self, data):
        nonlocal count
        view = memoryview(data).cast("B")
        if ".tmp-step-00000010" in str(self.path):
            if count == nth:
                real(self, view[: len(view) // 2])
                reached.touch()
                time.sleep(60)
            count += 1
        real(self, data)

    files.HashedWriter.write = write
    begin(config, run)


def stop_before_the_name(config: Path, run: Path, reached: Path) -> None:
    """Everything is written, nothing is renamed."""
    real = checkpoint.sync_folder

    def sync(path):
        if ".tmp-step-00000010" in str(path):
            reached.touch()
            time.sleep(60)
        real(path)

    checkpoint.sync_folder = sync
    begin(config, run)


def stop_in_a_removal(config: Path, run: Path, reached: Path) -> None:
    """Half of the oldest checkpoint is deleted."""
    real = shutil.rmtree

    def remove(path, *args, **kwargs):
        if ".old-" in str(path) and Path(path).exists():
            (Path(path) / "model.safetensors").unlink()
            reached.touch()
            time.sleep(60)
        real(path, *args, **kwargs)

    checkpoint.shutil.rmtree = remove
    begin(config, run)


def with_little_space(run: Path, most: int) -> None:
    """No file may grow beyond this many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    cli.main(["resume", str(run)])


# --- Killed


def killed(process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert end(process) == -signal.SIGKILL


def wait_for_a_step(run: Path, done: int, process) -> None:
    wait_for(lambda: count_steps(run) > done or not process.is_alive())


def kill_at_random(whole: Path, tmp_path: Path, kills: int, chosen: random.Random) -> None:
    run, done, hits = tmp_path / "run", 0, 0
    process = start(begin, whole / "config.json", run, output=tmp_path / "out")
    for _ in range(kills):
        wait_for_a_step(run, done, process)
        time.sleep(chosen.uniform(0, 0.2))
        if not process.is_alive():
            break  # it has ended already
        killed(process)
        hits += 1
        done = complete(run)[-1] if complete(run) else 0
        if not done:
            shutil.rmtree(run)
            process = start(begin, whole / "config.json", run, output=tmp_path / "out")
        else:
            for step in complete(run):
                Checkpoints(run / "checkpoints", 1, Processes()).verify(step)
            process = start(continue_run, run, output=tmp_path / "out")
    assert hits >= 1
    assert end(process) == 0, (tmp_path / "out").read_text()
    assert_same_run(run, whole / "run", LONG)
    list(read_lines(run / "events.jsonl"))  # every line is whole


def test_a_run_killed_at_random_ends_as_one_without_faults(whole, tmp_path):
    kill_at_random(whole, tmp_path, 3, random.Random())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_a_run_killed_ten_times_ends_as_one_without_faults(whole, tmp_path, number):
    kill_at_random(whole, tmp_path, 10, random.Random(number))


@pytest.mark.parametrize("nth", [0, 20, "state", "name"])
def test_killed_while_writing_a_checkpoint_the_one_before_is_the_last(whole, tmp_path, nth):
    run, reached = tmp_path / "run", tmp_path / "reached"
    pieces = 1 + len(names_of_tensors(whole))
    nth = pieces if nth == "state" else nth
    if nth == "name":
        process = start(stop_before_the_name, whole / "config.json", run, reached, output=tmp_path / "out")
    else:
        process = start(stop_in_the_middle, whole / "config.json", run, reached, nth, output=tmp_path / "out")
    wait_for(reached.exists, process)
    killed(process)
    assert (run / "checkpoints" / ".tmp-step-00000010").exists()
    assert complete(run) == [5]
    assert resume(run, console=quiet())["why"] == "done"
    assert not (run / "checkpoints" / ".tmp-step-00000010").exists()
    assert_same_run(run, whole / "run", LONG)


def names_of_tensors(whole: Path) -> list[str]:
    """Names of all tensors in a checkpoint: as many pieces are written, and the headers."""
    folder = whole / "run" / "checkpoints" / f"step-{LONG:08d}"
    parts = [load_file(folder / f"{name}.safetensors") for name in ("model", "optimizer")]
    return [name for part in parts for name in part] + ["header"]


def test_a_half_deleted_checkpoint_is_not_listed(whole, tmp_path):
    run, reached = tmp_path / "run", tmp_path / "reached"
    process = start(stop_in_a_removal, whole / "config.json", run, reached, output=tmp_path / "out")
    wait_for(reached.exists, process)
    killed(process)
    steps = complete(run)
    assert len(steps) == 2
    for step in steps:
        Checkpoints(run / "checkpoints", 1, Processes()).verify(step)
    assert resume(run, console=quiet())["why"] == "done"
    assert not list((run / "checkpoints").glob(".*"))


def test_a_run_killed_before_its_first_checkpoint_cannot_be_resumed(whole, tmp_path):
    run = tmp_path / "run"
    process = start(stop_in_the_middle, whole / "config.json", run, tmp_path / "no", -1, output=tmp_path / "out")
    wait_for(lambda: count_steps(run) >= 1, process)
    killed(process)
    for path in (run / "checkpoints").glob("*"):
        shutil.rmtree(path)
    with pytest.raises(RunError, match="has no complete checkpoint; train the run again"):
        resume(run, console=quiet())


def test_an_incomplete_line_is_removed(whole, tmp_path):
    run = shutil.copytree(whole / "run", tmp_path / "run")
    for name in ("log.jsonl", "events.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 9')
    assert len(read_log(run)) == LONG
    resume(run, console=quiet())
    assert trajectory(run) == trajectory(whole / "run")
    assert [event["event"] for event in read_lines(run / "events.jsonl")][-2:] == ["resumed", "done"]


# --- Stopped by a signal


@pytest.mark.parametrize(
    ("number", "code", "reason"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_stops_the_run_with_a_checkpoint(whole, tmp_path, number, code, reason):
    run = tmp_path / "run"
    process = start(begin_slowly, whole / "config.json", run, output=tmp_path / "out")
    wait_for(lambda: count_steps(run) >= 7, process)
    os.kill(process.pid, number)
    assert end(process) == code
    last = read_log(run)[-1]["step"]
    assert complete(run)[-1] == last < LONG
    assert read_events(run, "stopped")[0]["reason"] == reason
    assert f"{reason}: {last} steps" in (tmp_path / "out").read_text()
    assert not (run / "result.json").exists()
    assert resume(run, console=quiet())["why"] == "done"
    assert_same_run(run, whole / "run", LONG)


def save_slowly(config: Path, run: Path, reached: Path) -> None:
    def save(*_, **__):
        reached.touch()
        time.sleep(60)

    checkpoint.Checkpoints.save = save
    sys.exit(cli.run(lambda: cli.runs.report_end(train(read_config(config), run), run)))


def test_a_second_ctrl_c_does_not_wait(whole, tmp_path):
    process = start(save_slowly, whole / "config.json", tmp_path / "run", tmp_path / "reached", output=tmp_path / "out")
    wait_for((tmp_path / "reached").exists, process)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.1)  # or the two would be one
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(20)
    assert process.exitcode == 130
    assert "error: interrupted; nothing was saved" in (tmp_path / "out").read_text()
    assert "Traceback" not in (tmp_path / "out").read_text()


# --- A full disk


@pytest.fixture
def half(tmp_path) -> Path:
    """A run of twelve steps that was stopped at step 4."""
    train(tiny(tmp_path), tmp_path / "whole", console=quiet())
    run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in (8, 12):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    (run / "checkpoints" / "best.json").unlink()
    return run


def test_a_full_disk_prevents_checkpoints_but_does_not_end_the_run(half, tmp_path):
    process = start(with_little_space, half, 20_000, output=tmp_path / "out")  # weights take more
    assert end(process) == 0, (tmp_path / "out").read_text()
    assert complete(half) == [4]
    Checkpoints(half / "checkpoints", 1, Processes()).verify(4)
    assert {path.name for path in (half / "checkpoints").iterdir()} == {"step-00000004"}
    assert [event["step"] for event in read_events(half, "checkpoint failed")] == [8, 12]
    assert (
        "step 8  no checkpoint: File too large; earlier ones are intact, training continues"
        in (tmp_path / "out").read_text()
    )
    assert trajectory(half) == trajectory(tmp_path / "whole")
    # With space again, it resumes from the last checkpoint.
    assert resume(half, console=quiet())["why"] == "done"
    assert_same_run(half, tmp_path / "whole", 12)


def test_a_log_that_cannot_grow_has_complete_lines_and_the_run_continues(half, tmp_path):
    lines = (half / "log.jsonl").read_bytes().splitlines(keepends=True)
    room = sum(map(len, lines[:6])) + 10  # two more lines, and a bit of the next
    assert (half / "events.jsonl").stat().st_size < room
    process = start(with_little_space, half, room, output=tmp_path / "out")
    assert end(process) == 0, (tmp_path / "out").read_text()
    assert "cannot write the log: File too large; its lines are kept" in (tmp_path / "out").read_text()
    assert [line["step"] for line in read_log(half)] in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    assert resume(half, console=quiet())["why"] == "done"
    assert_same_run(half, tmp_path / "whole", 12)


def write_step(mine: RunLog, number: int) -> None:
    clocks = {"samples": 0, "tokens": 0, "seconds": 0.0, "warmup_steps": None, "warmup_tokens": None}
    mine.step(StepRecord(step=number, **clocks, step_seconds=0.0, loss=1.0, lr=1.0, length=1, batch=1, grad_norm=1.0))


def test_pending_lines_are_written_when_there_is_space(tmp_path):
    mine = RunLog(tmp_path)
    write_step(mine, 1)
    lines = mine._files[mine.paths.log]
    with open("/dev/full", "wb", buffering=0) as full:
        lines.file, real = full, lines.file
        write_step(mine, 2)
        write_step(mine, 3)
        assert mine.pending_error == "No space left on device"
    lines.file = real
    write_step(mine, 4)
    assert mine.pending_error is None
    mine.close()
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3, 4]


def test_no_space_for_the_result_is_an_error_of_one_line(half, tmp_path):
    process = start(without_a_result, half, output=tmp_path / "out")
    assert end(process) == 1
    assert "error: [Errno 28] No space left on device" in (tmp_path / "out").read_text()
    assert "Traceback" not in (tmp_path / "out").read_text()
    assert not (half / "result.json").exists()
    assert complete(half)[-1] == 12


def without_a_result(run: Path) -> None:
    real = files.replace_bytes

    def write(path, data):
        if "result" in path.name:
            raise OSError(28, "No space left on device")
        return real(path, data)

    files.replace_bytes = write
    cli.main(["resume", str(run)])


# --- No permission


def as_nobody(config: Path, run: Path) -> None:
    """Root may write anywhere, so another user trains."""
    read = read_config(config)
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    sys.exit(cli.run(lambda: cli.runs.report_end(train(read, run), run)))


def test_without_permission_nothing_is_written(whole, tmp_path):
    with tempfile.TemporaryDirectory() as closed:  # pytest's own folders would not even let others pass
        Path(closed).chmod(0o755 if os.getuid() == 0 else 0o555)
        run = Path(closed) / "deep" / "run"
        process = start(as_nobody, whole / "config.json", run, output=tmp_path / "out")
        assert end(process) == 2
        text = (tmp_path / "out").read_text()
        assert text == f"error: cannot write to {run}: no permission to write in {closed}\n"
        assert os.listdir(closed) == []


# --- Two trainings of one folder


def test_a_folder_in_which_a_run_trains_is_refused(whole, tmp_path):
    config = write_config(tmp_path / "config.json", replace(read_config(whole / "config.json"), steps=10_000))
    process = start(begin, config, tmp_path / "run", output=tmp_path / "out")
    try:
        wait_for(lambda: complete(tmp_path / "run"), process)
        before = count_steps(tmp_path / "run")
        with pytest.raises(RunError, match=rf"is in use by process {process.pid}; wait for it"):
            resume(tmp_path / "run", console=quiet())
        wait_for(lambda: count_steps(tmp_path / "run") > before, process)  # it continues
    finally:
        process.kill()
        process.join()
    short = replace(read_config(config), steps=count_steps(tmp_path / "run") + 1)
    assert resume(tmp_path / "run", short, force=True, console=quiet())["why"] == "done"
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_a_run_trains_inside_a_folder_that_is_locked(tmp_path):
    with lock_folder(tmp_path / "study"):
        assert train(tiny(tmp_path, steps=2), tmp_path / "study" / "cell", console=quiet())["why"] == "done"
