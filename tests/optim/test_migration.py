"""From bitsandbytes and torchao to here in mid-run, with the real packages: the next step is the one they take."""

import io
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.cases import assert_same_snapshots, assert_stored_as_told, params_of, snapshot, train
from trimtab import optim

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning",  # what the packages import
    "ignore:OptimState.* does not implement _stable_hash:UserWarning",
)

STEPS = 5


@pytest.fixture
def bnb() -> ModuleType:
    return pytest.importorskip("bitsandbytes")


@pytest.fixture
def torchao() -> Iterator[ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about its own imports
        module = pytest.importorskip("torchao.optim")
    with torch.compiler.set_stance("force_eager"):  # compiling its step takes ten seconds
        yield module


def params() -> list[nn.Parameter]:
    """Two that 8-bit state is used for, one of them a multiple of every block, and a small one."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(70, 61), (128, 64), (7,)]]


def copies(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params_of(optimizer)]


def saved_and_loaded(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_next_step_agrees(mine: optim.Optimizer, theirs: torch.optim.Optimizer, tolerance: float) -> None:
    before = [p.detach().clone() for p in params_of(mine)]
    train(mine, [STEPS])
    train(theirs, [STEPS])
    for p, q, old in zip(params_of(mine), params_of(theirs), before, strict=True):
        moved = (q.detach() - old).norm()
        assert moved > 0
        assert (p.detach() - q.detach()).norm() < tolerance * moved, p.shape


MIGRATIONS: dict[str, tuple[type[optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "AdamW8bit": (optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}, {}),
    "AdamW": (optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}, {}),
    "Lion8bit": (optim.Lion, {"lr": 1e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}, {}),
    # Their groups keep momentum, alpha and eps of these under other names, so they are given again.
    "SGD8bit": (optim.SGD, {"lr": 1e-2, "momentum": 0.8, "weight_decay": 0.1}, {"momentum": 0.8}),
    "RMSprop8bit": (optim.RMSprop, {"lr": 1e-3, "alpha": 0.9}, {"alpha": 0.9}),
    "Adagrad8bit": (optim.Adagrad, {"lr": 1e-2}, {}),
    "AdEMAMix8bit": (optim.AdEMAMix, {"lr": 1e-2, "betas": (0.8, 0.95, 0.999), "alpha": 3.0, "t_alpha": 9}, {}),
}


@pytest.mark.parametrize(
    ("bits", "tolerance"),
    # Read exactly in 32 bits: what is left is float32, and when the decay is taken. In 8 bits, one more rounding.
    [(32, 2e-3), (8, 0.05)],
)
@pytest.mark.parametrize("name", MIGRATIONS)
def test_a_bitsandbytes_run_goes_on(bnb, name, bits, tolerance):
    kind, options, again = MIGRATIONS[name]
    theirs = getattr(bnb.optim, name)(params(), **options)
    train(theirs, range(STEPS))
    mine = kind(copies(theirs), bits=bits, **again)
    mine.load_state_dict(optim.from_bitsandbytes(saved_and_loaded(theirs), mine.moments))
    assert {key: mine.param_groups[0][key] for key in options} == options
    assert mine.state[params_of(mine)[0]]["step"] == STEPS
    assert_stored_as_told(mine, bits)
    # Lion's steps are ±lr: where the average is nearly zero, a rounding turns the sign.
    assert_next_step_agrees(mine, theirs, 0.1 if (name, bits) == ("Lion8bit", 8) else tolerance)


@pytest.mark.parametrize(("bits", "tolerance"), [(32, 1e-4), (8, 0.05)])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_torchao_run_goes_on(torchao, name, bits, tolerance):
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    theirs = getattr(torchao, name)(params(), **options)
    train(theirs, range(STEPS))
    mine = optim.AdamW(copies(theirs), bits=bits)
    mine.load_state_dict(optim.from_torchao(saved_and_loaded(theirs)))
    group = mine.param_groups[0]
    assert group["lr"] == pytest.approx(1e-2, rel=1e-6)  # it keeps float32
    assert isinstance(group["lr"], float)
    assert {key: group[key] for key in ("betas", "eps", "weight_decay")} == {
        key: options[key] for key in ("betas", "eps", "weight_decay")
    }
    assert mine.state[params_of(mine)[0]]["step"] == STEPS
    assert_stored_as_told(mine, bits)
    assert_next_step_agrees(mine, theirs, tolerance)


def test_raw_dicts_of_the_peers_are_refused_with_the_name_of_the_reader(bnb, torchao):
    for theirs, reader in (
        (bnb.optim.AdamW8bit(params()), "from_bitsandbytes"),
        (bnb.optim.AdamW(params()), "from_bitsandbytes"),
        (torchao.AdamW8bit(params()), "from_torchao"),
    ):
        train(theirs, range(2))
        mine = optim.AdamW(params(), bits=8)
        train(mine, [0])
        before = snapshot(mine)
        with pytest.raises(ValueError, match=reader):
            mine.load_state_dict(theirs.state_dict())
        assert_same_snapshots(snapshot(mine), before)


def test_a_state_of_another_kind_of_optimizer_is_refused(bnb):
    theirs = bnb.optim.Lion8bit(params())
    train(theirs, range(2))
    with pytest.raises(ValueError, match="holds 1 moments, but 2 are named"):
        optim.from_bitsandbytes(theirs.state_dict())
