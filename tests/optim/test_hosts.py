"""What the tools around an optimizer rely on: schedulers, hooks, copies, files, GradScaler, torch.compile."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import assert_same
from tests.optim.cases import (
    QUANTIZED,
    assert_same_params,
    assert_same_snapshots,
    assert_stored_as_told,
    every_optimizer,
    make,
    params_of,
    set_grads,
    small_model,
    snapshot,
    train,
)
from trimtab import optim

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=9, cycle_momentum=False),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ConstantLR(o, 0.5)], milestones=[2]
    ),
}

# --- Learning-rate schedulers


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@every_optimizer
def test_schedulers_drive_float_and_tensor_learning_rates_alike(name, bits, scheduler):
    plain, scalar = (
        make(name, small_model().parameters(), bits, lr=lr) for lr in (0.01, torch.tensor(0.01, dtype=torch.float64))
    )
    seen: list[list[float]] = []
    for optimizer in (plain, scalar):
        schedule, rates = SCHEDULERS[scheduler](optimizer), []
        initial = float(optimizer.param_groups[0]["initial_lr"])
        for number in range(5):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            train(optimizer, [number])
            schedule.step()
            assert float(optimizer.param_groups[0]["initial_lr"]) == initial
        seen.append(rates)
    assert len(set(seen[0])) > 2  # the rate really moved
    assert seen[0] == seen[1]
    assert_same_snapshots(snapshot(scalar), snapshot(plain))


@pytest.mark.parametrize("bits", [8, 32])
def test_a_scheduled_rate_is_the_rate_of_the_step(bits):
    scheduled, by_hand = (make("AdamW", small_model().parameters(), bits) for _ in range(2))
    schedule = lr_scheduler.LambdaLR(scheduled, lambda step: 0.5**step)
    for number in range(4):
        train(scheduled, [number])
        schedule.step()
        by_hand.param_groups[0]["lr"] = 0.01 * 0.5**number
        train(by_hand, [number])
    assert_same_params(scheduled, by_hand)


def test_a_schedule_that_breaks_is_found_before_anything_changes():
    optimizer = make("AdamW", small_model().parameters(), 8)
    train(optimizer, range(2))
    before = snapshot(optimizer)
    for bad in (float("nan"), float("inf"), torch.tensor(float("nan"))):
        optimizer.param_groups[0]["lr"] = bad
        with pytest.raises(ValueError, match="lr must be finite"):
            train(optimizer, [2])
    assert_same_snapshots(snapshot(optimizer), before)


# --- Hooks


@every_optimizer
def test_step_hooks_see_the_parameters_before_and_after(name, bits):
    optimizer = make(name, small_model().parameters(), bits)
    weight, seen = params_of(optimizer)[0], []
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.detach().clone()))
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().clone()))
    before = weight.detach().clone()
    train(optimizer, [0])
    assert len(seen) == 2
    assert_same(seen[0], before)
    assert_same(seen[1], weight.detach())
    assert not torch.equal(seen[0], seen[1])


@every_optimizer
def test_state_dict_hooks_run_and_may_replace_the_dict(name, bits):
    optimizer, calls = make(name, small_model().parameters(), bits), []
    train(optimizer, range(2))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "note": "mine"})
    saved = optimizer.state_dict()
    assert saved["note"] == "mine"
    other = make(name, small_model().parameters(), bits)
    other.register_load_state_dict_pre_hook(lambda o, loaded: {**loaded, "param_groups": halve(loaded)})
    other.register_load_state_dict_post_hook(lambda o: calls.append("after loading"))
    other.load_state_dict(saved)
    assert calls == ["before saving", "after loading"]
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] / 2


def halve(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**group, "lr": group["lr"] / 2} for group in state_dict["param_groups"]]


# --- Copies and files


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@every_optimizer
def test_a_copy_continues_bit_for_bit(name, bits, how):
    optimizer = make(name, small_model().named_parameters(), bits, percentile_clipping=50, keep32="2.weight")
    train(optimizer, range(3))
    copied = pickle.loads(pickle.dumps(optimizer)) if how == "pickle" else copy.deepcopy(optimizer)
    assert params_of(copied)[0] is not params_of(optimizer)[0]
    train(optimizer, range(3, 6))
    train(copied, range(3, 6))
    assert_same_snapshots(snapshot(copied), snapshot(optimizer))
    assert str(copied.describe()) == str(optimizer.describe())


def test_an_old_pickle_gets_defaults_for_new_options():
    optimizer = make("AdamW", small_model().parameters(), 8)
    train(optimizer, [0])
    state = optimizer.__getstate__()
    del state["param_groups"][0]["percentile_clipping"]
    old = optim.AdamW.__new__(optim.AdamW)
    old.__setstate__(state)
    assert old.param_groups[0]["percentile_clipping"] == 100
    train(old, [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_optimizer
def test_resuming_from_a_file_changes_nothing(name, bits, dtype):
    straight, first, second = (make(name, small_model(dtype).parameters(), bits) for _ in range(3))
    train(straight, range(6))
    train(first, range(3))
    assert_stored_as_told(first, bits)
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "params": [p.detach() for p in params_of(first)]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for p, old in zip(params_of(second), saved["params"], strict=True):
        p.data.copy_(old)
    second.load_state_dict(saved["optimizer"])
    # PyTorch's own loader would cast codes and scales to the dtype of the parameter.
    assert_same_snapshots(snapshot(second), snapshot(first))
    train(second, range(3, 6))
    assert_same_snapshots(snapshot(second), snapshot(straight))


# --- GradScaler, torch.compile, the device


@every_optimizer
def test_grad_scaler_unscales_and_skips_overflows(name, bits):
    scaled, plain = (make(name, small_model().parameters(), bits) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(plain, [0])
    set_grads(params_of(scaled), 0)
    scaler.scale(torch.ones(()))  # starts it
    for p in params_of(scaled):
        p.grad *= 2.0**10  # a power of two: unscaled exactly
    scaler.step(scaled)
    scaler.update()
    assert_same_snapshots(snapshot(scaled), snapshot(plain))
    before = snapshot(scaled)
    params_of(scaled)[0].grad[0] = torch.inf
    scaler.step(scaled)
    scaler.update()
    assert_same_snapshots(snapshot(scaled), before)
    assert scaler.get_scale() == 2.0**9


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of the compiler's own imports
@pytest.mark.parametrize("name", ["AdamW", "StableAdamW"])
def test_torch_compile_does_not_change_the_result(name):
    compiled, plain = (make(name, small_model().parameters(), 8) for _ in range(2))
    step = torch.compile(compiled.step)
    for number in range(3):
        set_grads(params_of(compiled), number)
        step()
        train(plain, [number])
    assert_same_snapshots(snapshot(compiled), snapshot(plain))


class Reads(TorchDispatchMode):
    """Counts how often the program waits for a number from the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(
    "options", [{}, {"skip_nonfinite": True, "percentile_clipping": 10, "independent_decay": True}]
)
def test_more_tensors_do_not_mean_more_reads_from_the_device(name, options):
    counts = []
    for count in (3, 30):
        optimizer = make(name, [torch.nn.Parameter(torch.ones(4100)) for _ in range(count)], 8, **options)
        train(optimizer, [0])
        set_grads(params_of(optimizer), 1)
        with Reads() as reads:
            optimizer.step()
        counts.append(reads.count)
    assert counts[0] == counts[1]


@every_optimizer
def test_describe_lists_every_tensor_with_its_bits_and_the_reason(name, bits):
    optimizer = make(name, small_model().named_parameters(), bits)
    for _ in range(2):  # before the first step, and after it
        table = optimizer.describe()
        assert [entry.name for entry in table.entries] == optimizer.names
        for entry, p in zip(table.entries, params_of(optimizer), strict=True):
            small = p.numel() < 4096
            assert entry.bits == (32 if small else bits)
            assert entry.why == (f"bits={bits}" if bits == 32 or not small else "smaller than min_8bit_size=4096")
            assert f"{entry.bytes_now:,}" in str(table)
        train(optimizer, [0])
