"""What the tests of the optimizers share: every optimizer with decay switched on, a small model, exact snapshots."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import assert_same, seed
from trimtab import optim

# Weight decay everywhere, so that no test passes because nothing decays.
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adam": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "StableAdamW": (optim.StableAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "LAMB": (optim.LAMB, {"lr": 1e-2, "weight_decay": 0.1}),
    "LARS": (optim.LARS, {"lr": 1e-1, "weight_decay": 0.1}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"lr": 1e-3, "weight_decay": 0.1}),
    "Lion": (optim.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "AdEMAMix": (optim.AdEMAMix, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adafactor": (optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1, "eps": (1e-7, 1e-3)}),  # the same for any dtype
    "AdafactorMomentum": (optim.AdafactorMomentum, {"lr": 1e-2, "weight_decay": 0.1}),
}
QUANTIZED = [name for name in OPTIMIZERS if not name.startswith("Adafactor")]  # which have 32-bit state
CASES = [(name, bits) for name in OPTIMIZERS for bits in (8, 32) if bits == 32 or name in QUANTIZED]

every_optimizer: Callable[..., Any] = pytest.mark.parametrize(
    ("name", "bits"), CASES, ids=[f"{name}-{bits}" for name, bits in CASES]
)


def make(name: str, params: Any, bits: int = 32, **options: Any) -> optim.Optimizer:
    kind, own = OPTIMIZERS[name]
    return kind(params, **(own | {"bits": bits} | options))


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two weights above min_8bit_size, neither a multiple of the block, and three tensors below it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(65, 67), nn.LayerNorm(67), nn.Linear(67, 63)).to(dtype)


def set_grads(params: Iterable[Tensor], number: int, scale: float = 0.01) -> None:
    """Gradients that depend on nothing but the number of the step and the shapes."""
    generator = seed(number)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for number in steps:
        set_grads((p for group in optimizer.param_groups for p in group["params"]), number)
        optimizer.step()


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def snapshot(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """A copy of each parameter and its state."""
    return [
        {"param": p.detach().clone()} | {key: x.clone() for key, x in optimizer.state.get(p, {}).items()}
        for p in params_of(optimizer)
    ]


def assert_same_snapshots(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_same(mine[key], theirs[key])


def assert_same_params(got: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for mine, theirs in zip(params_of(got), params_of(expected), strict=True):
        assert_same(mine.detach(), theirs.detach())


def assert_stored_as_told(optimizer: optim.Optimizer, bits: int) -> None:
    """8-bit state really is: without this, every test of it could pass on 32-bit state."""
    for p in params_of(optimizer):
        dtypes = {x.dtype for x in optimizer.state[p].values()}
        assert (torch.uint8 in dtypes) == (bits == 8 and p.numel() >= 4096), (p.shape, dtypes)
