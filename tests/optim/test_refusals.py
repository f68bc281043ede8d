"""Bad values and parameters that cannot be stepped: refused when the optimizer is built, with the remedy."""

import math

import pytest
import torch
from torch import nn

from tests.optim.cases import OPTIMIZERS, every_optimizer, make, small_model
from trimtab import optim


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": math.nan}, "lr must be finite"),
        ({"lr": -0.1}, "lr must be at least 0"),
        ({"lr": 1e39}, "fit in float32"),
        ({"lr": torch.ones(2)}, "shape"),
        ({"lr": torch.ones(1, 1)}, "shape"),
        ({"weight_decay": -1.0}, "weight_decay must be between 0"),
        ({"weight_decay": math.inf}, "weight_decay must be between 0"),
        ({"bits": 4}, "bits must be 8 or 32"),
        ({"block": 0}, "block must be"),
        ({"codebook": "float9"}, "codebook"),
        ({"min_8bit_size": -1}, "min_8bit_size must be"),
        ({"percentile_clipping": 101}, "percentile_clipping must be"),
        ({"loss_scale": 0.0}, "loss_scale must be"),
        ({"loss_scale": math.inf}, "loss_scale must be"),
        ({"percentile_clipping": 5.5}, "whole number"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"independent_decay": True, "lr": 0.0}, "lr_max"),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_out_of_range_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, small_model().parameters(), **options)
    optimizer = make(name, small_model().parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1), (0.9, math.nan)])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.StableAdamW, optim.LAMB, optim.Lion, optim.AdafactorMomentum])
def test_betas_out_of_range_are_refused(kind, betas):
    with pytest.raises(ValueError, match="betas must be at least 0 and below 1"):
        kind(small_model().parameters(), betas=betas)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 8}, "keeps 32-bit state, got bits=8; AdamW takes bits=8"),
        ({"skip_zeros": True}, "does not support skip_zeros=True"),
        ({"rounding": "kahan"}, "does not support rounding='kahan'"),
        ({"eps": 1e-8}, r"eps must be a pair \(eps1 or None, eps2\), got 1e-08"),
        ({"eps": (-1.0, 1e-3)}, "eps must be a pair of numbers between 0 and"),
        ({"eps": (None, -1.0)}, "eps must be between 0 and"),
        ({"beta2_decay": 0.8}, "beta2_decay must be at most 0, got 0.8"),
        ({"d": 0.5}, "d, the largest rms of an update, must be at least 1, got 0.5"),
    ],
)
def test_adafactor_refuses_what_torch_refuses_and_what_has_no_kernel(options, message):
    with pytest.raises(ValueError, match=message):
        optim.Adafactor(small_model().parameters(), **options)
    optimizer = optim.Adafactor(small_model().parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **options})
    assert len(optimizer.param_groups) == 1


def test_centered_rmsprop_refuses_8_bits():
    with pytest.raises(ValueError, match="centered=True needs 32-bit state, got bits=8"):
        optim.RMSprop(small_model().parameters(), centered=True, bits=8)


def test_momentum_switched_on_in_mid_run_is_refused():
    p = nn.Parameter(torch.ones(9))
    optimizer = optim.RMSprop([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="the state has no momentum_buffer"):
        optimizer.step()


def test_adamw_has_no_other_decay_than_its_own():
    optim.AdamW(small_model().parameters(), decoupled_weight_decay=True)
    with pytest.raises(ValueError, match="got decoupled_weight_decay=False; use Adam"):
        optim.AdamW(small_model().parameters(), decoupled_weight_decay=False)
    with pytest.raises(ValueError, match="got decoupled_weight_decay=False; use Adam"):
        optim.AdamW([{"params": list(small_model().parameters()), "decoupled_weight_decay": False}])
    with pytest.raises(TypeError, match=r"unknown options \['decoupled_weight_decay'\]"):
        optim.SGD(small_model().parameters(), decoupled_weight_decay=True)


class FlatParameter(nn.Parameter):
    """Named like that of FSDP1."""


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (nn.Parameter(torch.ones(9, device="meta")), "to_empty"),
        (FlatParameter(torch.ones(9)), "FSDP2"),
        (nn.Parameter(torch.ones(9)[::2]), "leave gaps or overlap"),
        (nn.Parameter(torch.ones(1, 5).expand(4, 5)), "leave gaps or overlap"),
    ],
    ids=["meta", "flattened", "gaps", "overlaps"],
)
def test_parameters_that_cannot_be_stepped_are_refused_with_the_remedy(p, message):
    with pytest.raises(ValueError, match=message):
        optim.AdamW([("weight", p)])


def test_stochastic_rounding_of_float16_is_refused_when_the_optimizer_is_built():
    with pytest.raises(ValueError, match=r"needs bfloat16; use rounding='kahan'"):
        optim.AdamW([nn.Parameter(torch.ones(9, dtype=torch.float16))], rounding="stochastic")


@every_optimizer
def test_a_parameter_replaced_under_its_state_never_reaches_the_kernel(name, bits):
    p = nn.Parameter(torch.ones(70, 61))
    optimizer = make(name, [p], bits)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data = torch.ones(700, 61)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="now has 42700 values"):
        optimizer.step()


def test_state_that_no_longer_fits_its_parameter_never_reaches_the_kernel():
    def stepped() -> tuple[nn.Parameter, optim.Optimizer]:
        p = nn.Parameter(torch.ones(8, 16, 8, 8))
        optimizer = optim.AdamW([p], bits=8)
        p.grad = torch.ones_like(p)
        optimizer.step()
        return p, optimizer

    p, optimizer = stepped()
    p.data = p.data.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="change the memory format before the first step"):
        optimizer.step()
    p, optimizer = stepped()
    p.data = torch.ones(8, 16, 8, 16)[..., ::2]
    with pytest.raises(ValueError, match="leave gaps"):
        optimizer.step()
    p, optimizer = stepped()
    optimizer.state[p]["exp_avg_sq_codes"] = optimizer.state[p]["exp_avg_sq_codes"].half()
    with pytest.raises(ValueError, match="something has cast the state"):
        optimizer.step()
    p, optimizer = stepped()
    optimizer.state[p]["exp_avg_absmax"] = optimizer.state[p]["exp_avg_absmax"][:1].clone()
    with pytest.raises(ValueError, match="1 scales for 8192 values"):
        optimizer.step()
    p, optimizer = stepped()
    optimizer.param_groups[0]["bits"] = 32
    with pytest.raises(ValueError, match="made with bits=8"):
        optimizer.step()
    for name, value in {"weight_decay": math.nan, "rounding": "up", "loss_scale": 0.0}.items():
        p, optimizer = stepped()
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=f"{name} must be"):
            optimizer.step()
    with pytest.raises(ValueError, match="codes mean something else there"):
        optim.Lion([nn.Parameter(p.detach().clone())], bits=8).load_state_dict(stepped()[1].state_dict())


@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("StableAdamW", {}), ("SGD", {"momentum": 0.9})])
def test_a_parameter_without_gradients_comes_to_rest(name, options):
    # Rounded to nearest, the last code of m would never decay and push its parameter for ever.
    p = nn.Parameter(torch.zeros(4096))
    optimizer = getattr(optim, name)([p], lr=1e-3, weight_decay=0, bits=8, **options)
    generator, dead = torch.Generator().manual_seed(0), torch.arange(4096) % 8 == 0
    for step in range(400):
        p.grad = torch.randn(4096, generator=generator)
        if step >= 20:
            p.grad[dead] = 0
        if step == 300:
            before = p.detach().clone()
        optimizer.step()
    still = (p.detach() - before)[dead].abs().mean()
    assert still < 1e-3 * (p.detach() - before)[~dead].abs().mean()
