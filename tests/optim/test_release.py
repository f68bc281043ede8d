"""Updates during the backward pass: the results of the plain step, without the gradients of a whole model."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimtab as tt
from tests.conftest import assert_same, seed
from tests.optim.cases import (
    assert_same_snapshots,
    assert_stored_as_told,
    every_optimizer,
    make,
    params_of,
    small_model,
    snapshot,
)
from tests.processes import on_two_processes
from trimtab import optim
from trimtab.optim.memory import release


class Net(nn.Module):
    """A tied weight, a frozen one and one that no gradient reaches, beside plain layers."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.body, self.reentrant = small_model(), reentrant
        self.tied, self.idle = nn.Parameter(torch.randn(63, 65, generator=seed(1)) / 8), nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(63), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.frozen @ self.tied
        y = self.body(y) if self.reentrant is None else checkpoint(self.body, y, use_reentrant=self.reentrant)
        return (self.body(y @ self.tied) * self.frozen).square().mean()


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    schedule: "torch.optim.lr_scheduler.LRScheduler | None" = None,
) -> None:
    for number in steps:
        optimizer.zero_grad()
        net(torch.randn(4, 65, generator=seed(number))).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def pair(name: str, bits: int, **options: object) -> tuple[Net, optim.Optimizer, Net, optim.Optimizer]:
    """A net with the plain step, and one with release."""
    plain, released = Net(), Net()
    one, two = (
        make(name, plain.named_parameters(), bits, **options),
        make(name, released.named_parameters(), bits, **options),
    )
    two.step_in_backward(released)
    return plain, one, released, two


@pytest.mark.parametrize("hold", [10**6, 2, 1], ids=["one by one", "some", "all at the end"])
@every_optimizer
def test_release_gives_the_results_of_the_plain_step(name, bits, hold, monkeypatch):
    monkeypatch.setattr(release, "HOLD", hold)
    monkeypatch.setattr(release, "SMALL", 0 if hold > 2 else 1000)
    plain, one, released, two = pair(name, bits)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(x, T_max=5) for x in (one, two)]
    for net, optimizer, schedule in ((plain, one, schedules[0]), (released, two, schedules[1])):
        train(net, optimizer, range(4), schedule)
    assert_same_snapshots(snapshot(two), snapshot(one))
    assert two.state.get(released.idle) is None
    assert_stored_as_told_except_idle(two, bits)
    if isinstance(one, optim.StableAdamW):
        assert_same(two.rms, one.rms)


def assert_stored_as_told_except_idle(optimizer: optim.Optimizer, bits: int) -> None:
    optimizer = copy.copy(optimizer)
    optimizer.param_groups = [{"params": [p for p in params_of(optimizer) if optimizer.state.get(p)]}]
    assert_stored_as_told(optimizer, bits)


@pytest.mark.parametrize(
    "options",
    [
        {"skip_nonfinite": True},
        {"loss_scale": 8.0},
        {"percentile_clipping": 50},
        {"maximize": True},
        {"independent_decay": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["AdamW", "StableAdamW", "LAMB"])
def test_options_work_with_release_as_without(name, options):
    plain, one, released, two = pair(name, 8, **options)
    for net, optimizer in ((plain, one), (released, two)):
        handle = net.tied.register_hook(lambda g: g.fill_(math.nan)) if "skip_nonfinite" in options else None
        train(net, optimizer, range(2))
        if handle is not None:
            handle.remove()
        train(net, optimizer, range(2, 4))
    assert_same_snapshots(snapshot(two), snapshot(one))
    assert_same(two.skipped, one.skipped)
    assert two.skipped.sum() == (2 if "skip_nonfinite" in options else 0)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_bfloat16_is_rounded_with_release_as_without(rounding):
    nets = [small_model(torch.bfloat16) for _ in range(2)]
    optimizers = [make("AdamW", net.named_parameters(), 8, rounding=rounding) for net in nets]
    optimizers[1].step_in_backward(nets[1])
    for net, optimizer in zip(nets, optimizers, strict=True):
        for number in range(3):
            optimizer.zero_grad()
            net(torch.randn(4, 65, generator=seed(number)).bfloat16()).square().mean().backward()
            optimizer.step()
    assert_same_snapshots(snapshot(optimizers[1]), snapshot(optimizers[0]))


def test_a_gradient_is_freed_before_the_last_one_exists(monkeypatch):
    monkeypatch.setattr(release, "SMALL", 0)
    monkeypatch.setattr(release, "HOLD", 10**6)
    net = small_model()
    optimizer = make("AdamW", net.parameters(), 8)
    optimizer.step_in_backward(net)
    alive = []
    net[0].weight.register_hook(lambda _: alive.append(sum(p.grad is not None for p in net.parameters())))
    net(torch.randn(4, 65)).square().mean().backward()
    assert alive == [0]
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_updated_once(reentrant):
    plain, released = small_model(), small_model()
    one, two = make("AdamW", plain.parameters(), 8), make("AdamW", released.parameters(), 8)
    two.step_in_backward(released)
    for net, optimizer in ((plain, one), (released, two)):
        for number in range(3):
            x = torch.randn(4, 65, generator=seed(number), requires_grad=True)
            checkpoint(net, x, use_reentrant=reentrant).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_snapshots(snapshot(two), snapshot(one))


def test_a_layer_shared_by_reentrant_checkpoints_is_refused_because_its_gradient_comes_in_parts():
    net = Net(reentrant=True)
    optimizer = make("AdamW", net.named_parameters(), 8)
    optimizer.step_in_backward(net)
    with pytest.raises(RuntimeError, match=r"body.* got a second gradient .*use_reentrant=True"):
        train(net, optimizer, range(1))


def test_a_second_backward_before_the_step_is_refused_and_changes_nothing():
    net = small_model()
    optimizer = make("AdamW", net.named_parameters(), 8)
    optimizer.step_in_backward(net)
    net(torch.ones(1, 65)).sum().backward()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"got a second gradient before optimizer.step\(\)"):
        net(torch.ones(1, 65)).sum().backward()
    assert_same_snapshots(snapshot(optimizer), before)
    optimizer.step()
    optimizer.zero_grad()
    net(torch.ones(1, 65)).sum().backward()


def test_an_iteration_after_an_error_in_the_backward_pass_starts_clean():
    """The gradient that was waiting when the pass failed is not used twice."""
    net = small_model()
    optimizer = make("AdamW", net.named_parameters(), 8)
    optimizer.step_in_backward(net)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    handle = net[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        net(torch.ones(1, 65)).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    optimizer.step()
    assert {int(optimizer.state[p]["step"]) for p in net.parameters() if p in optimizer.state} <= {0, 1}
    net(torch.ones(1, 65)).sum().backward()
    optimizer.step()


def test_a_state_dict_between_two_iterations_resumes_bit_for_bit():
    _, _, net, optimizer = pair("StableAdamW", 8)
    train(net, optimizer, range(2))
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, range(2, 4))
    expected = snapshot(optimizer)
    _, _, other, resumed = pair("StableAdamW", 8)
    train(other, resumed, range(7, 8))
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(other, resumed, range(2, 4))
    assert_same_snapshots(snapshot(resumed), expected)


def test_after_remove_the_step_is_the_plain_one():
    plain, one, net, optimizer = pair("AdamW", 8)
    train(plain, one, range(4))
    handle = optimizer._release
    assert handle is not None
    train(net, optimizer, range(2))
    handle.remove()
    net(torch.randn(4, 65, generator=seed(2))).backward()
    assert net.tied.grad is not None
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step_in_backward(net)
    train(net, optimizer, range(3, 4))
    assert_same_snapshots(snapshot(optimizer), snapshot(one))


def test_a_copy_of_the_optimizer_has_the_plain_step():
    net = small_model()
    optimizer = make("AdamW", net.parameters(), 8)
    optimizer.step_in_backward(net)
    other = copy.deepcopy(optimizer)
    for p in params_of(other):
        p.grad = torch.ones_like(p)
    other.step()
    assert all(int(other.state[p]["step"]) == 1 for p in params_of(other))


def test_parameters_outside_the_model_or_unfrozen_later_are_updated_by_step():
    plain, one, net, optimizer = pair("AdamW", 8)
    for x in (plain, net):
        x.frozen.requires_grad_()
    train(plain, one, range(2))
    train(net, optimizer, range(2))
    assert_same_snapshots(snapshot(optimizer), snapshot(one))
    assert int(optimizer.state[net.frozen]["step"]) == 2


def test_clipping_by_the_previous_norm_shortens_all_gradients_alike():
    net = small_model()
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    optimizer.step_in_backward(net, max_norm=1e-3, norm="previous")
    norms = []
    for number in range(3):
        before = [p.detach().clone() for p in net.parameters()]
        net(torch.randn(4, 65, generator=seed(number))).square().mean().backward()
        moved = sum((p - old).square().sum() for p, old in zip(net.parameters(), before, strict=True)).sqrt().item()
        optimizer.step()
        norms.append((moved, float(optimizer.state[release.PREVIOUS])))
    (first, norm0), (second, norm1), _ = norms
    assert first == pytest.approx(norm0, rel=1e-4)  # the first iteration is not clipped
    assert second == pytest.approx(norm1 * 1e-3 / norm0, rel=1e-2)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert float(optimizer.state[release.PREVIOUS]) == norms[-1][1]


# --- What is refused


def test_what_needs_all_gradients_at_once_is_refused_with_the_remedy():
    net = small_model()
    optimizer = make("AdamW", net.parameters())
    with pytest.raises(ValueError, match="pass norm='previous'"):
        optimizer.step_in_backward(net, max_norm=1.0)
    with pytest.raises(ValueError, match="norm must be 'previous', with a max_norm above 0"):
        optimizer.step_in_backward(net, norm="previous")
    with pytest.raises(ValueError, match="none of the optimizer's parameters is in this model"):
        optimizer.step_in_backward(nn.Linear(2, 2))
    handle = optimizer.step_in_backward(net)
    with pytest.raises(ValueError, match=r"active already; call remove\(\)"):
        optimizer.step_in_backward(net)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(ValueError, match=r"tt.Watch has one.*Watch\(...\).close\(\)"):
        tt.Watch(net, optimizer)
    handle.remove()
    watch = tt.Watch(net, optimizer)
    with pytest.raises(ValueError, match=r"tt.Watch has one.*Watch\(...\).close\(\)"):
        optimizer.step_in_backward(net)
    watch.close()
    optimizer.step_in_backward(net)


@on_two_processes
def test_several_processes_are_refused_because_gradients_are_averaged_later():
    net = small_model()
    optimizer = make("AdamW", net.parameters())
    with pytest.raises(ValueError, match="there are 2 processes, and gradients are averaged over them only after"):
        optimizer.step_in_backward(net)
    with pytest.raises(ValueError, match="there are 2 processes"):
        optimizer.step_in_backward(nn.parallel.DistributedDataParallel(net))


def test_a_grad_scaler_is_refused_at_its_first_step():
    net = small_model()
    optimizer = make("AdamW", net.parameters())
    handle = optimizer.step_in_backward(net)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.ones(1, 65)).sum()).backward()
    with pytest.raises((RuntimeError, AssertionError), match="pass a constant loss_scale="):
        scaler.step(optimizer)
    optimizer.step()  # without the scaler it continues
    handle.remove()


def test_after_remove_a_grad_scaler_unscales_again():
    nets = [small_model(), small_model()]
    for net, scaled in zip(nets, (False, True), strict=True):
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        optimizer.step_in_backward(net).remove()
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        scaler.scale(net(torch.ones(1, 65)).sum()).backward()
        scaler.step(optimizer)
    for mine, theirs in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_free_memory_is_returned_after_building_and_after_the_first_iteration_only(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(release, "_return_free_memory", lambda: calls.append(1))
    net = Net()
    optimizer = optim.AdamW(net.named_parameters(), bits=8)
    optimizer.step_in_backward(net)
    assert len(calls) == 1
    optimizer.step()  # no gradients yet: no state, so this is not the first iteration
    assert len(calls) == 1
    train(net, optimizer, range(3))
    assert len(calls) == 2


def test_returning_free_memory_works_on_any_c_library(monkeypatch):
    release._return_free_memory()
    monkeypatch.setattr(release.ctypes, "CDLL", lambda _: object())  # as without glibc
    release._return_free_memory()
