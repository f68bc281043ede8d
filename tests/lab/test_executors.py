"""Both executors run the same small sweep with the same numbers, and say what became of a worker."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.sweeps import SIZES, numbers, run_quietly, small_study
from tests.train.runs import count_steps, wait_for
from trimtab.data import MissingExtra
from trimtab.lab.executors import Executor, Job, Outcome, make_executor
from trimtab.lab.executors.local import PRELOAD, LocalExecutor, count_cores
from trimtab.lab.executors.worker import clear, find_checkpoint, work
from trimtab.train import RunError
from trimtab.train.config import to_json

PATIENCE_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("executors")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Path:
    run_quietly(small_study(folder, lrs=(0.1,)), folder / "reference", LocalExecutor(1))
    return folder / "reference"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray on this machine, once for all tests: starting it takes seconds."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def make_job(folder: Path, name: str, **changes: object) -> Job:
    [cell] = small_study(folder, sizes=SIZES[:1], lrs=(0.1,), **changes).cells()
    return Job(name=name, config=to_json(cell.config), folder=str(folder / name), log=str(folder / f"{name}.log"))


def wait_long(executor: Executor) -> Outcome:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for outcome in executor.wait(1.0):
            return outcome
    raise TimeoutError(f"no outcome in {PATIENCE_S} s")


# --- Both


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray")
def test_ray_runs_the_same_sweep_with_the_same_numbers(folder, reference, cluster):
    study = small_study(folder, lrs=(0.1,))
    summary = run_quietly(study, folder / "ray", make_executor("ray"))
    assert (summary.done, summary.failed) == (2, [])
    assert numbers(study, folder / "ray") == numbers(study, reference)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray")
def test_ray_workers_put_their_runs_where_an_address_says(folder, reference, cluster, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "scratch"))
    study = small_study(folder, lrs=(0.1,))
    summary = run_quietly(study, f"file://{folder}/elsewhere", make_executor("ray"))
    assert (summary.done, summary.failed) == (2, [])
    assert numbers(study, folder / "elsewhere") == numbers(study, reference)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray")
def test_ray_says_what_was_raised_what_was_lost_and_stops_with_a_checkpoint(folder, cluster):
    executor = make_executor("ray")
    executor.submit(Job(name="bad", config={"kind": "no such kind"}, folder=str(folder / "bad")))
    outcome = wait_long(executor)
    assert (outcome.name, outcome.kind) == ("bad", "raised")
    assert "a config of kind 'no such kind' is not known" in outcome.error

    long = make_job(folder, "ray-long", steps=1_000_000, checkpoint_every=1_000_000)
    executor.submit(long)
    run = Path(long.folder)
    wait_for(lambda: count_steps(run) > 3)
    os.kill(int(process_of(run)), signal.SIGKILL)
    assert wait_long(executor).kind == "lost"

    executor.submit(long)
    wait_for(lambda: not (run / "log.jsonl").exists() or count_steps(run) < 3)
    wait_for(lambda: count_steps(run) > 3)
    executor.close()
    assert (run / "checkpoints" / f"step-{count_steps(run):08d}").is_dir()


def process_of(run: Path) -> str:
    """Who has the log of a run open."""
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(path) == str(run / "log.jsonl"):
                return path.parts[2]
        except OSError:
            continue
    raise AssertionError(f"nobody writes {run}")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"executor ray needs the package ray .*pip install 'trimtab\[ray\]'"):
        make_executor("ray")


def test_an_executor_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="unknown executor 'slurm'; try one of local, ray"):
        make_executor("slurm")
    with pytest.raises(ValueError, match="slots=0 is too small"):
        make_executor("local", 0)


# --- Local


def test_as_many_cells_run_as_there_are_cores():
    assert LocalExecutor().slots == count_cores() == len(os.sched_getaffinity(0))


def test_a_lost_worker_is_named_with_its_signal(folder):
    executor = LocalExecutor(1)
    executor.submit(make_job(folder, "killed", steps=1_000_000))
    wait_for(lambda: count_steps(folder / "killed") > 3)
    pid = executor.running["killed"].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_long(executor) == Outcome("killed", "lost", "the worker was ended by SIGKILL (out of memory?)")
    assert executor.wait(0) == []


def test_closing_stops_workers_with_a_checkpoint(folder):
    executor = LocalExecutor(1)
    executor.submit(make_job(folder, "closed", steps=1_000_000, checkpoint_every=1_000_000))
    wait_for(lambda: count_steps(folder / "closed") > 3)
    begun = time.monotonic()
    executor.close()
    assert time.monotonic() - begun < 15
    assert executor.running == {}
    assert (folder / "closed" / "checkpoints" / f"step-{count_steps(folder / 'closed'):08d}").is_dir()


def test_what_a_worker_raises_is_its_outcome_and_its_traceback_is_in_its_log(folder):
    executor = LocalExecutor(1)
    job = make_job(folder, "bad-corpus")
    config = json.loads(json.dumps(job.config))
    config["data"]["corpus"] = str(folder / "no-such-text")
    executor.submit(Job(name=job.name, config=config, folder=job.folder, log=job.log))
    outcome = wait_long(executor)
    assert outcome.kind == "raised"
    assert "no-such-text" in outcome.error
    assert "Traceback" in Path(job.log or "").read_text()


def test_a_worker_is_forked_with_torch_and_the_compiler_loaded(folder):
    """Else every cell would import them anew, for seconds."""
    executor = LocalExecutor(1)
    executor.submit(make_job(folder, "forked", steps=1_000_000))
    wait_for(lambda: count_steps(folder / "forked") > 3)
    worker = Path("/proc") / str(executor.running["forked"].process.pid)
    server = Path("/proc") / (worker / "stat").read_text().rsplit(")", 1)[1].split()[1]
    loaded = "libtorch_cpu" in (server / "maps").read_text()
    threads = len(list((server / "task").iterdir()))
    executor.close()
    assert loaded
    assert threads == 1  # a fork copies one thread only; locks that others hold would be held for ever
    assert {"trimtab.lab.executors.worker", "torch._dynamo"} == set(PRELOAD)


def test_a_worker_does_not_import_the_script_that_started_it(folder, monkeypatch):
    """It may have no `if __name__ == "__main__"`, and then each worker would start a sweep of its own."""
    script = folder / "script.py"
    script.write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    executor, before = LocalExecutor(1), sys.modules["__main__"]
    executor.submit(make_job(folder, "scripted", steps=1))
    assert wait_long(executor) == Outcome("scripted", "complete")
    assert sys.modules["__main__"] is before


# --- A worker


def test_a_complete_cell_is_not_run_again(folder, reference):
    [cell] = small_study(folder, sizes=SIZES[:1], lrs=(0.1,)).cells()
    run = reference / cell.folder
    before = (run / "log.jsonl").stat().st_mtime_ns
    assert work(Job(name="again", config=to_json(cell.config), folder=str(run))) == Outcome("again", "complete")
    assert (run / "log.jsonl").stat().st_mtime_ns == before


def test_the_newest_whole_checkpoint_is_found(folder, reference):
    [cell] = small_study(folder, sizes=SIZES[:1], lrs=(0.1,)).cells()
    assert find_checkpoint(reference / cell.folder, cell.config) == cell.config.steps
    assert find_checkpoint(folder / "nothing here", cell.config) is None


def test_only_files_of_a_run_are_removed(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "log.jsonl", "events.jsonl", "signals.jsonl", ".result.json.tmp-1"):
        (run / name).write_text("")
    (run / "thesis.tex").write_text("")
    with pytest.raises(RunError, match=r"holds thesis.tex, which is no file of a run"):
        clear(run)
    assert (run / "config.json").exists()
    (run / "thesis.tex").unlink()
    clear(run)
    assert not run.exists()
