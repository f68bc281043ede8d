"""Signals equal their definitions in float64, for every optimizer and every storage of its state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import seed
from trimtab import optim
from trimtab.ops.step.quadratic import decode_moments
from trimtab.watch import Watch

SHAPES = {"matrix": (80, 96), "vector": (33,), "image": (4, 3, 5, 5), "scalar": ()}


class Bag(nn.Module):
    """Parameters, and gradients that grow and shrink from step to step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=seed(i)).to(dtype)))

    def fill_grads(self, step: int) -> None:
        for i, p in enumerate(self.parameters()):
            size = 10.0 ** ((step * (i + 2)) % 4 - 3)
            p.grad = (size * torch.randn(p.shape, generator=seed(100 * step + i))).to(p.dtype)


OURS: dict[str, Any] = {
    "AdamW": lambda p, bits: optim.AdamW(p, lr=1e-2, bits=bits, weight_decay=0.1),
    "Adam": lambda p, bits: optim.Adam(p, lr=1e-2, bits=bits, weight_decay=0.1),
    "StableAdamW": lambda p, bits: optim.StableAdamW(p, lr=1e-2, bits=bits, weight_decay=0.1),
    "power": lambda p, bits: optim.AdamW(p, lr=1e-2, bits=bits, beta2_power=0.8),
    "relative": lambda p, bits: optim.AdamW(p, lr=1e-2, bits=bits, weight_decay=0.1, rms_scaled=True),
    "LAMB": lambda p, bits: optim.LAMB(p, lr=1e-2, bits=bits),
    "AdEMAMix": lambda p, bits: optim.AdEMAMix(p, lr=1e-2, bits=bits),
    "RMSprop": lambda p, bits: optim.RMSprop(p, lr=1e-2, bits=bits, weight_decay=0.1),
    "Adagrad": lambda p, bits: optim.Adagrad(p, lr=1e-2, bits=bits),
    "Lion": lambda p, bits: optim.Lion(p, lr=1e-2, bits=bits),
    "SGD": lambda p, bits: optim.SGD(p, lr=10.0, bits=bits, momentum=0.9),
    "LARS": lambda p, bits: optim.LARS(p, lr=10.0, bits=bits),
    "scaled": lambda p, bits: optim.AdamW(p, lr=1e-2, bits=bits, loss_scale=64.0, maximize=True),
}
TORCH: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), weight_decay=0.1, fused=True),
    "maximize": lambda p: torch.optim.AdamW(p, lr=1e-2, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def assert_close(got: float | None, expected: Tensor | float, rtol: float = 2e-5) -> None:
    assert got is not None
    torch.testing.assert_close(got, float(expected), rtol=rtol, atol=1e-12)


def rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()


def assert_sizes(watch: Watch, model: nn.Module, before: dict[str, Tensor], rtol: float = 2e-5) -> None:
    """Gradient, parameter and update, against what is there."""
    for name, p in model.named_parameters():
        found = watch.record["tensors"][name]
        assert_close(found["grad_rms"], rms(p.grad), rtol)
        assert_close(found["param_rms"], rms(before[name]), rtol)
        update = rms(p.detach().double() - before[name].double())
        assert_close(found["update_rms"], update, max(rtol, 2e-4))  # p is rounded to float32 after the step
        assert_close(found["ratio"], update / rms(before[name]), max(rtol, 2e-4))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", [name for name in OURS if name != "scaled"])
def test_sizes_of_our_optimizers_are_what_the_step_did(name, bits):
    model = Bag()
    optimizer = OURS[name](model.named_parameters(), bits)
    watch = Watch(model, optimizer)
    for step in range(4):
        model.fill_grads(step)
        before = snapshot(model)
        optimizer.step()
        watch.step()
        if name in ("Adam", "RMSprop"):  # their gradient has the weight decay in it
            for p, old in zip(model.parameters(), before.values(), strict=True):
                p.grad = p.grad + 0.1 * old
        assert_sizes(watch, model, before)


@pytest.mark.parametrize("name", TORCH)
def test_sizes_of_torch_optimizers_are_what_the_step_did(name):
    model = Bag()
    optimizer = TORCH[name](list(model.parameters()))
    watch = Watch(model, optimizer)
    for step in range(4):
        model.fill_grads(step)
        before = snapshot(model)
        optimizer.step()
        watch.step()
        if name == "Adam":
            for p, old in zip(model.parameters(), before.values(), strict=True):
                p.grad = p.grad + 0.1 * old
        # NAdam's rule is not known here: the matrix is measured on a sample
        assert_sizes(watch, model, before, rtol=2e-5 if name not in ("NAdam", "amsgrad") else 0.05)


def second_moment(optimizer: torch.optim.Optimizer, p: Tensor, g: Tensor, step: int) -> Tensor:
    """v̂ of the step about to be taken, by definition, from the state before it."""
    group, state = optimizer.param_groups[0], optimizer.state.get(p) or {}
    beta2 = float(group["betas"][1])
    v = torch.zeros_like(g)
    if "exp_avg_sq_codes" in state:
        assert isinstance(optimizer, optim.Optimizer)
        codes, absmax = state["exp_avg_sq_codes"], state["exp_avg_sq_absmax"]
        (v,) = decode_moments([codes.flatten()], [absmax], "v", group["block"])
        v = v.view(p.shape).double()
    elif state:
        v = state["exp_avg_sq"].double()
    v = beta2 * v + (1 - beta2) * g.square()
    if state.get("max_exp_avg_sq") is not None:
        v = torch.maximum(v, state["max_exp_avg_sq"].double())
    return v / (1 - beta2**step)


RMS_CASES = [
    *(
        pytest.param(lambda p, k=k, b=b: OURS[k](p, b), id=f"{k}-{b}")
        for k in ("AdamW", "StableAdamW", "LAMB")
        for b in (8, 32)
    ),
    *(pytest.param(lambda p, k=k: TORCH[k](p), id=k) for k in ("AdamW", "foreach", "fused", "amsgrad", "NAdam")),
]


@pytest.mark.parametrize("build", RMS_CASES)
def test_rms_is_measured_against_the_second_moment_the_step_will_use(build):
    model = Bag()
    optimizer = build(list(model.named_parameters()))
    watch = Watch(model, optimizer)
    eps = optimizer.param_groups[0]["eps"]
    seen = 0.0
    for step in range(1, 6):
        model.fill_grads(step)
        expected = {}
        for name, p in model.named_parameters():
            g = p.grad.double()
            v = second_moment(optimizer, p, g, step)
            expected[name] = (g.square() / v.clamp(min=eps**2)).mean().sqrt()
        optimizer.step()
        watch.step()
        for name, value in expected.items():
            assert_close(watch.record["tensors"][name]["rms"], value)
        seen = max(seen, *map(float, expected.values()))
        if step == 1:
            assert all(abs(float(x) - 1) < 1e-3 for x in expected.values())
    assert seen > 1.2  # a second moment that is out of date was among them


def test_weight_decay_through_the_gradient_is_in_the_second_moment_too():
    # At the first step v is g² with the decay in it: the ratio is 1 only if both sides know.
    for build in (lambda p: optim.Adam(p, bits=8, weight_decay=3.0), lambda p: torch.optim.Adam(p, weight_decay=3.0)):
        model = Bag()
        watch = Watch(model, optimizer := build(list(model.parameters())))
        for step in range(2):
            model.fill_grads(step)
            sizes = {n: rms(p.grad + 3.0 * p.detach()) for n, p in model.named_parameters()}
            optimizer.step()
            watch.step()
            for name, expected in sizes.items():
                assert_close(watch.record["tensors"][name]["grad_rms"], expected)
            if step == 0:
                assert all(abs(x["rms"] - 1) < 1e-4 for x in watch.record["tensors"].values())


@pytest.mark.parametrize("bits", [8, 32])
def test_rms_agrees_with_stable_adamws_own(bits):
    model = Bag()
    optimizer = OURS["StableAdamW"](model.named_parameters(), bits)
    watch = Watch(model, optimizer)
    for step in range(6):
        model.fill_grads(step)
        optimizer.step()
        optimizer.zero_grad()  # before the watcher is asked
        watch.step()
        for name, own in zip(optimizer.names, optimizer.rms.tolist(), strict=True):
            assert_close(watch.record["tensors"][name]["rms"], own, 5e-6)  # six digits are kept


def test_a_loss_scale_is_taken_out_of_the_gradient():
    plain, scaled = Bag(), Bag()
    first = optim.AdamW(plain.named_parameters(), lr=1e-2, bits=8)
    second = OURS["scaled"](scaled.named_parameters(), 8)
    watches = Watch(plain, first), Watch(scaled, second)
    for step in range(3):
        for model, factor in ((plain, 1.0), (scaled, -64.0)):
            model.fill_grads(step)
            for p in model.parameters():
                p.grad *= factor
        first.step()
        second.step()
        assert [watch.step() for watch in watches] == [[], []]
        assert watches[0].record["tensors"] == watches[1].record["tensors"]


def test_a_grad_scaler_is_taken_out_of_the_gradient():
    found = []
    for scale in (1.0, 1024.0):
        model = nn.Linear(8, 8)
        nn.init.eye_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        watch = Watch(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(3):
            loss = model(torch.randn(4, 8, generator=seed(step))).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # leaves unscaling to the fused step
            scaler.update()
            optimizer.zero_grad()
            assert watch.step(loss) == []
        found.append(watch.record["tensors"])
    assert found[0]["weight"] == pytest.approx(found[1]["weight"], rel=1e-4)
    assert found[0]["weight"]["grad_rms"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_read_with_their_own_moments(dtype):
    model = Bag(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    watch = Watch(model, optimizer)
    for step in range(1, 4):
        model.fill_grads(step)
        expected = {}
        for name, p in model.named_parameters():
            g = p.grad.double()
            expected[name] = (g.square() / second_moment(optimizer, p, g, step).clamp(min=1e-12)).mean().sqrt()
        optimizer.step()
        assert watch.step() == []
        for name, value in expected.items():
            assert_close(watch.record["tensors"][name]["rms"], value, 1e-4)


def test_memory_order_does_not_matter():
    model = nn.Conv2d(16, 32, 5, bias=False).to(memory_format=torch.channels_last)
    optimizers = optim.AdamW(model.parameters(), bits=8), torch.optim.AdamW(model.parameters())
    for optimizer in optimizers:
        watch = Watch(model, optimizer)
        for step in range(1, 4):
            grad = torch.randn(model.weight.shape, generator=seed(step)) * step
            model.weight.grad = grad  # contiguous, where the weight is not
            before = snapshot(model)
            optimizer.step()
            watch.step()
            assert_sizes(watch, model, before)
        assert 0.5 < watch.record["tensors"]["weight"]["rms"] < 2
        watch.close()


def test_eps_share_is_the_part_of_the_update_that_eps_takes():
    model = nn.Linear(50, 50, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1e-8, weight_decay=0.0)
    watch = Watch(model, optimizer)
    model.weight.grad = torch.full_like(model.weight, 3e-8)
    optimizer.step()
    watch.step()
    found = watch.record["tensors"]["weight"]
    assert_close(found["eps_share"], 0.25)
    assert_close(found["update_rms"], 0.75, 1e-5)


def test_totals_are_those_of_the_state_after_the_step():
    for build in (lambda p: OURS["AdamW"](p, 8), lambda p: OURS["AdamW"](p, 32), TORCH["fused"]):
        model = Bag()
        optimizer = build(list(model.named_parameters()))
        watch = Watch(model, optimizer, deep_every=1)
        for step in range(3):
            model.fill_grads(step)
            optimizer.step()
            watch.step()
        moments = {"weight": [], "momentum": [], "square": []}
        portable = (
            optimizer.state_dict(format="portable")
            if isinstance(optimizer, optim.Optimizer)
            else optimizer.state_dict()
        )
        for p, state in zip(model.parameters(), portable["state"].values(), strict=True):
            for kind, x in (("weight", p), ("momentum", state["exp_avg"]), ("square", state["exp_avg_sq"])):
                moments[kind].append(x.detach().double().flatten())
        moments["var"] = [x.sqrt() for x in moments["square"]]
        for kind, parts in moments.items():
            x = torch.cat(parts)
            for suffix, order in (("l1", 1), ("l2", 2), ("max", torch.inf)):
                expected = torch.linalg.vector_norm(x, order)
                assert_close(watch.record["totals"][f"{kind}_{suffix}"], expected, 1e-5)


def test_the_error_of_8_bit_states_is_reported_and_small_blocks_make_it_smaller():
    errors = {}
    for block in (16, 256, 4096):
        model = nn.Linear(128, 128, bias=False)
        optimizer = optim.AdamW(model.parameters(), bits=8, block=block)
        watch = Watch(model, optimizer, deep_every=1)
        for step in range(3):
            model.weight.grad = torch.randn(128, 128, generator=seed(step))
            optimizer.step()
            watch.step()
        errors[block] = watch.record["totals"]["state_error"]
    assert 1e-4 < errors[16] < errors[256] < errors[4096] < 0.05
    plain = Watch(model, optimizer := torch.optim.AdamW(model.parameters()), deep_every=1)
    optimizer.step()
    plain.step()
    assert "state_error" not in plain.record["totals"]


def test_chosen_tensors_only():
    model = Bag()
    optimizer = TORCH["AdamW"](list(model.parameters()))
    watch = Watch(model, optimizer, tensors=("mat*", "scalar"))
    model.fill_grads(0)
    optimizer.step()
    watch.step()
    assert set(watch.record["tensors"]) == {"matrix", "scalar"}
    with pytest.raises(ValueError, match="no parameter of the optimizer matches nothing"):
        Watch(model, optimizer, tensors="nothing")
