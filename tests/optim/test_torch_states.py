"""PyTorch's optimizers continue from our portable state, and ours from theirs."""

import pytest
import torch
from torch import Tensor, nn

from tests.optim.cases import assert_stored_as_told, make, params_of, small_model, train
from tests.optim.test_checkpoint import trained

TWINS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "StableAdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "weight_decay": 0.1}),
}
# Three steps of float32 rounding in another order, of weights below 1 and updates near 1e-2.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", TWINS)
def test_torch_continues_from_our_portable_state(name, bits):
    unclipped = {"clip_threshold": float("inf")} if name == "StableAdamW" else {}
    mine = trained(name, bits, **unclipped)
    kind, options = TWINS[name]
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


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", TWINS)
def test_we_continue_from_the_state_of_torch(name, bits):
    kind, options = TWINS[name]
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


def named(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    return list(zip(optimizer.param_groups[0]["param_names"], params_of(optimizer), strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "name", "message"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "AdamW", "amsgrad"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "RMSprop", "no momentum"),
        (torch.optim.RMSprop, {"centered": True}, "RMSprop", "no centering"),
        (torch.optim.SGD, {"momentum": 0.9}, "AdamW", "has no exp_avg"),
        (torch.optim.NAdam, {}, "Adam", "holds mu_product, which Adam does not keep"),
        (torch.optim.AdamW, {}, "Adafactor", "has no exp_avg_sq_row, which Adafactor needs"),
    ],
)
def test_states_of_torch_that_cannot_be_continued_are_refused(kind, options, name, message):
    theirs = kind(small_model().parameters(), **options)
    train(theirs, range(2))
    mine = make(name, small_model().parameters(), 32 if name == "Adafactor" else 8)
    with pytest.raises(ValueError, match=message):
        mine.load_state_dict(theirs.state_dict())
