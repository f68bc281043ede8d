"""Faults: killed at any moment, stopped by a signal, a full disk. The processes are real."""

import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.test_faults import call, look
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
    write_words,
)
from trimtab import cli
from trimtab.data import open_corpus
from trimtab.runs import RunFolder, RunLog, StepRecord, files, lock_folder, log, replace_json
from trimtab.train import (
    CheckpointError,
    Checkpoints,
    OptimConfig,
    RunError,
    checkpoint,
    evaluate,
    loop,
    read_lines,
    resume,
    train,
)
from trimtab.train.config import WatchConfig, load_config
from trimtab.train.processes import Processes

LONG = 40  # steps of a run that is killed on the way
SHORT = 4  # of one that is killed at every file operation


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
    sys.exit(cli.run(lambda: cli.runs.report_end(train(read_config(config), run))))


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
        time.sleep(chosen.uniform(0, 0.2 if hits else 0.01))  # on a fast machine the whole run takes little more
        process.kill()
        if end(process) != -signal.SIGKILL:
            break  # it had ended already
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


def test_a_run_killed_before_its_first_checkpoint_starts_again(whole, tmp_path):
    run = tmp_path / "run"
    process = start(stop_in_the_middle, whole / "config.json", run, tmp_path / "no", -1, output=tmp_path / "out")
    wait_for(lambda: count_steps(run) >= 1, process)
    killed(process)
    for path in (run / "checkpoints").glob("*"):
        shutil.rmtree(path)
    assert resume(run, console=quiet())["why"] == "done"
    assert_same_run(run, whole / "run", LONG)


def test_an_incomplete_line_is_removed(whole, tmp_path):
    run = shutil.copytree(whole / "run", tmp_path / "run")
    for name in ("log.jsonl", "events.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 9')
    assert len(read_log(run)) == LONG
    resume(run, step=LONG, console=quiet())
    assert trajectory(run) == trajectory(whole / "run")
    assert [event["event"] for event in read_lines(run / "events.jsonl")][-2:] == ["resumed", "done"]


# --- Killed at every file operation


WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def count_operations(folder: Path, at: int) -> Iterator[int]:
    """Number the operations that change files in a folder: Python reports most of them, and writes and syncs are
    wrapped. Before operation `at` the process kills itself; a write is then half done."""
    number, inside = itertools.count(1), os.fsencode(folder)

    def note(half: Callable[[], Any] = lambda: None) -> None:
        if next(number) == at:
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        path = args[0] if args and isinstance(args[0], str | bytes | os.PathLike) else None
        if event not in WRITES or path is None or not os.fsencode(path).startswith(inside):
            return
        if event != "open" or (isinstance(args[2], int) and args[2] & WRITING):
            note()

    real_write, real_lines, real_sync = files.HashedWriter.write, log._Lines._write, os.fsync

    def write(self: Any, data: Any) -> None:
        view = memoryview(data).cast("B")
        note(lambda: real_write(self, view[: len(view) // 2]))
        real_write(self, data)

    def append(self: Any) -> None:
        note(lambda: self.file.write(self.pending[: len(self.pending) // 2]))
        real_lines(self)

    def sync(descriptor: int) -> None:
        note()
        real_sync(descriptor)

    files.HashedWriter.write, log._Lines._write, os.fsync = write, append, sync
    sys.addaudithook(audit)
    return number


def begin_and_die(config: Path, run: Path, at: int, counted: Path) -> None:
    """Train, or continue; the number of operations goes to a file."""
    number = count_operations(run, at)
    if (run / "config.json").exists():
        resume(run)
    else:
        train(read_config(config), run)
    counted.write_text(str(next(number) - 1))


def kill_at(at: int, short: Path, tmp_path: Path) -> None:
    """Killed at one operation, and then at the same operation of the resume."""
    run, out = tmp_path / f"run-{at}", tmp_path / "out"
    for expected in (-signal.SIGKILL, None):
        process = start(begin_and_die, short / "config.json", run, at, tmp_path / "counted", output=out)
        code = end(process)
        assert code in (-signal.SIGKILL, 0), f"operation {at}: {out.read_text()}"
        assert expected is None or code == expected
        list(read_lines(run / "events.jsonl")) if (run / "events.jsonl").exists() else ()
    process = start(begin_and_die, short / "config.json", run, 0, tmp_path / "counted", output=out)
    assert end(process) == 0, f"operation {at}: {out.read_text()}"
    assert_same_run(run, short / "run", SHORT)
    assert signals_of(run) == signals_of(short / "run")
    assert RunFolder(run).intact
    assert not list(run.rglob(".*")), f"operation {at} leaves files"
    best = Checkpoints(run / "checkpoints", 1, Processes())
    assert best.best == Checkpoints(short / "run" / "checkpoints", 1, Processes()).best
    shutil.rmtree(run)


def signals_of(run: Path) -> list[Any]:
    return list(read_lines(run / "signals.jsonl"))


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> tuple[Path, int]:
    """A run of Lion with signals, and the number of its file operations."""
    folder = tmp_path_factory.mktemp("short")
    often = WatchConfig(every=1, deep_every=2, record_every=3)
    changes = {"steps": SHORT, "eval_every": 2, "checkpoint_every": 2, "eval_batches": 1, "keep": 1}
    config = tiny(folder, optim=OptimConfig(name="lion", lr=1e-3), watch=often, **changes)
    write_config(folder / "config.json", config)
    open_corpus(config.data.corpus, cache=config.data.cache)  # its files are not those of the run
    process = start(begin_and_die, folder / "config.json", folder / "run", 0, folder / "count", output=folder / "out")
    assert end(process) == 0, (folder / "out").read_text()
    return folder, int((folder / "count").read_text())


def test_a_run_killed_at_some_file_operations_ends_as_one_without_faults(short, tmp_path, record_property):
    folder, count = short
    chosen = random.Random().sample(range(1, count + 1), 8)
    for at in chosen:
        kill_at(at, folder, tmp_path)
    record_property("kills", len(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_a_run_killed_at_every_file_operation_ends_as_one_without_faults(short, tmp_path, part, record_property):
    folder, count = short
    chosen = range(1 + part, count + 1, 8)
    for at in chosen:
        kill_at(at, folder, tmp_path)
    record_property("kills", len(chosen))


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
    sys.exit(cli.run(lambda: cli.runs.report_end(train(read_config(config), run))))


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
    (run / "result.json").unlink()
    return run


def test_a_full_disk_prevents_checkpoints_but_does_not_end_the_run(half, tmp_path):
    process = start(with_little_space, half, 20_000, output=tmp_path / "out")  # weights take more
    assert end(process) == 1, (tmp_path / "out").read_text()
    assert "not saved: 12 steps" in (tmp_path / "out").read_text()
    assert not (half / "result.json").exists()
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
    assert end(process) == 1, (tmp_path / "out").read_text()
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
    sys.exit(cli.run(lambda: cli.runs.report_end(train(read, run))))


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


def begin_in_a_new_folder(config: Path, out: Path) -> None:
    train(read_config(config), out, numbered=True)


def test_two_runs_that_start_together_get_two_folders(whole, tmp_path):
    config = write_config(tmp_path / "config.json", replace(read_config(whole / "config.json"), steps=5))
    pair = [start(begin_in_a_new_folder, config, tmp_path / "run", output=tmp_path / f"out{i}") for i in range(2)]
    assert [end(process) for process in pair] == [0, 0]
    one, two = tmp_path / "run", tmp_path / "run-2"
    assert RunFolder(one).intact
    assert RunFolder(two).intact
    assert_same_run(one, two, 5)


def test_of_two_runs_into_one_folder_one_is_refused(whole, tmp_path):
    config = write_config(tmp_path / "config.json", replace(read_config(whole / "config.json"), steps=5))
    pair = [start(begin, config, tmp_path / "run", output=tmp_path / f"out{i}") for i in range(2)]
    assert sorted(end(process) for process in pair) == [0, 1]
    assert RunFolder(tmp_path / "run").intact
    said = "".join((tmp_path / f"out{i}").read_text() for i in range(2))
    assert "RunError" in said
    assert "is in use by" in said or "already holds a run" in said


def test_of_two_resumes_one_is_refused(half, tmp_path):
    pair = [start(continue_run, half, output=tmp_path / f"out{i}") for i in range(2)]
    codes = sorted(end(process) for process in pair)
    assert codes in ([0, 1], [0, 0])  # the second may come when the first has finished
    assert_same_run(half, tmp_path / "whole", 12)
    assert RunFolder(half).intact


# --- A complete run


def test_a_resume_that_cannot_go_on_removes_nothing(half, tmp_path):
    run = shutil.copytree(tmp_path / "whole", tmp_path / "complete")
    (run / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"")
    before = look(run)
    with pytest.raises(CheckpointError, match=r"step 12 can be used instead"):
        resume(run, step=4, console=quiet())
    with pytest.raises(RunError, match="no checkpoint of step 5"):
        resume(run, step=5, console=quiet())
    write_words(tmp_path / "words.txt", seed=1)
    with pytest.raises(RunError, match="the data has changed"):
        resume(run, step=8, console=quiet())
    assert look(run) == before


def test_a_run_that_ended_as_not_finite_stays_so(tmp_path, monkeypatch):
    config = tiny(tmp_path, steps=4)
    monkeypatch.setattr(loop._Run, "_clip", lambda self: float("nan"))
    config = replace(config, stop_after_skips=2)
    assert train(config, tmp_path / "run", console=quiet())["why"] == "not finite"
    monkeypatch.undo()
    before = look(tmp_path / "run")
    assert resume(tmp_path / "run", console=quiet())["why"] == "not finite"
    assert look(tmp_path / "run") == before


def test_other_data_is_not_evaluated_without_force(half, tmp_path):
    usual = evaluate(tmp_path / "whole", batches=2)["loss"]
    write_words(tmp_path / "words.txt", seed=1)
    with pytest.raises(RunError, match="the data has changed: its sha256 is"):
        evaluate(tmp_path / "whole", batches=2)
    assert evaluate(tmp_path / "whole", batches=2, force=True)["loss"] != usual


class Killed(BaseException):
    """In place of a signal."""


@pytest.mark.parametrize("when", ["remove_after", "truncate", "later"])
def test_a_forced_change_survives_a_kill(half, tmp_path, monkeypatch, when):
    config, _ = load_config(half)
    write_words(tmp_path / "words.txt", seed=1)  # other data, and a field that changes the result
    changed = replace(config, optim=replace(config.optim, lr=1e-3))
    whole = shutil.copytree(half, tmp_path / "expected")
    resume(whole, changed, force=True, console=quiet())

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        owner = {"remove_after": Checkpoints, "truncate": RunLog, "later": loop._Run}[when]
        patch.setattr(owner, when if when != "later" else "_checkpoint", kill)
        with pytest.raises(Killed):
            resume(half, changed, force=True, console=quiet())
    assert resume(half, console=quiet())["why"] == "done"
    assert load_config(half)[0].optim.lr == 1e-3
    assert_same_run(half, whole, 12)


def test_temporary_files_of_killed_processes_are_removed(half):
    ended = start(print, output=half.parent / "out")
    end(ended)
    left = [half / f".config.json.tmp-{ended.pid}", half / "checkpoints" / "step-00000004" / f".x.tmp-{ended.pid}"]
    alive = half / f".report.html.tmp-{os.getppid()}"
    for path in (*left, alive):
        path.touch()
    resume(half, console=quiet())
    assert not any(path.exists() for path in left)
    assert alive.exists()  # a process that still runs writes it


@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/step-00000004", "tensorboard", "log.jsonl", "config.json"]
)
def test_a_link_in_a_run_is_not_followed_by_a_resume(half, tmp_path, name):
    outside = tmp_path / "outside"
    if (half / name).exists():
        (half / name).rename(outside)
    else:
        outside.mkdir()
    (half / name).symlink_to(outside)
    before = look(outside) if outside.is_dir() else outside.read_bytes()
    with pytest.raises(RunError, match="is a symbolic link"):
        resume(half, console=quiet())
    assert (look(outside) if outside.is_dir() else outside.read_bytes()) == before


def test_an_end_that_this_version_does_not_know_is_a_failure(half):
    replace_json(half / "result.json", {"why": "[/red]\x1b", "step": 3})
    done = call("resume", str(half))
    assert (done.code, done.err) == (1, "")
    assert "[/red]\\x1b: 3 steps" in done.out


def test_data_that_has_moved_is_found_by_its_hash(half, tmp_path):
    (tmp_path / "words.txt").rename(tmp_path / "moved.txt")
    config, _ = load_config(half)
    moved = replace(config, data=replace(config.data, corpus=str(tmp_path / "moved.txt")))
    assert resume(half, moved, console=quiet())["why"] == "done"
    assert_same_run(half, tmp_path / "whole", 12)
