"""Several processes: the losses of one, checkpoints that any number can load, and an end when one is killed."""

import itertools
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import on_two_processes
from tests.train.runs import (
    PATIENCE_S,
    count_steps,
    end,
    quiet,
    read_config,
    read_events,
    read_log,
    start,
    tiny,
    tiny_clip,
    wait_for,
    write_config,
)
from tests.train.test_checkpoint import Payload
from trimtab import cli
from trimtab.runs.files import sha256_of
from trimtab.train import CheckpointError, RunError, checkpoint, load_run, resume, tensors, train
from trimtab.train.config import load_config

SHAPES = {"ddp": "model.safetensors", "fsdp2": "shards"}


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run)]


@on_two_processes
def train_on_two(config: Path, run: Path) -> None:
    train(read_config(config), run, console=quiet())


@on_two_processes
def resume_on_two(config: Path, run: Path, step: int | None = None) -> None:
    resume(run, read_config(config), step=step, console=quiet())


def saved(folder: Path, config: Any) -> Path:
    return write_config(folder / "config.json", config)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_two_processes_have_the_losses_of_one(tmp_path, parallel, micro_batch):
    config = tiny(tmp_path, start=8, parallel=parallel)
    train(config, tmp_path / "one", console=quiet())
    train_on_two(saved(tmp_path, replace(config, micro_batch=micro_batch)), tmp_path / "two")
    # Sums in another order, and 8-bit blocks that are cut at shards: a few codes round the other way.
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)
    first, second = (read_log(tmp_path / name)[0] for name in ("one", "two"))
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)
    keys = ("step", "samples", "tokens", "lr", "length", "batch")
    assert [[line[k] for k in keys] for line in read_log(tmp_path / "two")] == [
        [line[k] for k in keys] for line in read_log(tmp_path / "one")
    ]
    evaluations = [[event["loss"] for event in read_events(tmp_path / name, "evaluated")] for name in ("one", "two")]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=2e-3)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_clip_is_compared_with_the_whole_batch(tmp_path, parallel):
    config = tiny_clip(tmp_path, parallel=parallel)
    config = replace(config, model=replace(config.model, patch_dropout=0.0))
    train(config, tmp_path / "one", console=quiet())
    train_on_two(saved(tmp_path, config), tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pair
        for pair in itertools.product(["one", "ddp", "fsdp2"], repeat=2)
        if pair not in (("one", "one"), ("ddp", "ddp"))
    ],
)
def test_any_number_of_processes_can_resume_a_run(tmp_path, source, target):
    config = tiny(tmp_path, parallel="ddp" if source == "one" else source)
    train(config, tmp_path / "whole", console=quiet())
    if source == "one":
        run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    else:
        run = tmp_path / "run"
        train_on_two(saved(tmp_path, config), run)
        assert (run / "checkpoints" / "step-00000004" / SHAPES[source]).exists()
    other = replace(config, parallel="ddp" if target == "one" else target)
    if target == "one":
        resume(run, other, step=4, console=quiet())
    else:
        resume_on_two(saved(tmp_path, other), run, step=4)
        assert (run / "checkpoints" / "step-00000012" / SHAPES[target]).exists()
    assert read_events(run, "resumed")[0]["processes"] == (1 if target == "one" else 2)
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=2e-3)


def test_patches_are_dropped_independently(tmp_path):
    config = tiny_clip(tmp_path, checkpoint_every=2, steps=2)
    train_on_two(saved(tmp_path, config), tmp_path / "run")
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert len(state["generators"]) == 2
    assert state["generators"][0] != state["generators"][1]


def test_two_processes_resume_exactly(tmp_path):
    config = saved(tmp_path, tiny_clip(tmp_path))
    train_on_two(config, tmp_path / "whole")
    run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    resume_on_two(config, run, step=2)
    # A sum of two has only one order, so the losses are equal.
    assert losses(run) == losses(tmp_path / "whole")


# --- Shards


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    train_on_two(saved(folder, tiny(folder, parallel="fsdp2")), folder / "run")
    return folder / "run"


def test_shards_are_one_file_for_each_process_and_no_pickle(sharded):
    names = sorted(path.name for path in (sharded / "checkpoints" / "step-00000012" / "shards").iterdir())
    assert len([name for name in names if name.endswith(".safetensors")]) == 2
    assert all(name.endswith((".safetensors", ".json")) for name in names)


def test_one_process_can_read_shards(sharded):
    config, model, step = load_run(sharded)
    assert (step, model.config) == (12, config.model)


def test_a_damaged_shard_is_found(sharded, tmp_path):
    run = shutil.copytree(sharded, tmp_path / "run")
    path = next((run / "checkpoints" / "step-00000012" / "shards").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (run / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"shards/.* is damaged: .*step 8 can be used instead"):
        resume(run, console=quiet())


def test_a_pickle_among_shards_is_never_executed(sharded, tmp_path):
    run, harm = shutil.copytree(sharded, tmp_path / "run"), tmp_path / "harm"
    folder = run / "checkpoints" / "step-00000012"
    manifest = json.loads((folder / "manifest.json").read_text())
    for path in (*(folder / "shards").iterdir(), folder / "shards" / ".metadata"):
        path.write_bytes(pickle.dumps(Payload(harm)))
        manifest["files"][f"shards/{path.name}"] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    del manifest["checksum"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (run / "result.json").unlink()
    with pytest.raises(CheckpointError, match="is intact, but it is not a checkpoint"):
        resume(run, console=quiet())
    assert not harm.exists()


@on_two_processes
def train_with_a_full_disk(config: Path, run: Path) -> None:
    """The second process cannot write its shards, or the first its whole checkpoint, at step 8."""

    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as Writer

    write_data, write_tensors = Writer.write_data, tensors.write_tensors
    full = OSError(28, "No space left on device")

    def write_shard(self: Any, *args: Any) -> Any:
        if dist.get_rank() == 1 and "tmp-step-00000008" in str(self.path):
            raise full
        return write_data(self, *args)

    def write_whole(path: Path, *args: Any) -> Any:
        if "tmp-step-00000008" in str(path):
            raise full
        return write_tensors(path, *args)

    try:
        Writer.write_data, checkpoint.write_tensors = write_shard, write_whole
        assert train(read_config(config), run, console=quiet())["why"] == "done"
    finally:
        Writer.write_data, checkpoint.write_tensors = write_data, write_tensors


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_full_disk_of_one_process_is_reported_by_all(tmp_path, parallel):
    train_with_a_full_disk(saved(tmp_path, tiny(tmp_path, parallel=parallel)), tmp_path / "run")
    assert [event["step"] for event in read_events(tmp_path / "run", "checkpoint failed")] == [8]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*step*"))
    assert names == ["step-00000004", "step-00000012"]


# --- Bad input


@on_two_processes
def refused(config: Path, run: Path, message: str) -> None:
    with pytest.raises((ValueError, RunError), match=message):
        train(read_config(config), run, console=quiet())


def test_a_batch_that_does_not_split_is_refused(tmp_path):
    odd = replace(tiny(tmp_path), batch=3)
    refused(saved(tmp_path, odd), tmp_path / "run", "a batch of 3 does not split over 2 processes; try a multiple of 2")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_another_run_is_refused_by_all(tmp_path):
    config = tiny(tmp_path, steps=4)
    train(config, tmp_path / "run", console=quiet())
    refused(saved(tmp_path, config), tmp_path / "run", "already holds a run")


# --- One of two is killed


def join(config: Path, run: Path) -> None:
    sys.exit(cli.run(lambda: cli.runs.report_end(train(read_config(config), run))))


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return str(s.getsockname()[1])


def long(folder: Path) -> Path:
    """More steps than the test waits for."""
    return saved(folder, tiny(folder, steps=100_000, checkpoint_every=5, eval_every=100_000, keep=2))


def start_pair(config: Path, run: Path) -> list[BaseProcess]:
    """Two processes without torchrun, some steps on their way."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "LOCAL_RANK": "0"}
    pair = [
        start(join, config, run, output=run.parent / f"out{rank}", env={**world, "RANK": str(rank)})
        for rank in range(2)
    ]
    wait_for(lambda: count_steps(run) >= 7, pair[0])
    return pair


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_stops_both_with_a_checkpoint(tmp_path, asked):
    run = tmp_path / "run"
    pair = start_pair(long(tmp_path), run)
    os.kill(pair[asked].pid, signal.SIGTERM)
    assert [end(process) for process in pair] == [143, 143]
    last = read_log(run)[-1]["step"]
    assert (run / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_the_other_stops_with_an_error(tmp_path, victim):
    config, run = long(tmp_path), tmp_path / "run"
    pair = start_pair(config, run)
    os.kill(pair[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    assert end(pair[1 - victim]) == 1, (tmp_path / f"out{1 - victim}").read_text()
    assert time.monotonic() - killed < 30
    end(pair[victim])
    text = (tmp_path / f"out{1 - victim}").read_text()
    assert f"error: another process has ended, so this one stops; continue with `trimtab resume {run}`" in text
    assert "Traceback" not in text
    shorter = replace(read_config(config), steps=max(20, count_steps(run) + 1))
    assert resume(run, shorter, force=True, console=quiet())["why"] == "done"


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes of torchrun in /proc")
def test_torchrun_ends_when_one_of_its_two_processes_is_killed(tmp_path):
    plain, run = tiny(tmp_path), tmp_path / "run"
    options = ["--data.corpus", plain.data.corpus, "--data.cache", plain.data.cache, "--threads", "1"]
    options += ["--model.depth", "1", "--model.width", "32", "--model.heads", "2", "--model.context", "32"]
    options += ["--steps", "100000", "--checkpoint-every", "5", "--eval-every", "100000", "--batch", "4"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    command += ["-m", "trimtab", "train", "gpt-tiny", "--out", str(run), *options]
    with (tmp_path / "out").open("w") as out:
        torchrun = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_for(lambda: count_steps(run) >= 7 or torchrun.poll() is not None)
        assert torchrun.poll() is None, (tmp_path / "out").read_text()
        os.kill(children(torchrun.pid)[1], signal.SIGKILL)
        assert torchrun.wait(PATIENCE_S) != 0
    finally:
        torchrun.kill()
        torchrun.wait()
    assert "SIGKILL" in (tmp_path / "out").read_text()
    assert "error: another process has ended" in (tmp_path / "out").read_text()
    config = replace(load_config(run)[0], steps=count_steps(run) + 2)
    assert resume(run, config, force=True, console=quiet())["why"] == "done"
    assert read_events(run, "resumed")[0]["processes"] == 1
