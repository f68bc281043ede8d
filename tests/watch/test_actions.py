"""Every action has its documented effect and duration, and is reported."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import assert_same, seed
from trimtab import optim
from trimtab.watch import Actions, Alarm, Rules, Watch

NOW = Rules(ignore=0)


class Run:
    """A vector that is trained on gradients of ones, and now and then on others."""

    def __init__(self, actions: Actions, rules: Rules = NOW, optimizer: Any = torch.optim.AdamW) -> None:
        self.model = nn.Linear(8, 8, bias=False)
        nn.init.normal_(self.model.weight, generator=seed(0))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, betas=(0.9, 0.999))
        self.watch = Watch(self.model, self.optimizer, actions=actions, rules=rules)

    def step(self, size: float = 1.0, loss: float = 1.0) -> list[Alarm]:
        self.model.weight.grad = torch.full_like(self.model.weight, size)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.watch.step(loss)


def done(alarms: list[Alarm]) -> list[str]:
    return [alarm.signal for alarm in alarms if alarm.kind == "action"]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, optim.AdamW, optim.StableAdamW])
@pytest.mark.parametrize(("kind", "size"), [("rms spike", 100.0), ("non-finite", math.nan)])
def test_skipping_leaves_weights_and_moments_as_they_were(kind, size, optimizer):
    run = Run(Actions(skip=[kind]), optimizer=optimizer)
    for _ in range(5):
        assert run.step() == []
    state = run.optimizer.state[run.model.weight]
    before = run.model.weight.detach().clone(), state["exp_avg_sq"].clone(), state["step"].clone()
    alarms = run.step(size)
    assert kind in [alarm.kind for alarm in alarms]
    assert done(alarms) == ["skip"]
    assert "This step was skipped" in str(next(alarm for alarm in alarms if alarm.kind == "action"))
    for now, then in zip((run.model.weight.detach(), state["exp_avg_sq"], state["step"]), before, strict=True):
        assert_same(now, then)
    assert run.watch.record["tensors"]["weight"]["update_rms"] == 0
    assert run.step() == []
    assert not torch.equal(run.model.weight, before[0])


def test_no_more_than_so_many_steps_are_skipped_in_a_row():
    run = Run(Actions(skip=["rms spike"], in_a_row=2))
    for _ in range(50):
        run.step()
    # The second moment has seen the third large gradient, but not yet enough of them.
    assert [done(run.step(100.0)) for _ in range(4)] == [["skip"], ["skip"], [], ["skip"]]


def test_shortening_divides_one_steps_length_by_its_rms():
    plain, short = Run(Actions()), Run(Actions(shorten=["rms spike"]))
    for _ in range(5):
        plain.step()
        short.step()
    before = plain.model.weight.detach().clone()
    plain.step(100.0)
    alarms = short.step(100.0)
    rms = short.watch.record["tensors"]["weight"]["rms"]
    assert rms > 2.3
    assert done(alarms) == ["shorten"]
    ratio = (short.model.weight.detach() - before).norm() / (plain.model.weight.detach() - before).norm()
    assert float(ratio) == pytest.approx(1 / rms, rel=1e-4)
    assert short.optimizer.param_groups[0]["lr"] == 0.1
    change = short.model.weight.detach() - before
    measured = short.watch.record["tensors"]["weight"]["update_rms"]
    assert measured == pytest.approx(change.square().mean().sqrt().item(), rel=1e-4)


def test_a_learning_rate_in_a_tensor_is_restored():
    run = Run(Actions(shorten=["rms spike"]))
    rate = run.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    run.optimizer.param_groups[0]["foreach"] = False
    for _ in range(5):
        run.step()
    assert done(run.step(100.0)) == ["shorten"]
    assert run.optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.1


def test_beta2_is_lower_for_a_while_and_then_what_it_was():
    run = Run(Actions(lower_beta2=["rms spike"], beta2=0.5, beta2_steps=3))
    for _ in range(5):
        run.step()
    assert done(run.step(100.0)) == ["lower_beta2"]
    seen = []
    for _ in range(4):
        seen.append(run.optimizer.param_groups[0]["betas"])
        assert "lower_beta2" not in done(run.step(100.0))
    assert seen == [(0.9, 0.5)] * 3 + [(0.9, 0.999)]


def test_a_lower_beta2_survives_a_resume():
    first = Run(Actions(lower_beta2=["rms spike"], beta2=0.5, beta2_steps=4))
    for size in (1, 1, 1, 1, 100.0, 100.0):
        first.step(size)
    second = Run(Actions(lower_beta2=["rms spike"], beta2=0.5, beta2_steps=4))
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.watch.load_state_dict(json.loads(json.dumps(first.watch.state_dict())))
    for _ in range(5):
        assert second.optimizer.param_groups[0]["betas"] == first.optimizer.param_groups[0]["betas"]
        assert second.step(100.0) == first.step(100.0)
    assert second.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_rolling_back_calls_the_loop_which_may_load_the_watcher_too():
    saved: dict[str, Any] = {}
    called: list[Alarm] = []

    def restore(alarm: Alarm) -> None:
        called.append(alarm)
        run.model.load_state_dict(saved["model"])
        run.watch.load_state_dict(saved["watch"])

    rules = Rules(ignore=0, fewest=5)
    run = Run(Actions(roll_back=["loss spike", "non-finite"], restore=restore), rules)
    for i in range(10):
        run.step(loss=1 + 0.01 * (i % 2))
    saved |= {"model": {k: v.clone() for k, v in run.model.state_dict().items()}, "watch": run.watch.state_dict()}
    assert run.step(loss=5.0) == []
    alarms = run.step(loss=6.0)
    assert [alarm.kind for alarm in alarms] == ["loss spike", "action"]
    assert [alarm.kind for alarm in called] == ["loss spike"]
    assert_same(run.model.weight.detach(), saved["model"]["weight"])
    assert run.watch.steps == 10
    assert run.step(loss=1.0) == []


def test_with_actions_off_nothing_is_decided():
    run = Run(Actions())
    for size in (1, 1, 1, 100.0, math.nan):
        alarms = run.step(size)
    assert alarms
    assert done(alarms) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"skip": ["loss spike"]}, "skip cannot be started by alarm 'loss spike'; try one of rms spike, non-finite"),
        ({"lower_beta2": ["bad luck"]}, "cannot be started by alarm 'bad luck'"),
        ({"skip": "rms spike"}, r"must be a list of alarm kinds.*try skip=\['rms spike'\]"),
        ({"roll_back": ["loss spike"]}, "roll_back needs restore"),
        ({"beta2": 1.0}, "beta2 must be in"),
        ({"in_a_row": 0}, "must be at least 1"),
    ],
)
def test_invalid_actions_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Actions(**wrong)


def test_an_optimizer_without_beta2_cannot_lower_it():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="SGD has no β₂ to lower"):
        Watch(model, torch.optim.SGD(model.parameters(), lr=1.0), actions=Actions(lower_beta2=["rms spike"]))
