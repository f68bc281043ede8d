"""On a GPU: a step never waits for the device, and works on tensors of one device only."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.fake_gpu import HostWait, fake_gpu
from tests.optim.cases import CASES, every_optimizer, make
from trimtab import optim
from trimtab.optim import options

SHAPES = ((65, 67), (67,), (0, 3))


def build(
    name: str, bits: int, dtype: torch.dtype = torch.float32, device: str = "cuda", **options: Any
) -> optim.Optimizer:
    params = [nn.Parameter(torch.zeros(*shape, device=device, dtype=dtype)) for shape in SHAPES]
    for p in params:
        p.grad = torch.ones_like(p)
    return make(name, params, bits, **options)


@every_optimizer
def test_a_step_never_waits_for_the_device(name, bits):
    with fake_gpu() as gpu:
        optimizer = build(name, bits)
        optimizer.step()
        with gpu.no_waits():
            optimizer.step()


OPTIONS: list[dict[str, Any]] = [
    {"skip_nonfinite": True, "maximize": True},
    {"loss_scale": 1024.0},
    {"percentile_clipping": 50},
    {"independent_decay": True, "lr_max": 0.1},
    {"skip_zeros": True},
    {"codebook": "dynamic"},
]


@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("name", ["AdamW", "StableAdamW"])
def test_options_do_not_wait_either(name, chosen):
    with fake_gpu() as gpu:
        optimizer = build(name, 32 if "skip_zeros" in chosen else 8, **chosen)
        optimizer.step()
        with gpu.no_waits():
            optimizer.step()


@pytest.mark.parametrize("bits", [8, 32])
def test_steps_relative_to_the_weights_do_not_wait_either(bits):
    with fake_gpu() as gpu:
        optimizer = build("AdamW", bits, rms_scaled=True)
        optimizer.step()
        with gpu.no_waits():
            optimizer.step()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan", "split"])
@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_bfloat16_parameters_do_not_wait_either(name, rounding):
    with fake_gpu() as gpu:
        optimizer = build(name, 8, torch.bfloat16, rounding=rounding)
        optimizer.step()
        with gpu.no_waits():
            optimizer.step()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("name", "bits"), [case for case in CASES if case[1] == 32])
def test_a_learning_rate_may_be_a_tensor_of_either_device(name, bits, device, shape, monkeypatch):
    monkeypatch.setattr(options, "check_lr", lambda lr: None)  # reads the value, which a fake tensor does not have
    with fake_gpu() as gpu:
        optimizer = build(name, bits)
        optimizer.param_groups[0]["lr"] = torch.ones(shape, device=device)
        optimizer.step()
        with gpu.no_waits():
            optimizer.step()


@pytest.mark.parametrize(("name", "bits"), [case for case in CASES if not case[0].startswith("Adafactor")])
def test_a_device_without_float64_and_without_kernels_works(name, bits):
    """Apple's GPUs. The op is the reference there; here it is not run, because fake tensors have no values."""
    with fake_gpu("mps"):
        optimizer = build(name, bits, device="mps", skip_nonfinite=True)
        optimizer.step()
        optimizer.step()


def test_the_fake_gpu_finds_waits():
    with fake_gpu() as gpu:
        x = torch.ones(3, device="cuda")
        waits = [x.nonzero, lambda: x[0].item(), lambda: x.to("cpu"), lambda: torch.ones(3).copy_(x)]
        waits += [lambda: torch.tensor([1.0], device="cuda"), lambda: x.copy_(torch.ones(3)), lambda: x[[1, 2]]]
        for wait in waits:
            with pytest.raises(HostWait), gpu.no_waits():
                wait()
