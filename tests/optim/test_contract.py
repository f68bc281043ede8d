"""What every PyTorch optimizer promises: parameters, groups, steps, rates, closures. Over every optimizer x bits."""

import pytest
import torch
from torch import nn

from tests.conftest import assert_same, seed
from tests.optim.cases import (
    OPTIMIZERS,
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

# --- Parameters and groups


@every_optimizer
def test_tensors_dicts_and_named_pairs_give_the_same_training(name, bits):
    a, b, c, d = (small_model() for _ in range(4))
    optimizers = [
        make(name, a.parameters(), bits),
        make(name, [{"params": list(b.parameters())}], bits),
        make(name, c.named_parameters(), bits),
        make(name, [{"params": list(d.named_parameters())}], bits),
    ]
    for optimizer in optimizers:
        train(optimizer, range(3))
        assert_stored_as_told(optimizer, bits)
        assert_same_snapshots(snapshot(optimizer), snapshot(optimizers[0]))
    names = [key for key, _ in c.named_parameters()]
    assert "param_names" not in optimizers[0].param_groups[0]
    assert all(optimizer.param_groups[0]["param_names"] == names for optimizer in optimizers[2:])
    assert optimizers[2].names == names
    assert optimizers[2].state_dict()["param_groups"][0]["param_names"] == names


@every_optimizer
def test_every_default_can_be_set_per_group(name, bits):
    model = small_model()
    first, rest = list(model.parameters())[:1], list(model.parameters())[1:]
    optimizer = make(name, [{"params": first, "lr": 0.0}, {"params": rest, "bits": 32}], bits)
    own = {key: value for key, value in optimizer.defaults.items() if key not in ("lr", "bits")}
    for group in optimizer.param_groups:
        assert {key: group[key] for key in own} == own
    before = [p.detach().clone() for p in params_of(optimizer)]
    train(optimizer, range(2))
    assert_same(first[0].detach(), before[0])
    for p, old in zip(rest, before[1:], strict=True):
        assert not torch.equal(p, old)
        assert torch.uint8 not in {x.dtype for x in optimizer.state[p].values()}


def test_groups_may_have_different_hyper_parameters_and_equal_separate_optimizers():
    together, apart = small_model(), small_model()
    a, b = (list(model.parameters()) for model in (together, apart))
    one = optim.AdamW([{"params": a[:2], "betas": (0.5, 0.6), "eps": 1e-3}, {"params": a[2:], "block": 64}], bits=8)
    two = [optim.AdamW(b[:2], betas=(0.5, 0.6), eps=1e-3, bits=8), optim.AdamW(b[2:], block=64, bits=8)]
    for number in range(3):
        set_grads(a, number)
        set_grads(b, number)
        for optimizer in (one, *two):
            optimizer.step()
    assert_same_snapshots(snapshot(one), snapshot(two[0]) + snapshot(two[1]))


# --- The step


@every_optimizer
@pytest.mark.parametrize("independent", [False, True])
def test_zero_gradients_at_lr_zero_change_no_bit_of_any_parameter(name, bits, independent):
    options = {"independent_decay": True, "lr_max": 1e-2} if independent else {}
    optimizer = make(name, small_model().parameters(), bits, lr=0.0, **options)
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    before = snapshot(optimizer)
    for _ in range(2):  # the second one has state to start from
        optimizer.step()
        for p, old in zip(params_of(optimizer), before, strict=True):
            assert_same(p.detach().view(torch.int32), old["param"].view(torch.int32))
    assert_stored_as_told(optimizer, bits)
    assert all(x.isfinite().all() for entry in snapshot(optimizer) for x in entry.values())


@every_optimizer
def test_step_is_a_float32_scalar_per_parameter_that_counts(name, bits):
    optimizer = make(name, small_model().parameters(), bits)
    train(optimizer, range(3))
    for p in params_of(optimizer):
        step = optimizer.state[p]["step"]
        assert (step.dtype, step.shape, step.item()) == (torch.float32, (), 3)


@every_optimizer
def test_the_learning_rate_may_be_a_tensor(name, bits):
    lr = 2.0**-7  # exact in float32, so that both are the same number
    plain, scalar = (make(name, small_model().parameters(), bits, lr=x) for x in (lr, torch.tensor(lr)))
    train(plain, range(3))
    train(scalar, range(3))
    assert isinstance(scalar.param_groups[0]["lr"], torch.Tensor)
    assert_same_snapshots(snapshot(scalar), snapshot(plain))


@every_optimizer
def test_closures_run_with_gradients_on_and_their_loss_is_returned(name, bits):
    closed, plain = (make(name, small_model().parameters(), bits) for _ in range(2))
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        set_grads(params_of(closed), 0)
        return 1.25

    with torch.no_grad():
        assert closed.step(closure) == 1.25
        assert not torch.is_grad_enabled()
    assert calls == [True]
    set_grads(params_of(plain), 0)
    assert plain.step() is None
    assert_same_params(closed, plain)


@every_optimizer
def test_maximize_is_a_step_with_negated_gradients(name, bits):
    up, down = (make(name, small_model().parameters(), bits, maximize=flag) for flag in (True, False))
    for number in range(3):
        set_grads(params_of(up), number)
        set_grads(params_of(down), number)
        for p in params_of(down):
            p.grad = -p.grad
        up.step()
        down.step()
    assert_same_snapshots(snapshot(up), snapshot(down))


# --- Parameters that come and go


@every_optimizer
def test_a_group_added_in_mid_training_starts_at_step_one_and_changes_no_other(name, bits):
    alone, joined = (make(name, small_model().parameters(), bits) for _ in range(2))
    train(alone, range(5))
    train(joined, range(2))
    late = nn.Parameter(torch.randn(71, 59, generator=seed(5)))
    joined.add_param_group({"params": [late], "lr": 1e-3})
    train(joined, range(2, 5))  # its gradient is drawn last, so the others keep theirs
    assert_same_snapshots(snapshot(joined)[:-1], snapshot(alone))
    assert joined.state[late]["step"].item() == 3
    assert_stored_as_told(joined, bits)


@every_optimizer
def test_a_frozen_parameter_is_left_alone_and_continues_where_it_was(name, bits):
    frozen, never = (make(name, small_model().parameters(), bits) for _ in range(2))
    train(never, range(2))
    train(frozen, range(2))
    weight = params_of(frozen)[0]
    before = snapshot(frozen)[0]
    weight.requires_grad_(False)
    for number in range(10, 13):
        set_grads(params_of(frozen)[1:], number)
        weight.grad = None
        frozen.step()
    assert_same_snapshots(snapshot(frozen)[:1], [before])
    weight.requires_grad_(True)
    for optimizer in (frozen, never):
        train(optimizer, range(2, 4))
    assert_same_snapshots(snapshot(frozen)[:1], snapshot(never)[:1])


@every_optimizer
def test_parameters_without_a_gradient_get_no_state(name, bits):
    optimizer = make(name, small_model().parameters(), bits)
    first, *rest = params_of(optimizer)
    before = [p.detach().clone() for p in rest]
    set_grads([first], 0)
    optimizer.step()
    assert list(optimizer.state) == [first]
    for p, old in zip(rest, before, strict=True):
        assert_same(p.detach(), old)
    optimizer.zero_grad()
    optimizer.step()  # no parameter has one
    assert optimizer.state[first]["step"].item() == 1


@every_optimizer
def test_empty_groups_and_empty_tensors_are_stepped_over(name, bits):
    full, plain = (list(small_model().parameters()) for _ in range(2))
    empty = nn.Parameter(torch.empty(0, 7))
    mixed = make(name, [{"params": []}, {"params": [*full, empty]}, {"params": []}], bits)
    expected = make(name, plain, bits)
    for optimizer in (mixed, expected):
        train(optimizer, range(3))
    assert_same_snapshots(snapshot(mixed)[:-1], snapshot(expected))
    mixed.load_state_dict(mixed.state_dict())


# --- Refused, never ignored


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("flag", ["differentiable", "amsgrad"])
def test_flags_that_mean_something_else_are_refused(name, flag):
    with pytest.raises(ValueError, match=f"{name} does not support {flag}=True"):
        make(name, small_model().parameters(), **{flag: True})
    with pytest.raises(ValueError, match=f"a parameter group has {flag}=True"):
        make(name, [{"params": list(small_model().parameters()), flag: True}])
    make(name, small_model().parameters(), **{flag: False})  # asks for nothing


@every_optimizer
@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable"])
def test_flags_that_choose_an_implementation_change_nothing(name, bits, flag):
    expected = make(name, small_model().parameters(), bits)
    train(expected, range(2))
    for value in (True, False, None):
        told = make(name, small_model().parameters(), bits, **{flag: value})
        grouped = make(name, [{"params": list(small_model().parameters()), flag: value}], bits)
        for optimizer in (told, grouped):
            train(optimizer, range(2))
            assert_same_snapshots(snapshot(optimizer), snapshot(expected))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unknown_options_are_refused_by_name(name):
    with pytest.raises(TypeError, match=r"unknown options \['block_size'\]"):
        make(name, small_model().parameters(), block_size=256)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtypes_without_kernels_are_refused_when_the_optimizer_is_built(name, dtype):
    with pytest.raises(ValueError, match=f"weight is {dtype}; .* float32, bfloat16 and float16"):
        make(name, [("weight", nn.Parameter(torch.zeros(9, dtype=dtype)))])


@every_optimizer
def test_sparse_gradients_are_refused_with_the_remedy(name, bits):
    layer = nn.Embedding(97, 43, sparse=True)
    layer(torch.tensor([3, 5])).sum().backward()
    optimizer = make(name, layer.parameters(), bits)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert_same(layer.weight.detach(), before)
