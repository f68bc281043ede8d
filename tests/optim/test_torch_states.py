"""PyTorch's optimizers continue from our portable state, and ours from theirs."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from tests.optim.cases import (
    QUANTIZED,
    assert_same_snapshots,
    assert_stored_as_told,
    make,
    params_of,
    small_model,
    snapshot,
    train,
)
from tests.optim.test_checkpoint import trained
from trimtab import optim

EQUIVALENTS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "StableAdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
}
CASES = [(name, bits) for name in EQUIVALENTS for bits in (8, 32) if bits == 32 or name in QUANTIZED]
# Three steps of float32 rounding in another order, of weights below 1 and updates near 1e-2.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_torch_continues_from_our_portable_state(name, bits):
    unclipped = {"clip_threshold": float("inf")} if name == "StableAdamW" else {}
    mine = trained(name, bits, **unclipped)
    kind, options = EQUIVALENTS[name]
    theirs = kind([(key, nn.Parameter(p.detach().clone())) for key, p in zip(mine.names, params_of(mine), strict=True)])
    theirs.load_state_dict(mine.state_dict(format="portable"))
    assert theirs.param_groups[0]["lr"] == options["lr"]
    # From here on ours in 32 bits: the same moments, no further rounding.
    wide = make(name, [nn.Parameter(p.detach().clone()) for p in params_of(mine)], 32, **unclipped)
    wide.load_state_dict(mine.state_dict())
    for optimizer in (wide, theirs):
        train(optimizer, range(3, 6))
    for p, q, old in zip(params_of(theirs), params_of(wide), params_of(mine), strict=True):
        torch.testing.assert_close(p, q, **CLOSE)
        assert not torch.equal(p, old)


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_we_continue_from_the_state_of_torch(name, bits):
    kind, options = EQUIVALENTS[name]
    theirs = kind(small_model().named_parameters(), **options)
    train(theirs, range(3))
    unclipped = {"clip_threshold": float("inf")} if name == "StableAdamW" else {}
    mine = make(name, [(key, nn.Parameter(p.detach().clone())) for key, p in named(theirs)], bits, lr=1.0, **unclipped)
    mine.load_state_dict(theirs.state_dict())
    assert mine.param_groups[0]["lr"] == options["lr"]
    before = [p.detach().clone() for p in params_of(mine)]
    for optimizer in (mine, theirs):
        train(optimizer, range(3, 6))
    assert_stored_as_told(mine, bits)
    for p, q, old in zip(params_of(mine), params_of(theirs), before, strict=True):
        if bits == 32:
            torch.testing.assert_close(p, q, **CLOSE)
        assert (p - q).norm() < 0.03 * (q - old).norm()  # 8 bits: one or two percent of the way


RMSPROPS = [({"momentum": 0.9}, 8), ({"momentum": 0.9}, 32), ({"centered": True}, 32)]
RMSPROPS += [({"momentum": 0.9, "centered": True}, 32)]


@pytest.mark.parametrize(("options", "bits"), RMSPROPS, ids=str)
def test_rmsprop_with_momentum_and_centering_goes_to_torch_and_back(options, bits):
    """The state dict has the hyper-parameters, and they determine which moments there are."""
    theirs = torch.optim.RMSprop(small_model().named_parameters(), lr=1e-3, **options)
    train(theirs, range(3))
    mine = optim.RMSprop([(key, nn.Parameter(p.detach().clone())) for key, p in named(theirs)], bits=bits)
    mine.load_state_dict(theirs.state_dict())
    back = torch.optim.RMSprop([(key, nn.Parameter(p.detach().clone())) for key, p in named(theirs)])
    back.load_state_dict(deepcopy(mine.state_dict(format="portable")))  # it takes the tensors themselves
    again = optim.RMSprop([(key, nn.Parameter(p.detach().clone())) for key, p in named(theirs)], bits=bits)
    again.load_state_dict(mine.state_dict())
    before = [p.detach().clone() for p in params_of(mine)]
    for optimizer in (mine, theirs, back, again):
        train(optimizer, range(3, 6))
    assert_stored_as_told(mine, bits)
    assert_same_snapshots(snapshot(again), snapshot(mine))
    for p, q, r, old in zip(*(params_of(x) for x in (mine, theirs, back)), before, strict=True):
        if bits == 32:
            torch.testing.assert_close(p, q, **CLOSE)
            torch.testing.assert_close(r, q, **CLOSE)
        # 8 bits: one or two percent of the way in each moment, and momentum adds them up.
        assert (p - q).norm() < 0.05 * (q - old).norm()
        assert (r - q).norm() < 0.05 * (q - old).norm()


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_continues_the_weight_decay_that_the_state_was_saved_with(decoupled):
    options = {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": decoupled}
    theirs = torch.optim.Adam(small_model().named_parameters(), **options)
    train(theirs, range(3))
    mine = optim.Adam([(key, nn.Parameter(p.detach().clone())) for key, p in named(theirs)])
    mine.load_state_dict(theirs.state_dict())
    back = torch.optim.Adam([(key, nn.Parameter(p.detach().clone())) for key, p in named(theirs)])
    back.load_state_dict(deepcopy(mine.state_dict()))
    for optimizer in (mine, theirs, back):
        train(optimizer, range(3, 6))
    for p, q, r in zip(*(params_of(x) for x in (mine, theirs, back)), strict=True):
        torch.testing.assert_close(p, q, **CLOSE)
        torch.testing.assert_close(r, q, **CLOSE)


def test_adamw_decays_in_its_own_way_whatever_adam_saved():
    theirs = torch.optim.Adam(small_model().named_parameters(), weight_decay=0.1)
    train(theirs, range(1))
    mine = optim.AdamW(small_model().named_parameters())
    mine.load_state_dict(theirs.state_dict())  # as in PyTorch
    train(mine, range(1))


def test_adafactor_keeps_float32_factors_whatever_torch_saved():
    theirs = torch.optim.Adafactor(small_model(torch.bfloat16).parameters())
    train(theirs, range(2))
    assert theirs.state[params_of(theirs)[0]]["row_var"].dtype == torch.bfloat16
    mine = optim.Adafactor(small_model(torch.bfloat16).parameters())
    mine.load_state_dict(theirs.state_dict())
    train(mine, range(2, 3))
    assert all(x.dtype == torch.float32 for state in mine.state.values() for x in state.values())


def named(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    return list(zip(optimizer.param_groups[0]["param_names"], params_of(optimizer), strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "name", "message"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "AdamW", "amsgrad"),
        (torch.optim.RMSprop, {"centered": True}, "RMSprop", "centered=True needs 32-bit state"),
        (torch.optim.SGD, {"momentum": 0.9}, "AdamW", "has no exp_avg"),
        (torch.optim.NAdam, {}, "Adam", "holds mu_product, which Adam does not keep"),
        (torch.optim.AdamW, {}, "AdafactorMomentum", "has no exp_avg_sq_row, which AdafactorMomentum needs"),
        (torch.optim.Adafactor, {}, "AdafactorMomentum", r"eps must be between .* got \(None, 0.001\)"),
    ],
)
def test_states_of_torch_that_cannot_be_continued_are_refused(kind, options, name, message):
    theirs = kind(small_model().parameters(), **options)
    train(theirs, range(2))
    mine = make(name, small_model().parameters(), 8 if name in QUANTIZED else 32)
    with pytest.raises(ValueError, match=message):
        mine.load_state_dict(theirs.state_dict())
