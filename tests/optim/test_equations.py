"""The optimizers compute their equations: PyTorch's own where it has them, the papers' in float64 elsewhere."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import seed
from tests.optim.cases import OPTIMIZERS, make, params_of
from trimtab import optim

STEPS = 20
# Twenty roundings of values below 4, each up to half of 2^-22, and a relative float32 error of each update.
CLOSE = {"rtol": 1e-6, "atol": 5e-6}


def gradients(shape: tuple[int, ...], steps: int = STEPS, scale: float = 1.0) -> Iterator[Tensor]:
    """Of sizes that differ by step and by row, so that a wrong norm or average shows."""
    generator = seed(1)
    rows = 10 ** torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator)
    for t in range(steps):
        yield torch.randn(shape, generator=generator) * rows * scale * (1 + 3 * (t % 4))


def start(*shape: int) -> Tensor:
    return torch.randn(shape, generator=seed(0))


def run(optimizer: torch.optim.Optimizer, steps: int = STEPS, scale: float = 1.0) -> Tensor:
    (p,) = params_of(optimizer)
    for g in gradients(tuple(p.shape), steps, scale):
        p.grad = g.to(p.dtype)
        optimizer.step()
    return p.detach()


# --- Against PyTorch

TORCH: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("Adam", {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3}),
    ("SGD", {"lr": 1e-3, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-3, "weight_decay": 0.1, "dampening": 0.3}),
    ("SGD", {}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-3}),
    ("Adagrad", {"lr": 1e-2, "initial_accumulator_value": 0.5}),
    ("Adagrad", {}),
    ("RMSprop", {"lr": 1e-3, "alpha": 0.9, "weight_decay": 0.1, "eps": 1e-3}),
    ("RMSprop", {"lr": 1e-3, "alpha": 0.9, "weight_decay": 0.1, "eps": 1e-3, "momentum": 0.8}),
    ("RMSprop", {"lr": 1e-3, "alpha": 0.9, "weight_decay": 0.1, "eps": 1e-3, "centered": True}),
    ("RMSprop", {"lr": 1e-3, "alpha": 0.9, "weight_decay": 0.1, "momentum": 0.8, "centered": True}),
    ("RMSprop", {}),
    ("Adafactor", {"lr": 0.05, "beta2_decay": -0.5, "eps": (1e-2, 0.1), "d": 1.5, "weight_decay": 0.1}),
    ("Adafactor", {"eps": (1e-7, 1e-3)}),
]


@pytest.mark.parametrize(("name", "options"), TORCH, ids=[f"{name}-{'-'.join(o) or 'defaults'}" for name, o in TORCH])
def test_twenty_steps_equal_those_of_torch(name, options):
    mine = run(getattr(optim, name)([nn.Parameter(start(37, 29))], **options), scale=0.1)
    theirs = run(getattr(torch.optim, name)([nn.Parameter(start(37, 29).double())], **options), scale=0.1)
    assert not torch.equal(mine, start(37, 29))
    torch.testing.assert_close(mine, theirs.float(), **CLOSE)


@pytest.mark.parametrize("shape", [(37, 29), (501,), (5, 11, 13), ()])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"lr": 1.0, "weight_decay": 0.1}], ids=str)
def test_adafactor_has_the_defaults_the_state_and_the_results_of_torch(shape, options):
    """In float32: the default of eps depends on the dtype."""
    mine, theirs = (kind([nn.Parameter(start(*shape))], **options) for kind in (optim.Adafactor, torch.optim.Adafactor))
    assert theirs.defaults.items() <= (mine.defaults | {"foreach": None}).items()
    for optimizer in (mine, theirs):
        (p,) = params_of(optimizer)
        for g in gradients(shape or (1,)):
            p.grad = g.reshape(shape)
            optimizer.step()
    torch.testing.assert_close(params_of(mine), params_of(theirs), **CLOSE)
    (kept,), (expected,) = mine.state.values(), theirs.state.values()
    assert kept.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(kept[key], value, rtol=1e-5, atol=0)


def test_adafactor_steps_half_precision_in_float32():
    wide, half = (
        optim.Adafactor([nn.Parameter(start(37, 29).bfloat16().to(dtype))], eps=(1e-7, 1e-3))
        for dtype in (torch.float32, torch.bfloat16)
    )
    for optimizer in (wide, half):
        run(optimizer, steps=1)
    # The parameter is rounded once, by half a spacing; the gradient too, which changes the step by less than 1 %.
    torch.testing.assert_close(params_of(half)[0].float(), params_of(wide)[0], rtol=2**-8, atol=3e-4)
    assert all(x.dtype == torch.float32 for x in half.state[params_of(half)[0]].values())


@pytest.mark.parametrize(("momentum", "centered"), [(0.0, False), (0.9, False), (0.0, True), (0.9, True)])
def test_rmsprop_keeps_the_state_that_torch_keeps(momentum, centered):
    options = {"momentum": momentum, "centered": centered}
    mine, theirs = (kind([nn.Parameter(start(37, 29))], **options) for kind in (optim.RMSprop, torch.optim.RMSprop))
    for optimizer in (mine, theirs):
        run(optimizer)
    (kept,), (expected,) = mine.state.values(), theirs.state.values()
    assert kept.keys() == expected.keys()
    for key, value in expected.items():
        # Averages of twenty gradients of either sign: a few roundings of the largest.
        torch.testing.assert_close(kept[key], value, rtol=1e-5, atol=1e-6 * value.abs().max().item())


def test_groups_of_rmsprop_may_differ_in_momentum_and_centering():
    choices = [{}, {"momentum": 0.9}, {"centered": True}, {"momentum": 0.9, "centered": True}]
    params = [[nn.Parameter(start(37, 29)) for _ in choices] for _ in range(2)]
    groups = [[{"params": [p], **choice} for p, choice in zip(each, choices, strict=True)] for each in params]
    for optimizer in (optim.RMSprop(groups[0]), torch.optim.RMSprop(groups[1])):
        for g in gradients((37, 29)):
            for p in params_of(optimizer):
                p.grad = g.clone()
            optimizer.step()
    torch.testing.assert_close(*params, **CLOSE)


def test_8_bit_rmsprop_with_momentum_stays_near_32_bits():
    """Over 300 steps on gradients whose sizes spread over two decades in a block, as far as without momentum."""
    scale = 10 ** (0.4 * torch.randn(4096, generator=seed(2)) - 3)

    def trained(bits: int, momentum: float) -> Tensor:
        p, generator = nn.Parameter(torch.zeros(4096)), seed(3)
        optimizer = optim.RMSprop([p], lr=1e-3, momentum=momentum, bits=bits)
        for _ in range(300):
            p.grad = (torch.randn(4096, generator=generator) + 0.3) * scale
            optimizer.step()
        assert ("square_avg_codes" in optimizer.state[p]) == (bits == 8)
        assert ("momentum_buffer_codes" in optimizer.state[p]) == (bits == 8 and momentum > 0)
        return p.detach()

    for momentum in (0.0, 0.9):
        exact = trained(32, momentum)
        assert (trained(8, momentum) - exact).norm() < 0.05 * exact.norm()


def test_tensors_longer_than_a_stretch_of_the_slow_path_are_stepped_to_their_end():
    """Without momentum there is no state and no fused kernel: it goes in stretches of 2^18 values."""
    start, g = torch.randn(2, 150_001, generator=seed(0)), torch.randn(2, 150_001, generator=seed(1))
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    for kind, p in zip((optim.SGD, torch.optim.SGD), params, strict=True):
        p.grad = g
        kind([p], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(*params, **CLOSE)


# --- Against plain references


def adam_moments(t: int, g: Tensor, s: dict[str, Tensor], b1: float, b2: float) -> tuple[Tensor, Tensor]:
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    return s["m"] / (1 - b1**t), s["v"] / (1 - b2**t)


def lamb(bound: float | None) -> Callable[..., Tensor]:
    def step(t: int, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> Tensor:
        m, v = adam_moments(t, g, s, 0.9, 0.95)
        u = m / (v.sqrt() + 1e-6) + 0.1 * p
        ratio = p.norm() / u.norm()
        return p - 0.01 * (ratio if bound is None else (bound * ratio).clamp(max=1)) * u

    return step


def lars(bound: float | None) -> Callable[..., Tensor]:
    def step(t: int, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> Tensor:
        s["m"] = 0.9 * s.get("m", 0) + g + 0.1 * p
        ratio = p.norm() / s["m"].norm()
        return p - 0.01 * (ratio if bound is None else (bound * ratio).clamp(max=1)) * s["m"]

    return step


def lion(t: int, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> Tensor:
    m = s.get("m", torch.zeros_like(g))
    s["m"] = 0.95 * m + 0.05 * g
    return p * (1 - 0.01 * 0.1) - 0.01 * (0.8 * m + 0.2 * g).sign()


def ademamix(rising: bool) -> Callable[..., Tensor]:
    def step(t: int, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> Tensor:
        share = min(t / 8, 1) if rising else 1
        # The paper's form: ln β1 ln β3 / ((1 - t/T) ln β3 + (t/T) ln β1).
        l1, l3 = math.log(0.9), math.log(0.999)
        b3 = math.exp(l1 * l3 / ((1 - share) * l3 + share * l1))
        s["slow"] = b3 * s.get("slow", 0) + (1 - b3) * g
        m, v = adam_moments(t, g, s, 0.9, 0.95)
        alpha = 5 * (min(t / 12, 1) if rising else 1)
        return p * (1 - 0.01 * 0.1) - 0.01 * (m + alpha * s["slow"]) / (v.sqrt() + 1e-3)

    return step


def adafactor(t: int, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> Tensor:
    square = g**2 + 1e-30
    if p.dim() < 2:
        v = s["v"] = 0.95 * s.get("v", 0) + 0.05 * square
    else:
        s["r"] = 0.95 * s.get("r", 0) + 0.05 * square.mean(-1)
        s["c"] = 0.95 * s.get("c", 0) + 0.05 * square.mean(-2)
        v = s["r"][..., :, None] * s["c"][..., None, :] / s["r"].mean(-1)[..., None, None]
    u = g / v.sqrt()
    u = u / max(1, u.square().mean().sqrt() / 1.5)
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * u
    return p * (1 - 0.01 * 0.1) - 0.01 * s["m"]


def beta2_schedule(t: int, p: Tensor, g: Tensor, s: dict[str, Tensor]) -> Tensor:
    b2 = 1 - t**-0.6
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    return p * (1 - 0.01 * 0.1) - 0.01 * s["m"] / (1 - 0.9**t) / (s["v"].sqrt() + 1e-3)


COMMON = {"lr": 0.01, "weight_decay": 0.1}
MIX = COMMON | {"betas": (0.9, 0.95, 0.999), "eps": 1e-3}
REFERENCES: dict[str, tuple[Callable[..., Tensor], type[optim.Optimizer], dict[str, Any]]] = {
    "LAMB": (lamb(None), optim.LAMB, COMMON | {"betas": (0.9, 0.95)}),
    "LAMB, one-sided": (lamb(0.5), optim.LAMB, COMMON | {"betas": (0.9, 0.95), "max_unorm": 0.5}),
    "LARS": (lars(0.02), optim.LARS, COMMON),
    "LARS, two-sided": (lars(None), optim.LARS, COMMON | {"max_unorm": None}),
    "Lion": (lion, optim.Lion, COMMON | {"betas": (0.8, 0.95)}),
    "AdEMAMix": (ademamix(False), optim.AdEMAMix, MIX),
    "AdEMAMix, rising": (ademamix(True), optim.AdEMAMix, MIX | {"t_alpha": 12, "t_beta3": 8}),
    "AdafactorMomentum": (adafactor, optim.AdafactorMomentum, COMMON | {"betas": (0.9, 0.95), "clip_threshold": 1.5}),
    "β2 schedule": (beta2_schedule, optim.AdamW, COMMON | {"eps": 1e-3, "beta2_power": 0.6}),
}


@pytest.mark.parametrize("shape", [(37, 29), (501,), (5, 11, 13)])
@pytest.mark.parametrize("name", REFERENCES)
def test_the_update_is_the_equation_of_its_docstring(name, shape):
    reference, kind, options = REFERENCES[name]
    expected, state = start(*shape).double(), {}
    for t, g in enumerate(gradients(shape), start=1):
        expected = reference(t, expected, g.double(), state)
    torch.testing.assert_close(run(kind([nn.Parameter(start(*shape))], **options)), expected.float(), **CLOSE)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_independent_decay_takes_wd_times_lr_over_lr_max_off_the_weights(name):
    """With zero gradients nothing but the decay is left."""
    p = nn.Parameter(start(37, 29))
    p.grad = torch.zeros_like(p)
    optimizer = make(name, [p], lr=0.25, lr_max=0.5, weight_decay=0.01, independent_decay=True)
    optimizer.step()
    torch.testing.assert_close(p.detach(), start(37, 29) * (1 - 0.01 * 0.5), rtol=1e-6, atol=0)
    assert make(name, [p], lr=0.25, independent_decay=True).param_groups[0]["lr_max"] == 0.25


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_rms_scaled_multiplies_the_step_of_each_tensor_by_its_size_and_not_its_decay(size, independent):
    weights = [size * start(37, 29), 10 * size * start(501)]
    params = [nn.Parameter(w.clone()) for w in weights]
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
    mine = optim.AdamW(params, **options, rms_scaled=True, independent_decay=independent)
    found, decay = [], 0.1 if independent else 1e-2 * 0.1  # lr is the peak
    for g, w in zip(([*gradients(tuple(w.shape))] for w in weights), weights, strict=True):
        p, m, v = w.double(), 0.0, 0.0
        for t, x in enumerate(g, start=1):
            m, v = 0.8 * m + 0.2 * x.double(), 0.95 * v + 0.05 * x.double() ** 2
            u = m / (1 - 0.8**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
            p = p * (1 - decay) - 1e-2 * max(p.square().mean().sqrt(), 1e-3) * u
        found.append(p)
    for pair in zip(*(gradients(tuple(w.shape)) for w in weights), strict=True):
        for p, g in zip(params, pair, strict=True):
            p.grad = g
        mine.step()
    for p, expected in zip(params, found, strict=True):
        torch.testing.assert_close(p.detach().double(), expected, **CLOSE)
