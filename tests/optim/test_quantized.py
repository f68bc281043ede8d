"""8-bit state follows 32-bit state: step by step, over a run, and with the norms that some rules need."""

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import seed
from tests.optim.cases import OPTIMIZERS, QUANTIZED, assert_stored_as_told, make, params_of
from trimtab import optim

CODEBOOKS = [{}, {"codebook": "dynamic-symmetric"}]  # the default, whatever it is, and the published one
SHAPE = (71, 61)


def pair(name: str, **options: object) -> tuple[optim.Optimizer, optim.Optimizer]:
    def one(bits: int) -> optim.Optimizer:
        return make(name, [nn.Parameter(torch.randn(SHAPE, generator=seed(0)))], bits, **options)

    return one(8), one(32)


def step(optimizer: torch.optim.Optimizer, g: Tensor) -> Tensor:
    """Take it, and return how the parameter changed."""
    (p,) = params_of(optimizer)
    before = p.detach().clone()
    p.grad = g
    optimizer.step()
    return p.detach() - before


def grads(count: int) -> list[Tensor]:
    generator = seed(1)
    return [torch.randn(SHAPE, generator=generator) * 0.01 for _ in range(count)]


@pytest.mark.parametrize("options", CODEBOOKS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_each_step_from_the_same_state_is_the_32_bit_step(name, options):
    """The limits of the reference tests, at every fifth of 50 steps: mean |Δp| < 1e-4, mean |Δp|/|p| < 1e-3."""
    lr = 1e-4 if name == "Lion" else 1e-3  # Lion moves every weight by ±lr, so a flipped sign costs 2 lr
    eight, full = pair(name, lr=lr, weight_decay=0.0, **options)
    moved = wrong = 0.0
    for number, g in enumerate(grads(50)):
        if number % 5:
            step(full, g)
            continue
        p8, p32 = params_of(eight)[0], params_of(full)[0]
        p8.data.copy_(p32)
        if full.state:
            eight.load_state_dict(full.state_dict(format="portable"))
        change = step(full, g)
        difference = (step(eight, g) - change).abs()
        assert difference.mean() < 1e-4
        assert (difference / p32.detach().abs().clamp(min=1e-3)).mean() < 1e-3
        wrong += difference.sum().item()
        moved += change.abs().sum().item()
    assert_stored_as_told(eight, 8)
    # One rounding of the state, about 1.5 % of a value, and only its share in the step. Adagrad and RMSprop store √'s
    # square only; Lion's sign is either right or wrong, and wrong for averages that are nearly zero.
    assert wrong < 0.02 * moved, wrong / moved
    assert wrong > 0


@pytest.mark.parametrize("options", CODEBOOKS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_over_fifty_steps_8_bit_state_leads_to_the_same_place(name, options):
    eight, full = pair(name, weight_decay=0.0, **options)
    start = params_of(full)[0].detach().clone()
    for g in grads(50):
        step(eight, g)
        step(full, g)
    a, b = params_of(eight)[0].detach() - start, params_of(full)[0].detach() - start
    assert_stored_as_told(eight, 8)
    # Lion's steps are ±lr: a sign that flips is all wrong, and the average of 50 noisy gradients is often near zero.
    limit = 0.1 if name == "Lion" else 0.05
    assert (a - b).norm() < limit * b.norm(), (a - b).norm() / b.norm()


@pytest.mark.parametrize(("name", "plain"), [("LAMB", "AdamW"), ("LARS", "SGD")])
@pytest.mark.parametrize("bits", [8, 32])
def test_lamb_and_lars_apply_their_norms(name, plain, bits):
    """A peer's 8-bit LAMB and LARS leave the norms out and are Adam and SGD."""
    options = {"lr": 1e-2, "weight_decay": 0.0} | ({"eps": 1e-6} if plain == "AdamW" else {})
    scaled, other = (
        make(kind, [nn.Parameter(torch.randn(SHAPE, generator=seed(0)) * 3)], bits, **options) for kind in (name, plain)
    )
    for g in grads(5):
        p = params_of(other)[0]
        p.data.copy_(params_of(scaled)[0])
        length = p.detach().norm()
        got, update = step(scaled, g * 100), step(other, g * 100)
        ratio = length / (update.norm() / 1e-2)
        expected = ratio if name == "LAMB" else (0.02 * ratio).clamp(max=1)
        assert abs(expected - 1) > 0.5  # so it cannot be mistaken for the plain step
        # Both are differences of float32 parameters up to 12, rounded by 5e-7; the ratio triples one of them.
        torch.testing.assert_close(got, update * expected, rtol=1e-4, atol=5e-6)


def test_no_parameter_runs_away_when_a_block_spans_many_decades():
    """A second moment that vanishes under a first one that stays would make the update explode."""
    generator = seed(3)
    scales = 10 ** (-8 * torch.rand(SHAPE, generator=generator))
    eight, full = pair("AdamW", lr=1e-3, weight_decay=0.0)
    for _ in range(30):
        g = torch.randn(SHAPE, generator=generator) * scales
        a, b = step(eight, g), step(full, g)
        # Adam's own bound on one step is lr (1 - β1) / √(1 - β2) = 3.2 lr; it rarely moves anything by more than lr.
        assert a.abs().max() < 2 * max(b.abs().max(), 1e-3)


def test_zero_gradients_leave_harmless_codes():
    eight, _ = pair("AdamW", weight_decay=0.0)
    for _ in range(3):
        assert (step(eight, torch.zeros(SHAPE)) == 0).all()
    moments = eight.state_dict(format="portable")["state"][0]
    assert (moments["exp_avg"] == 0).all()
    assert (moments["exp_avg_sq"] == 0).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_nan_in_the_gradient_is_not_hidden(name):
    for optimizer in pair(name) if name in QUANTIZED else [make(name, [nn.Parameter(torch.ones(SHAPE))])]:
        step(optimizer, grads(1)[0])
        g = grads(1)[0]
        g[3, 5] = torch.nan
        step(optimizer, g)
        assert params_of(optimizer)[0][3, 5].isnan()
        assert optimizer.skipped.tolist() == [0]
