"""A sweep runs each cell once, and whoever is killed in between, its numbers are the same."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.lab.sweeps import SIZES, numbers, run_quietly, small_study, sweep_in_process
from tests.train.runs import count_steps, end, quiet, start, wait_for
from trimtab.lab.executors import Job, Outcome
from trimtab.lab.executors.local import LocalExecutor
from trimtab.lab.study import Study
from trimtab.lab.sweep import LOSSES, cost, sweep
from trimtab.runs import End, RunError, read_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def study(folder: Path) -> Study:
    return small_study(folder)


@pytest.fixture(scope="module")
def undisturbed(folder: Path, study: Study) -> Path:
    summary = run_quietly(study, folder / "undisturbed")
    assert (summary.done, summary.reused, summary.failed, summary.left) == (4, 0, [], 0)
    return folder / "undisturbed"


class Scripted:
    """An executor that does as it is told, in this process; `script` holds what happens to a cell, try by try."""

    shared = True

    def __init__(self, out: Path, script: dict[str, list[str]], slots: int = 1) -> None:
        self.out, self.script, self.slots = out, script, slots
        self.order: list[str] = []
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self.order.append(job.name)
        self.jobs.append(job)

    def wait(self, timeout_s: float) -> list[Outcome]:
        return [self._end(self.jobs.pop(0))] if self.jobs else []

    def close(self) -> None:
        self.jobs.clear()

    def _end(self, job: Job) -> Outcome:
        act, run = (self.script.get(job.name) or ["done"]).pop(0), Path(job.folder)
        run.mkdir(parents=True, exist_ok=True)
        if act == "done":
            (run / "result.json").write_text('{"why": "done"}')
            return Outcome(job.name, "complete")
        if act.startswith("lost at "):
            (run / "log.jsonl").write_text(json.dumps({"step": int(act.split()[-1]), "loss": 1.0}) + "\n")
        return Outcome(job.name, "raised" if act == "raised" else "lost", f"it was {act}")


# --- The real thing


def test_a_sweep_with_killed_workers_has_the_numbers_of_an_undisturbed_one(folder, study, undisturbed):
    out, executor, kills = folder / "killed", LocalExecutor(2), dict[str, int]()
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.005):
            for name, each in list(executor.running.items()):
                # The second time a bit further on, so that both a fresh and a resumed worker are hit.
                if kills.get(name, 0) < 2 and count_steps(out / "cells" / name) > 13 + 12 * kills.get(name, 0):
                    kills[name] = kills.get(name, 0) + 1
                    each.process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        summary = run_quietly(study, out, executor)
    finally:
        over.set()
        thread.join()
    lost = [line["cell"] for line in read_lines(out / "failures.jsonl")]
    assert len(lost) >= 4  # really killed, and not all of them after their last step
    assert (summary.done, summary.failed) == (4, [])
    assert numbers(study, out) == numbers(study, undisturbed)


def test_a_killed_sweep_goes_on_and_runs_nothing_twice(folder, study, undisturbed):
    out = folder / "killed-sweep"
    process = start(sweep_in_process, str(folder), str(out), {}, output=folder / "said")
    wait_for(lambda: any(count_steps(out / cell.folder) > 12 for cell in study.cells()), process)
    process.kill()
    end(process)
    whole = {cell.name for cell in study.cells() if (out / cell.folder / "result.json").exists()}
    assert len(whole) < 4
    summary = run_quietly(study, out)
    assert (summary.done, summary.reused, summary.failed) == (4 - len(whole), len(whole), [])
    assert numbers(study, out) == numbers(study, undisturbed)


def test_sigterm_stops_with_checkpoints_and_says_how_to_go_on(folder, undisturbed):
    # So many steps that no cell can be done before the signal, and no checkpoint but the one at the end.
    study, out, console = small_study(folder, steps=100_000, checkpoint_every=100_000), folder / "stopped", quiet()

    def stop() -> None:
        wait_for(lambda: sum(count_steps(out / cell.folder) > 3 for cell in study.cells()) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    summary = sweep(study, out, executor=LocalExecutor(2), console=console)
    thread.join()
    assert (summary.done, summary.left, summary.stopped) == (0, 4, End.TERMINATED)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"0 cells are complete, 4 are left; the same command continues in {out}" in said
    begun = [cell for cell in study.cells() if count_steps(out / cell.folder)]
    assert len(begun) == 2
    for cell in begun:
        steps = count_steps(out / cell.folder)
        assert (out / cell.folder / "checkpoints" / f"step-{steps:08d}").is_dir()


def test_a_cell_that_always_raises_is_reported_and_the_others_finish(folder):
    out = folder / "raises"
    study = small_study(folder, lrs=(0.01,), steps=12)
    broken = study.cells()[1]
    (out / broken.folder).mkdir(parents=True)
    (out / broken.folder / "my notes.txt").write_text("somebody's")
    (out / "study.json").write_text(json.dumps(study.to_json()))
    summary = run_quietly(study, out)
    assert summary.done == 1
    [(name, error)] = summary.failed
    assert name == broken.name
    assert "RunError" in error
    assert "my notes.txt, which is no file of a run" in error
    assert [line["attempt"] for line in read_lines(out / "failures.jsonl")] == [1, 2]
    assert (out / broken.folder / "my notes.txt").read_text() == "somebody's"


@pytest.mark.parametrize("damage", ["half a config", "no checkpoint", "a damaged checkpoint", "all damaged"])
def test_what_a_dead_worker_left_half_done_is_gone_on_with_or_begun_anew(folder, study, undisturbed, damage):
    one = replace(study, sizes=study.sizes[:1], lrs=study.lrs[:1])
    [cell] = one.cells()
    out, steps = folder / damage.replace(" ", "-"), (30, 40)
    run = out / cell.folder
    shutil.copytree(undisturbed / cell.folder, run)
    (out / "study.json").write_text(json.dumps(one.to_json()))
    (run / "result.json").unlink()
    if damage == "half a config":
        (run / "config.json").write_text('{"config": {')
        shutil.rmtree(run / "checkpoints")
    elif damage == "no checkpoint":
        shutil.rmtree(run / "checkpoints")
    else:
        for step in steps[1:] if damage == "a damaged checkpoint" else steps:
            (run / "checkpoints" / f"step-{step:08d}" / "model.safetensors").write_bytes(b"0123")
    assert run_quietly(one, out).done == 1
    assert numbers(one, out)[cell.name] == numbers(study, undisturbed)[cell.name]
    resumed = "resumed" in (run / "events.jsonl").read_text()
    assert resumed == (damage == "a damaged checkpoint")


# --- What is tried again, and in which order


def test_the_largest_cells_come_first(tmp_path):
    study = small_study(tmp_path)
    executor = Scripted(tmp_path / "out", {})
    run_quietly(study, tmp_path / "out", executor)
    assert [name.split("/")[0] for name in executor.order] == ["2x16", "2x16", "1x16", "1x16"]
    assert cost(study.cells()[-1]) > cost(study.cells()[0])


def test_a_cell_that_raises_is_tried_once_more(tmp_path):
    study = small_study(tmp_path)
    first, second = study.cells()[0].name, study.cells()[1].name
    executor = Scripted(tmp_path / "out", {first: ["raised", "done"], second: ["raised", "raised", "done"]})
    summary = run_quietly(study, tmp_path / "out", executor)
    assert (executor.order.count(first), executor.order.count(second)) == (2, 2)
    assert (summary.done, summary.failed) == (3, [(second, "it was raised")])


def test_lost_workers_are_replaced_as_long_as_their_cell_gets_further(tmp_path):
    study = small_study(tmp_path)
    moving, stuck = study.cells()[0].name, study.cells()[1].name
    script = {moving: [f"lost at {step}" for step in range(1, 21)] + ["done"], stuck: ["lost at 5"] * 20}
    executor = Scripted(tmp_path / "out", script)
    summary = run_quietly(study, tmp_path / "out", executor)
    assert executor.order.count(moving) == 21
    # The first loss came further than nothing; after it five in a row came no further.
    assert executor.order.count(stuck) == 1 + LOSSES
    assert (summary.done, [name for name, _ in summary.failed]) == (3, [stuck])
    lines = [line for line in read_lines(tmp_path / "out" / "failures.jsonl") if line["cell"] == stuck]
    assert [line["attempt"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert set(lines[0]) == {"cell", "attempt", "error", "time"}


def test_a_failed_cell_is_tried_again_by_the_next_sweep(tmp_path):
    study = small_study(tmp_path)
    name = study.cells()[0].name
    assert run_quietly(study, tmp_path / "out", Scripted(tmp_path, {name: ["raised", "raised"]})).failed
    again = Scripted(tmp_path, {})
    summary = run_quietly(study, tmp_path / "out", again)
    assert again.order == [name]
    assert (summary.done, summary.reused, summary.failed) == (1, 3, [])


def test_workers_have_one_thread_unless_the_study_says_otherwise(tmp_path):
    seen = []

    class Looking(Scripted):
        def submit(self, job: Job) -> None:
            seen.append(job.config["threads"])
            super().submit(job)

    for threads in (None, 3):
        study = small_study(tmp_path, sizes=SIZES[:1], lrs=(0.01,), threads=threads)
        run_quietly(study, tmp_path / f"out-{threads}", Looking(tmp_path, {}))
    assert seen == [1, 3]


# --- Refusals


def test_another_study_in_the_same_folder_is_refused(tmp_path):
    run_quietly(small_study(tmp_path), tmp_path / "out", Scripted(tmp_path, {}))
    with pytest.raises(RunError, match=r"holds another study: lrs is \[0.01, 0.1\] there and \[0.01, 0.3\] here"):
        run_quietly(small_study(tmp_path, lrs=(0.01, 0.3)), tmp_path / "out", Scripted(tmp_path, {}))
    with pytest.raises(RunError, match=r"base.steps is 40 there and 41 here; use another folder"):
        run_quietly(small_study(tmp_path, steps=41), tmp_path / "out", Scripted(tmp_path, {}))


def test_a_study_that_cannot_be_read_is_not_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "study.json").write_text('{"name":')
    with pytest.raises(RunError, match=r"study.json is damaged: it is not JSON"):
        run_quietly(small_study(tmp_path), tmp_path / "out", Scripted(tmp_path, {}))


def test_two_sweeps_in_one_folder_are_refused_and_a_dead_one_is_not_in_the_way(tmp_path):
    study, out = small_study(tmp_path), tmp_path / "out"

    class Second(Scripted):
        def submit(self, job: Job) -> None:
            with pytest.raises(RunError, match=rf"is in use by process {os.getpid()}; wait for it"):
                run_quietly(study, out, Scripted(out, {}))
            super().submit(job)

    assert run_quietly(study, out, Second(out, {})).done == 4
    assert run_quietly(study, out, Scripted(out, {})).reused == 4


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to .*file/out: Not a directory"):
        run_quietly(small_study(tmp_path), tmp_path / "file" / "out", Scripted(tmp_path, {}))


# --- What is seen


def test_elsewhere_than_on_a_terminal_every_finished_cell_is_a_line(tmp_path):
    study = small_study(tmp_path)
    console, failing = quiet(), study.cells()[-1].name
    sweep(study, tmp_path / "out", executor=Scripted(tmp_path, {failing: ["raised", "raised"]}), console=console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("]")[0] for line in lines[:4]] == ["[1/4", "[2/4", "[3/4", "[4/4"]
    assert "2x16 plain lr 0.01 seed 0: loss" in lines[0]
    assert "2x16 plain lr 0.1 seed 0: failed" in lines[1]
    assert lines[4] == f"failed: {failing}: it was raised"


def test_ctrl_c_in_the_sweep_closes_the_executor_and_reports_what_is_left(tmp_path):
    class Interrupted(Scripted):
        closed = 0

        def wait(self, timeout_s: float) -> list[Outcome]:
            if len(self.order) == 2:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
                return []
            return super().wait(timeout_s)

        def close(self) -> None:
            self.closed += 1

    executor, console, before = Interrupted(tmp_path, {}), Console(file=quiet().file, width=40), signal.getsignal(2)
    summary = sweep(small_study(tmp_path), tmp_path / "out", executor=executor, console=console)
    assert (summary.done, summary.left, summary.stopped) == (1, 3, End.INTERRUPTED)
    assert executor.closed
    assert signal.getsignal(signal.SIGINT) is before


# --- A study of somebody else


@pytest.mark.parametrize(
    "place", ["cells", "cells/1x16", "cells/1x16/plain/lr-0.01", "workers", "failures.jsonl", "LOG"]
)
def test_a_link_in_a_study_is_not_followed(tmp_path, place):
    study, out, outside = (
        small_study(tmp_path, sizes=SIZES[:1], lrs=(0.01,), steps=2),
        tmp_path / "out",
        tmp_path / "it",
    )
    run_quietly(study, out)
    shutil.rmtree(out / "cells")
    shutil.rmtree(out / "workers", ignore_errors=True)
    outside.mkdir()
    (outside / "mine").write_text("mine")
    if place == "LOG":  # in place of the output of a worker: the link is removed
        (out / "workers").mkdir()
        (out / "workers" / "1x16_plain_lr-0.01_seed-0.log").symlink_to(outside / "mine")
        assert run_quietly(study, out).done == 1
    else:
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        (out / place).symlink_to(outside / "mine" if place.endswith("l") else outside)
        with pytest.raises(RunError, match="is a symbolic link; link the whole folder of the study instead"):
            run_quietly(study, out)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"mine": "mine"}


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.1, 1.0, 2.5, 4.0])
def test_ctrl_c_of_the_terminal_while_workers_start_stops_the_study(tmp_path, delay):
    words = ["lab", "--sizes", "1x16", "--lrs", "0.01", "--arms", "plain", "--seeds", "1", "--steps", "20000"]
    command = [sys.executable, "-P", "-m", "trimtab", *words, "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        said = ""
        while "into" not in said:  # it is printed just before the workers start
            said += process.stdout.readline()
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals all processes of the group
        said += process.communicate(timeout=60)[0]
    assert "Traceback" not in said
    assert process.returncode == 130, said
    assert "continue with: trimtab lab" in said
