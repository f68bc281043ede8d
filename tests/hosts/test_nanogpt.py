"""nanoGPT's way to make an optimizer: two lists of parameters by their number of dimensions, and what we change."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import assert_same
from trimtab import optim


def load_example(name: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def two_lists(model: torch.nn.Module, *, named: bool) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in trained if p.dim() >= 2]
    vectors = [(name, p) for name, p in trained if p.dim() < 2]
    lists = (matrices, vectors) if named else ([p for _, p in matrices], [p for _, p in vectors])
    return [{"params": params, "weight_decay": decay} for params, decay in zip(lists, (0.1, 0.0), strict=True)]


def run(module: Any, make: Any) -> Any:
    """Three steps."""
    torch.manual_seed(0)
    model = module.GPT()
    optimizer = make(model)
    for _ in range(3):
        rows = torch.randint(256, (2, module.CONTEXT + 1))
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_for_model_and_named_lists_give_the_same_training():
    module = load_example("nanogpt")
    own = {"lr": 3e-3, "betas": (0.9, 0.95), "bits": 8}
    ways = (
        lambda model: model.configure_optimizers(0.1, 3e-3, (0.9, 0.95)),
        lambda model: optim.AdamW(two_lists(model, named=True), **own),
    )
    (first, made), (second, _) = (run(module, make) for make in ways)
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        assert_same(p.detach(), q.detach())
        assert ("exp_avg_codes" in made.state[p]) == (p.numel() >= 4096 and "wte" not in name and "wpe" not in name)


def test_lists_without_names_are_told_what_to_pass():
    module = load_example("nanogpt")
    with pytest.warns(UserWarning, match=r"no names, .*Pass model\.named_parameters\(\), or call AdamW\.for_model"):
        optim.AdamW(two_lists(module.GPT(), named=False), lr=3e-3, bits=8)


def test_32_bits_take_the_steps_of_pytorch():
    module = load_example("nanogpt")
    ways = (
        lambda model: optim.AdamW.for_model(model, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
        lambda model: torch.optim.AdamW(two_lists(model, named=False), lr=3e-3, betas=(0.9, 0.95)),
    )
    (mine, _), (theirs, _) = (run(module, make) for make in ways)
    rows = torch.arange(module.CONTEXT + 1)[None]
    # Not the weights: the gradient of a key's bias is zero, so Adam's step there is rounding noise.
    torch.testing.assert_close(mine(rows[:, :-1], rows[:, 1:]), theirs(rows[:, :-1], rows[:, 1:]), rtol=1e-5, atol=0)
