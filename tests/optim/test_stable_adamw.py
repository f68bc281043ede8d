"""StableAdamW: the paper's algorithm 2, its worked example, and the bounds of RMS_t."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import seed
from tests.optim.cases import params_of
from tests.optim.test_equations import CLOSE, STEPS, gradients, run, start
from trimtab import optim


def stable_adamw(
    p: Tensor, steps: int, *, lr: float, betas: tuple[float, float], eps: float, wd: float, d: float, paper: bool
) -> tuple[Tensor, list[float]]:
    """The paper's algorithm 2 in float64; `paper` decays by the shortened rate, as printed there."""
    p, m, v, rms = p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double(), []
    for t, g in enumerate(gradients(tuple(p.shape), steps), start=1):
        g = g.double()
        b1, b2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in betas)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        rms.append((g**2 / v.clamp(min=eps**2)).mean().sqrt().item())
        eta = lr / max(1, rms[-1] / d)
        p = p - (eta if paper else lr) * wd * p - eta * m / (v.sqrt() + eps)
    return p, rms


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("d", [1.0, 1.3])
def test_stable_adamw_is_algorithm_2(paper, d):
    optimizer = optim.StableAdamW(
        [nn.Parameter(start(37, 29))], lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.2,
        clip_threshold=d, decay_clipped=paper,
    )  # fmt: skip
    (p,) = params_of(optimizer)
    expected, rms = stable_adamw(start(37, 29), STEPS, lr=0.01, betas=(0.9, 0.95), eps=1e-3, wd=0.2, d=d, paper=paper)
    seen = []
    for g in gradients((37, 29)):
        p.grad = g
        optimizer.step()
        seen.append(optimizer.rms.item())
    assert max(rms) > 1.3  # the clip was used
    assert seen == pytest.approx(rms, rel=1e-5)  # float32 sums over a block
    torch.testing.assert_close(p.detach(), expected.float(), **CLOSE)


@pytest.mark.parametrize(("paper", "expected"), [(False, [0.80503169, 1.01050522]), (True, [0.81009377, 1.01671778])])
def test_stable_adamw_gives_the_numbers_of_the_worked_example(paper, expected):
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.StableAdamW([p], lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.2, decay_clipped=paper)
    p.grad = torch.tensor([1.0, -2.0])
    optimizer.step()
    assert p.tolist() == pytest.approx([0.8800001, 1.0799999], abs=1e-7)
    assert optimizer.rms.item() == pytest.approx(1, rel=1e-7)
    p.grad = torch.tensor([10.0, 20.0])
    optimizer.step()
    m, v = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
    assert (m / (1 - 0.9**2)).tolist() == pytest.approx([5.736842, 9.578947], rel=1e-6)
    assert (v / (1 - 0.99**2)).tolist() == pytest.approx([50.74874, 202.99497], rel=1e-6)
    assert optimizer.rms.item() == pytest.approx(1.403742, rel=1e-6)
    assert p.tolist() == pytest.approx(expected, abs=2e-7)  # float32 of numbers near 1


def test_weight_decay_follows_the_shortened_step_unless_told_otherwise():
    """As in the paper's algorithm 2, in its authors' later code and in optimi."""
    assert optim.StableAdamW([nn.Parameter(start(3))], independent_decay=True).param_groups[0]["weight_decay"] == 1e-2
    ends = {}
    for given in (None, True, False):
        p = nn.Parameter(torch.ones(4))
        optimizer = optim.StableAdamW([p], lr=0.1, weight_decay=0.5, decay_clipped=given)
        for g in (1e-3, 10.0):
            p.grad = torch.full_like(p, g)
            optimizer.step()
        ends[given] = p.detach().clone()
    assert torch.equal(ends[None], ends[True])
    assert (ends[True] - ends[False]).abs().min() > 0.01


@pytest.mark.parametrize("decay_clipped", [False, True])
def test_stable_adamw_without_a_clip_is_adamw(decay_clipped):
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    unclipped = {"clip_threshold": math.inf, "decay_clipped": decay_clipped}
    mine = run(optim.StableAdamW([nn.Parameter(start(37, 29))], **options, **unclipped))
    theirs = run(torch.optim.AdamW([nn.Parameter(start(37, 29).double())], **options))
    clipped = run(optim.StableAdamW([nn.Parameter(start(37, 29))], **options))
    torch.testing.assert_close(mine, theirs.float(), **CLOSE)
    assert (clipped - mine).abs().max() > 1e-3


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("beta2", [0.5, 0.9, 0.99])
def test_rms_starts_at_one_and_never_passes_its_bound(bits, beta2):
    params = [nn.Parameter(start(70, 61)), nn.Parameter(start(7)), nn.Parameter(start(5))]
    optimizer = optim.StableAdamW(params, betas=(0.9, beta2), bits=bits)
    highest = 0.0
    for t in range(12):
        for p in params[:2]:
            # Small gradients, then 100,000 times larger ones, so that v is out of date.
            p.grad = torch.full_like(p, 1e5 if t == 11 else 1.0) * torch.randn(p.shape, generator=seed(t)).sign()
        optimizer.step()
        rms = optimizer.rms
        assert rms.shape == (3,)
        assert rms[2].isnan()  # it had no gradient
        if t == 0:
            assert rms[:2].tolist() == pytest.approx([1, 1], rel=1e-6)
        highest = max(highest, rms[:2].max().item())
    # The debiased average over t steps weighs the newest gradient by (1-β2)/(1-β2^t), a little more than 1-β2.
    bound = math.sqrt((1 - beta2**12) / (1 - beta2))
    assert bound < 1 / math.sqrt(1 - beta2)
    assert highest == pytest.approx(bound, rel=1e-3)


def test_a_tiny_gradient_does_not_count_as_stale():
    """RMS_t is over g² / max(v, eps²): gradients below eps make it small."""
    p = nn.Parameter(start(70, 61))
    optimizer = optim.StableAdamW([p], eps=1e-6)
    p.grad = torch.full_like(p, 1e-8)
    optimizer.step()
    assert optimizer.rms.item() == pytest.approx(1e-2, rel=1e-5)
