"""Accelerate: prepare, accumulate, save_state and load_state, with one process, DDP and FSDP2."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.conftest import assert_same, seed
from tests.hosts.zoo import Model
from tests.processes import PROCESSES, Pair
from trimtab import optim
from trimtab.ops.sharding import is_sharded, local

pytest.importorskip("accelerate")

MODES = ("ddp", "fsdp2")


def prepare(mode: str, name: str) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=False) if mode == "fsdp2" else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    if plugin is not None:  # which it has for GPUs only; its code for FSDP2 works on the CPU too
        for state in (PartialState(), accelerator.state):
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    torch.manual_seed(0)
    model = Model()
    optimizer = getattr(optim, name)(model.named_parameters(), lr=1e-2, bits=8)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert is_sharded(next(model.parameters())) == (mode == "fsdp2")
    assert isinstance(model, nn.parallel.DistributedDataParallel) == (mode == "ddp")
    return accelerator, model, optimizer


def take_steps(accelerator: Any, model: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        with accelerator.accumulate(model):
            tokens = torch.randint(128, (4, 16), generator=seed(2 * number + accelerator.process_index))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def snapshot(optimizer: Any) -> list[torch.Tensor]:
    inner = optimizer.optimizer
    return [
        local(x).detach().clone()
        for group in inner.param_groups
        for p in group["params"]
        for x in (p, *(inner.state[p][key] for key in sorted(inner.state[p])))
    ]


def resume(folder: Path, mode: str, name: str) -> None:
    """Three steps of two batches each, a checkpoint, and three steps more, twice."""
    warnings.simplefilter("ignore")
    accelerator, model, optimizer = prepare(mode, name)
    take_steps(accelerator, model, optimizer, range(6))
    assert [entry.bits for entry in optimizer.optimizer.describe().entries] == [32, 8, 32]
    accelerator.save_state(str(folder))
    take_steps(accelerator, model, optimizer, range(6, 12))
    expected = snapshot(optimizer)
    accelerator, model, optimizer = prepare(mode, name)
    accelerator.load_state(str(folder))
    take_steps(accelerator, model, optimizer, range(6, 12))
    for got, wanted in zip(snapshot(optimizer), expected, strict=True):
        assert_same(got, wanted)
    steps = {float(state["step"]) for state in optimizer.optimizer.state.values()}
    assert steps == {6.0}


# --- One process


@pytest.mark.parametrize("name", ["AdamW", "StableAdamW", "Lion"])
def test_one_process_resumes_bit_for_bit(tmp_path, name):
    with warnings.catch_warnings():
        resume(tmp_path, "plain", name)


# --- Two processes


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.stop()


def beside(function: Any, *args: Any) -> None:
    rank = str(dist.get_rank())
    os.environ |= {"WORLD_SIZE": str(PROCESSES), "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(PROCESSES)}
    function(*args)


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_resume_bit_for_bit(two, tmp_path, mode):
    two.run(beside, resume, tmp_path, mode, "StableAdamW")


def same_steps(folder: Path, mode: str) -> None:
    warnings.simplefilter("ignore")
    accelerator, model, optimizer = prepare(mode, "StableAdamW")
    take_steps(accelerator, model, optimizer, range(6))
    weights = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({name.removeprefix("module."): x.detach() for name, x in weights.items()}, folder / f"{mode}.pt")


def test_fsdp2_takes_the_steps_of_ddp(two, tmp_path):
    for mode in MODES:
        two.run(beside, same_steps, tmp_path, mode)
    ddp, fsdp2 = (torch.load(tmp_path / f"{mode}.pt") for mode in MODES)
    for name, x in ddp.items():
        torch.testing.assert_close(fsdp2[name], x, rtol=0, atol=1e-5)  # sums are added in another order


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "StableAdamW", "AdEMAMix", "Lion"])
@pytest.mark.parametrize("mode", MODES)
def test_accelerate_launch_resumes_bit_for_bit(tmp_path, mode, name):
    code = f"from tests.hosts.test_accelerate import *; resume(Path({str(tmp_path)!r}), {mode!r}, {name!r})"
    script = tmp_path / "train.py"
    script.write_text(code)
    # With --cpu it starts one process per machine; --multi_gpu starts torchrun, and the script chooses the CPU.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(PROCESSES)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
