"""With two processes (DDP, FSDP2) signals equal those of one process with the whole batch; actions are common."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import seed
from tests.processes import mesh, on_two_processes
from trimtab import optim
from trimtab.nn import GPT, GPTConfig
from trimtab.watch import Actions, Rules, Watch
from trimtab.watch import watch as module

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")
OPTIMIZERS: dict[str, Any] = {
    "stable-8": lambda m: optim.StableAdamW(m.named_parameters(), lr=1e-2, bits=8, min_8bit_size=64, block=16),
    "lamb-32": lambda m: optim.LAMB(m.named_parameters(), lr=1e-2, bits=32),
    "torch": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
}


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(depth=2, width=16, heads=2, vocab=53, context=8))


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(53, (6, 9), generator=seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def own(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def spread(model: GPT, wrap: str) -> nn.Module:
    if wrap == "ddp":
        return DistributedDataParallel(model)
    for block in model.transformer.blocks:
        fully_shard(block, mesh=mesh())
    fully_shard(model, mesh=mesh())
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, watch: Watch, step: int, whole: bool) -> list[Any]:
    tokens, targets = batch(step)
    loss = model(tokens, targets).loss if whole else model(own(tokens), own(targets)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return watch.step(loss)


def flatten(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in record.items():
        flat |= flatten(value, f"{prefix}{key} ") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@on_two_processes
def test_two_processes_measure_the_same_as_one(wrap, name):
    plain, shared = build(), spread(build(), wrap)
    first = OPTIMIZERS[name](plain)
    second = OPTIMIZERS[name](getattr(shared, "module", shared))
    watches = Watch(plain, first, deep_every=2), Watch(shared, second, deep_every=2)
    # 8-bit rounding depends on the last digits of a gradient; a sample of an update depends on the shard.
    loose = 0.03 if name in ("stable-8", "sgd") else 1e-3
    for step in range(4):
        train(plain, first, watches[0], step, True)
        train(shared, second, watches[1], step, False)
        one, two = (flatten(watch.record) for watch in watches)
        assert one.keys() == two.keys()
        for key in one:
            if key.endswith("state_error"):
                assert 0 < two[key] < 0.05
                continue
            if one[key] is None:
                assert name == "sgd"
                assert two[key] is None
                continue
            assert two[key] == pytest.approx(one[key], rel=loose, abs=1e-3 if "cosine" in key else 1e-6), key
    assert "transformer.blocks.1.attention" in watches[1].record["layers"]
    everybody = [None, None]
    dist.all_gather_object(everybody, watches[1].record)
    assert everybody[0] == everybody[1]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@on_two_processes
def test_an_alarm_in_one_process_makes_all_act(wrap):
    shared = spread(build(), wrap)
    bare: Any = getattr(shared, "module", shared)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    watch = Watch(shared, optimizer, actions=Actions(skip=["non-finite"]), rules=Rules(ignore=0))
    train(shared, optimizer, watch, 0, False)
    before = [p.detach().clone() for p in bare.parameters()]
    tokens, targets = batch(1)
    shared(own(tokens), own(targets)).loss.backward()
    if dist.get_rank() == 1:
        grad: Any = next(bare.parameters()).grad
        (grad.to_local() if wrap == "fsdp" else grad).fill_(math.nan)
    optimizer.step()
    optimizer.zero_grad()
    alarms = watch.step(1.0)
    assert [alarm.signal for alarm in alarms if alarm.kind == "action"] == ["skip"]
    for p, old in zip(bare.parameters(), before, strict=True):
        assert bool((p.detach() == old).all())


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("part", ["_gradients", "_updates", "check_tensors"])
@on_two_processes
def test_an_error_in_one_process_switches_all_watchers_off_together(wrap, part):
    shared = spread(build(), wrap)
    optimizer = torch.optim.AdamW(getattr(shared, "module", shared).parameters(), lr=1e-3)
    watch = Watch(shared, optimizer, deep_every=1)
    assert train(shared, optimizer, watch, 0, False) == []

    def broken(*_: Any) -> None:
        raise ArithmeticError("one and one is three")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(module.Detector if part == "check_tensors" else module.Signals, part, broken)
        alarms = [alarm for step in range(1, 4) for alarm in train(shared, optimizer, watch, step, False)]
    assert [alarm.kind for alarm in alarms] == ["watcher error"]
    assert ("one and one" if dist.get_rank() == 1 else "another process") in str(alarms[0])
    assert not watch.active


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@on_two_processes
def test_a_state_saved_by_one_process_between_two_measurements_is_that_of_all(wrap):
    shared = spread(build(), wrap)
    optimizer = torch.optim.AdamW(getattr(shared, "module", shared).parameters(), lr=1e-3)
    watch = Watch(shared, optimizer, every=3)
    for step in range(4):
        train(shared, optimizer, watch, step, False)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, watch.state_dict())
    own_losses = [state["losses"] for state in states]
    assert own_losses[0] != own_losses[1]
    watch.share()
    dist.all_gather_object(states, watch.state_dict())
    assert states[0] == states[1]
    assert states[0]["losses"] == [pytest.approx((own_losses[0][0] + own_losses[1][0]) / 2)]
    resumed = Watch(shared, optimizer, every=3)
    resumed.load_state_dict(states[0])
    for loss in (4.0, 5.0):  # of steps 5 and 6, where both are due
        watch.step(loss)
        resumed.step(loss)
    assert resumed.state_dict() == watch.state_dict()
