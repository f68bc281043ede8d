"""DeepSpeed with an optimizer of ours as its client optimizer: ZeRO stage 0 works, stages 1 to 3 are refused."""

import importlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.conftest import assert_same, seed
from tests.hosts.zoo import Model
from tests.processes import Pair, report
from trimtab import optim
from trimtab.nn import SwitchBackLinear, convert_linears
from trimtab.schedule import SeqLenWarmup
from trimtab.watch import Watch

Run = Callable[..., None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Call a function in a process of its own: DeepSpeed changes loggers, environment and torch.distributed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare) as pool:
        yield lambda *args: pool.submit(report, *args).result(timeout=120)


def prepare(rank: int = 0, size: int = 1) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    # Not `import ... as`: the package has another attribute of that name, PyTorch itself.
    comm: Any = importlib.import_module("deepspeed.comm.torch")
    comm.build_shm_op = lambda: None  # compiling it takes longer than all tests


def engine(stage: int, bf16: bool, name: str = "StableAdamW", **options: Any) -> tuple[Any, optim.Optimizer]:
    import deepspeed

    torch.manual_seed(0)
    model = Model()
    optimizer = getattr(optim, name)(model.named_parameters(), lr=1e-2, **{"bits": 8, **options})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], optimizer


def take_steps(host: Any, numbers: range) -> None:
    for number in numbers:
        tokens = torch.randint(128, (4, 16), generator=seed(number))
        loss = nn.functional.cross_entropy(host(tokens).flatten(0, 1).float(), tokens.flatten())
        host.backward(loss)
        host.step()


def snapshot(host: Any, optimizer: optim.Optimizer) -> list[torch.Tensor]:
    state = [x for group in optimizer.param_groups for p in group["params"] for x in (p, *optimizer.state[p].values())]
    return [x.detach().clone() for x in (*host.module.parameters(), *state)]


def equals_a_plain_loop() -> None:
    host, optimizer = engine(0, bf16=False, name="AdamW")
    torch.manual_seed(0)
    model = Model()
    plain = optim.AdamW(model.named_parameters(), lr=1e-2, bits=8)
    take_steps(host, range(3))
    for number in range(3):
        tokens = torch.randint(128, (4, 16), generator=seed(number))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    for p, q in zip(host.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # its norm for clipping is added up in another order
    assert optimizer.has_8bit_state()


def resumes(folder: Path, bf16: bool, name: str) -> None:
    host, optimizer = engine(0, bf16, name)
    assert [entry.bits for entry in optimizer.describe().entries] == [32, 8, 32]
    take_steps(host, range(3))
    host.save_checkpoint(str(folder))
    take_steps(host, range(3, 6))
    again, fresh = engine(0, bf16, name)
    again.load_checkpoint(str(folder))
    take_steps(again, range(3, 6))
    for x, y in zip(snapshot(again, fresh), snapshot(host, optimizer), strict=True):
        assert_same(x, y)
    masters = {p.dtype for group in fresh.param_groups for p in group["params"]}
    assert masters == {torch.float32}
    assert {p.dtype for p in again.module.parameters()} == {torch.bfloat16 if bf16 else torch.float32}


def is_watched(bf16: bool) -> None:
    host, optimizer = engine(0, bf16)
    watch = Watch(host, host.optimizer)
    assert watch.optimizer is optimizer
    assert isinstance(watch.model, Model)
    tokens = torch.randint(128, (4, 16), generator=seed(0))
    loss = nn.functional.cross_entropy(host(tokens).flatten(0, 1).float(), tokens.flatten())
    host.backward(loss)
    host.step()
    assert watch.step(loss) == []
    found = watch.scalars()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert 0 < found["grad_norm"] <= 1.001  # as the optimizer gets it: clipped
    assert {"rms/wte.weight", "rms/fc.weight"} <= set(found)


def trains_int8_layers_on_short_sequences() -> None:
    import deepspeed

    warmup = SeqLenWarmup(start=8, end=16, steps=3, multiple=8)

    def losses(forward: Any, backward: Any) -> Iterator[float]:
        for step in range(1, 6):
            tokens = torch.randint(128, (4, 16), generator=seed(step))
            batch = warmup.cut({"tokens": tokens, "targets": tokens}, step)
            assert batch["tokens"].shape == (4, warmup.at(step))
            logits = forward(batch["tokens"])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
            backward(loss)
            yield loss.item()

    def build() -> tuple[Model, optim.Optimizer]:
        torch.manual_seed(0)
        model = Model()
        assert convert_linears(model, when="always", only="fc").share == 1
        return model, optim.AdamW(model.named_parameters(), lr=1e-2, bits=8)

    model, optimizer = build()
    # Its default is to clip at 1.
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}, "gradient_clipping": 0.0}
    host = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    plain, own = build()

    def host_step(loss: torch.Tensor) -> None:
        host.backward(loss)
        host.step()

    def plain_step(loss: torch.Tensor) -> None:
        loss.backward()
        own.step()
        own.zero_grad()

    found, expected = list(losses(host, host_step)), list(losses(plain, plain_step))
    assert isinstance(host.module.fc, SwitchBackLinear)
    assert found == expected
    assert found[-1] < found[0]


def refuses(stage: int, bf16: bool) -> None:
    with pytest.raises(ValueError, match=r"ZeRO.* DeepSpeed with ZeRO stage 0, which keep each tensor"):
        take_steps(engine(stage, bf16)[0], range(1))


def test_stage_0_takes_the_steps_of_a_plain_loop(run):
    run(equals_a_plain_loop)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["StableAdamW", "AdEMAMix", "Lion"])
def test_a_resume_through_its_own_checkpoint_continues_bit_for_bit(run, tmp_path, name, bf16):
    run(resumes, tmp_path, bf16, name)


@pytest.mark.parametrize("bf16", [False, True])
def test_an_engine_is_watched_with_the_names_of_its_model(run, bf16):
    run(is_watched, bf16)


def test_int8_layers_and_sequence_length_warmup_are_those_of_a_plain_loop(run):
    run(trains_int8_layers_on_short_sequences)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_flat_partitions_are_refused_with_the_remedy(run, stage, bf16):
    run(refuses, stage, bf16)


def beside(function: Any, *args: Any) -> None:
    prepare(dist.get_rank(), dist.get_world_size())
    function(*args)


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit_and_stages_are_refused(tmp_path):
    pair = Pair()
    try:
        for bf16 in (False, True):
            pair.run(beside, resumes, tmp_path / str(bf16), bf16, "StableAdamW")
            for stage in (1, 2, 3):
                pair.run(beside, refuses, stage, bf16)
    finally:
        pair.stop()
