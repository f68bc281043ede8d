"""A watcher in a loop changes nothing, does not stop the run on errors, and continues after a resume."""

import json
import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import assert_same, seed
from trimtab import optim
from trimtab.nn import GPT, GPTConfig, Loss
from trimtab.watch import Alarm, Rules, Watch
from trimtab.watch import watch as module

OPTIMIZERS: dict[str, Any] = {
    "stable-8": lambda m: optim.StableAdamW(m.named_parameters(), lr=1e-2, bits=8, min_8bit_size=64),
    "lamb-8": lambda m: optim.LAMB(m.named_parameters(), lr=1e-2, bits=8, min_8bit_size=64),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.1),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
}


def build(**switches: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(depth=1, width=16, heads=2, vocab=53, context=16, **switches))


def loss_of(model: GPT, step: int) -> Tensor:
    tokens = torch.randint(53, (4, 13), generator=seed(step))
    loss: Tensor = model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).loss
    return loss


def run(model: GPT, optimizer: torch.optim.Optimizer, steps: range, watch: Watch | None = None) -> list[Alarm]:
    alarms: list[Alarm] = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            alarms += watch.step(loss)
    return alarms


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_watcher_changes_nothing_bit_for_bit(name, every):
    plain, watched = build(linear="switchback"), build(linear="switchback")
    first, second = OPTIMIZERS[name](plain), OPTIMIZERS[name](watched)
    watch = Watch(watched, second, every=every, deep_every=2, rules=Rules(ignore=0, rms=0.5))
    run(plain, first, range(7))
    alarms = run(watched, second, range(7), watch)
    assert watch.active
    assert [a for a in alarms if a.kind == "rms spike"] or name == "sgd"
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert_same(q.detach(), p.detach())
        for key, x in first.state[p].items():
            if isinstance(x, Tensor):
                assert_same(second.state[q][key], x)
    assert torch.rand(1) == torch.rand(1, generator=seed_like(watched))


def seed_like(model: GPT) -> torch.Generator:
    """The global generator's state after the same model was built: no other draw in between."""
    now = torch.get_rng_state()
    build(linear="switchback")
    state = torch.get_rng_state()
    torch.set_rng_state(now)
    return torch.Generator().set_state(state)


def test_closing_leaves_model_and_optimizer_as_they_were():
    model = build(linear="switchback")
    optimizer = OPTIMIZERS["fused"](model)
    watch = Watch(model, optimizer, deep_every=1)
    assert model._forward_pre_hooks
    deepcopy(model)
    watch.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert watch.step(1.0) == []
    assert not watch.active


@pytest.mark.parametrize("order", ["before", "after"])
def test_zero_grad_may_come_before_or_after(order):
    model = build()
    optimizer = OPTIMIZERS["stable-8"](model)
    watch = Watch(model, optimizer)
    loss_of(model, 0).backward()
    grads = {name: p.grad.square().mean().sqrt().item() for name, p in model.named_parameters()}
    optimizer.step()
    if order == "before":
        optimizer.zero_grad()
    watch.step()
    found = {name: x["grad_rms"] for name, x in watch.record["tensors"].items()}
    assert found == pytest.approx(grads, rel=1e-4)


@pytest.mark.parametrize("kind", [float, Tensor, "shape one", "bfloat16", "loss"])
def test_a_loss_may_be_a_number_or_a_tensor(kind):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(model, optimizer)
    loss = {
        float: 1.5,
        Tensor: torch.tensor(1.5, requires_grad=True),
        "shape one": torch.full((1, 1), 1.5),
        "bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
        "loss": Loss(torch.tensor(1.5), torch.tensor(1.0), torch.tensor(0.5)),
    }[kind]
    assert watch.step(loss) == []
    assert watch.record["loss"] == 1.5
    assert watch.record["tensors"] == {}  # there was no step of the optimizer
    watch.step()
    assert watch.record["loss"] is None


@pytest.mark.parametrize("loss", [torch.ones(2), "much", torch.ones(0)])
def test_an_invalid_loss_disables_the_watcher_and_not_the_run(loss):
    model = build()
    optimizer = OPTIMIZERS["fused"](model)
    watch = Watch(model, optimizer)
    (alarm,) = watch.step(loss)
    assert alarm.kind == "watcher error"
    assert "loss must be one number, got" in str(alarm)
    assert run(model, optimizer, range(3), watch) == []
    assert not watch.active


def broken(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("one and one is three")


PARTS = [
    (module.Signals, "measure_samples"),
    (module.Signals, "_gradients"),
    (module.Signals, "_updates"),
    (module.LayerRecorder, "_record"),
    (module.Detector, "check_tensors"),
    (module.totals_of, "measure_totals"),
    (module.totals_of, "_state_error"),
]


@pytest.mark.parametrize(("owner", "name"), PARTS, ids=[name for _, name in PARTS])
def test_an_error_inside_is_reported_once_and_the_run_continues(owner, name, monkeypatch):
    plain, watched = build(), build()
    first, second = OPTIMIZERS["stable-8"](plain), OPTIMIZERS["stable-8"](watched)
    watch = Watch(watched, second, deep_every=1)
    monkeypatch.setattr(owner, name, broken)
    alarms = run(watched, second, range(4), watch)
    assert [alarm.kind for alarm in alarms] == ["watcher error"]
    assert "ArithmeticError: one and one is three" in str(alarms[0])
    assert not watch.active
    run(plain, first, range(4))
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert_same(q.detach(), p.detach())


def test_a_resume_continues_exactly():
    rules = Rules(ignore=0, rms=0.95, window=7, fewest=3, deviations=0.5, gap=2)

    def start() -> tuple[GPT, torch.optim.Optimizer, Watch]:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return model, optimizer, Watch(model, optimizer, every=2, deep_every=4, rules=rules)

    model, optimizer, watch = start()
    alarms = run(model, optimizer, range(21), watch)
    one, first, before = start()
    early = run(one, first, range(9), before)
    saved = json.loads(json.dumps(before.state_dict(), allow_nan=False))
    two, second, after = start()
    two.load_state_dict(one.state_dict())
    second.load_state_dict(first.state_dict())
    after.load_state_dict(saved)
    late = run(two, second, range(9, 21), after)
    assert early + late == alarms
    assert early
    assert late
    assert after.record == watch.record
    assert after.state_dict() == watch.state_dict()


def test_a_record_is_json_whatever_happens():
    model = build()
    optimizer = OPTIMIZERS["fused"](model)
    watch = Watch(model, optimizer, deep_every=1)
    with torch.no_grad():
        model.head.weight.fill_(math.inf)
    alarms = run(model, optimizer, range(2), watch)
    line = json.loads(json.dumps(watch.record, allow_nan=False))
    assert line["loss"] is None
    assert line["tensors"]["head.weight"]["param_rms"] is None
    assert [json.dumps(alarm.to_json(), allow_nan=False) for alarm in alarms]
    named = {alarm.where for alarm in alarms if alarm.kind == "non-finite"}
    assert {"loss", "embedding.weight"} <= named


def test_parameters_may_come_and_go():
    model = build()
    late = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-3)
    watch = Watch(model, optimizer)
    run(model, optimizer, range(2), watch)
    model.add_module("late", late)
    optimizer.add_param_group({"params": list(late.parameters())})
    for p in late.parameters():
        p.grad = torch.ones_like(p)
    run(model, optimizer, range(1), watch)
    assert watch.record["tensors"]["late.weight"]["grad_rms"] == 1
    optimizer.zero_grad()
    run(model, optimizer, range(1), watch)
    assert "late.weight" not in watch.record["tensors"]  # no gradient
    gone = optimizer.param_groups[0]["params"].pop(0)
    optimizer.state.pop(gone)
    run(model, optimizer, range(1), watch)
    assert watch.active
    assert "embedding.weight" not in watch.record["tensors"]
    assert "transformer.blocks.0.norm1.weight" in watch.record["tensors"]
    assert not any("embedding.weight" in key for key in watch.state_dict()["detector"]["usual"])


def test_a_parameter_the_model_does_not_know_has_the_optimizers_name():
    model, other = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([*model.parameters(), other])
    watch = Watch(model, optimizer)
    optimizer.step()
    watch.step()
    assert list(watch.record["tensors"]) == ["group 0, parameter 2"]


def test_without_a_second_moment_an_alarm_names_what_is_not_measured():
    for build_one in (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: optim.Lion(p, lr=0.1),
        lambda p: optim.Adafactor(p),
        lambda p: optim.AdafactorMomentum(p),
    ):
        model = build()
        optimizer = build_one(list(model.parameters()))
        watch = Watch(model, optimizer, rules=Rules(ignore=0))
        alarms = run(model, optimizer, range(3), watch)
        assert [(alarm.kind, alarm.where) for alarm in alarms] == [("reduced", type(optimizer).__name__)]
        assert "keeps no second moment" in str(alarms[0])
        found = watch.record["tensors"]["head.weight"]
        assert found["rms"] is None
        assert found["eps_share"] is None
        assert found["grad_rms"] > 0
        assert found["update_rms"] > 0
        assert "var_l1" not in watch.record["totals"]


def test_invalid_arguments_are_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got Linear"):
        Watch(model, model)
    with pytest.raises(ValueError, match="every must be at least 1, got 0 and 10"):
        Watch(model, optimizer, every=0)
    with pytest.raises(ValueError, match="deep_every must be at least 1, got 1 and 0"):
        Watch(model, optimizer, deep_every=0)


def test_an_optimizer_inside_another_is_found():
    model = nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())

    class Wrapper(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.optimizer = inner

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()

    watch = Watch(model, wrapper := Wrapper())
    model(torch.ones(1, 2)).sum().backward()
    wrapper.step()
    watch.step()
    assert set(watch.record["tensors"]) == {"weight", "bias"}


@pytest.mark.parametrize(("bad", "alarmed"), [((34, 35), 34), ((34,), 34), ((35,), 35)])
@pytest.mark.parametrize("on_device", [False, True])
def test_losses_between_two_measurements_are_all_checked(bad, alarmed, on_device, monkeypatch):
    """At once if they are on the host, otherwise at the next measurement: reading them would wait for the device."""
    if on_device:
        monkeypatch.setattr(Watch, "_check_between", lambda self: [])
    model = nn.Linear(2, 2)
    watch = Watch(model, torch.optim.AdamW(model.parameters()), every=4, rules=Rules(ignore=0, fewest=5))
    found = {}
    for step in range(1, 41):
        loss = 9.0 if step in bad else 2 + 0.01 * (step % 3)
        found[step] = watch.step(torch.tensor(loss))
    assert [step for step, alarms in found.items() if alarms] == [36 if on_device else alarmed]
    (alarm,) = found[36 if on_device else alarmed]
    assert (alarm.kind, alarm.step, alarm.value) == ("loss spike", alarmed, 9.0)
    assert watch.record["totals"]["loss_ratio"] == pytest.approx(2.01 / 2)


@pytest.mark.parametrize(("switches", "has"), [({}, False), ({"qk_norm": "whole"}, True), ({"kappa": 1.0}, True)])
def test_qk_norm_is_advised_to_a_model_without_it_only(switches, has):
    model = build(**switches)
    watch = Watch(model, OPTIMIZERS["fused"](model), deep_every=1, rules=Rules(logits_critical=1e-3))
    (alarm,) = [alarm for alarm in run(model, watch.optimizer, range(1), watch) if alarm.kind == "attention logits"]
    assert ("qk-norm" in alarm.advice) != has


def test_the_share_of_clipped_steps():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(model, optimizer)
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 if step else 1e-3)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        watch.step(1.0, grad_norm=norm)
    assert watch.record["totals"]["clip_fraction"] == 0.75
    assert watch.record["totals"]["grad_norm"] == pytest.approx(1.0, rel=1e-5)


def test_a_stale_second_moment_is_an_alarm_before_the_loss_rises():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999))
    watch = Watch(model, optimizer, rules=Rules(ignore=10))
    assert run(model, optimizer, range(30), watch) == []
    loss = loss_of(model, 30)
    (100 * loss).backward()  # much larger than the second moment expects
    optimizer.step()
    kinds = {alarm.kind: alarm for alarm in watch.step(loss)}
    assert set(kinds) == {"rms spike"}
    assert kinds["rms spike"].value > 5
    assert kinds["rms spike"].usual[1] < 2.3


def test_nothing_is_kept_between_steps():
    model = build()
    optimizer = OPTIMIZERS["sgd"](model)
    watch = Watch(model, optimizer, deep_every=1)
    run(model, optimizer, range(2), watch)
    assert watch._signals is None
    assert watch._deep == []
    assert watch._losses == []
