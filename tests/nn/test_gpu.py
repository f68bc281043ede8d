"""Quantized layers on a GPU: they never wait for the device, and store the weight as tensor cores read it."""

import pytest
import torch
from torch import nn

from tests.fake_gpu import fake_gpu
from trimtab.nn import kinds
from trimtab.nn.kinds import make_kind
from trimtab.nn.linear import SwitchBackConv1D, SwitchBackLinear

KINDS = ["switchback", "switchback-m", "switchback-q", "llm-int8", "fp8-tensorwise", "fp8-switchback"]


def on_gpu(layer):
    """With parameters on the fake GPU; `layer.to` would copy."""
    for name, p in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.zeros(*p.shape, device="cuda")))
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_the_three_products_never_wait_for_the_device(kind, monkeypatch):
    monkeypatch.setattr(kinds, "has_product", lambda device: True)
    with fake_gpu() as gpu:
        layer, products = on_gpu(SwitchBackLinear(96, 48, kind=kind)), make_kind(kind)
        x, g = torch.ones(35, 96, device="cuda"), torch.ones(35, 48, device="cuda")
        with gpu.no_waits(), torch.no_grad():
            assert layer(x.view(5, 7, 96)).shape == (5, 7, 48)
            # Autograd needs the CUDA runtime, so its part is called directly.
            codes = products.quantize_weight(layer.weight)
            _, kept = products.forward(x, layer.weight, codes, layer.bias)
            dx, dw = products.grad_input(g, codes), products.grad_weight(g, kept)
        assert (dx.shape, dw.shape) == ((35, 96), (48, 96))
        assert dx.device.type == dw.device.type == "cuda"


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_inner_dimension_of_both_products_is_contiguous(kind, transposed):
    with fake_gpu(), torch.no_grad():
        layer = on_gpu(SwitchBackConv1D(48, 96, kind=kind) if transposed else SwitchBackLinear(96, 48, kind=kind))
        forward, _, backward, *_ = layer.products.quantize_weight(layer.matrix())
        assert forward.shape == backward.shape == (48, 96)
        assert forward.is_contiguous()
        assert backward.t().is_contiguous()
