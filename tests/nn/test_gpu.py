"""Quantized layers on a GPU: they never wait for the device, and store the weight as tensor cores read it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.fake_gpu import fake_gpu
from trimtab.nn import kinds
from trimtab.nn.kinds import make_kind
from trimtab.nn.linear import SwitchBackConv1D, SwitchBackLinear
from trimtab.ops import backends, int8, int8_triton

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


def test_codes_are_kept_per_stream_and_not_in_a_graph(monkeypatch):
    streams = [SimpleNamespace(name=name) for name in "ab"]
    with fake_gpu() as gpu, gpu.no_waits():
        layer = on_gpu(SwitchBackLinear(96, 48))

        def codes(stream=0, capturing=False):
            monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[stream])
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
            return layer._weight_codes()[0]

        first = codes()
        assert codes() is first
        assert codes(capturing=True) is not first
        assert codes() is first
        assert codes(stream=1) is not first
        with torch.no_grad():
            layer.eval()
            assert layer._weight_codes()[0] is not codes(stream=1)
        layer.train().forget()
        assert codes(stream=1) is not first


@pytest.fixture
def interpreted(monkeypatch):
    """The layers use the GPU kernels on the CPU; the launches that write codes are counted."""
    monkeypatch.setattr(backends, "interpreted", True)
    monkeypatch.setattr(backends, "triton_missing", None)
    written = []

    def watch(w, codes, codes_t, absmax, marks):
        before = codes.clone()
        codes.fill_(99)
        int8_triton.requantize_both_layouts(w, codes, codes_t, absmax, marks)
        written.append(not (codes == 99).all())
        if not written[-1]:
            codes.copy_(before)

    monkeypatch.setattr(kinds, "requantize_both_layouts", watch)
    return written


@pytest.mark.parametrize("kind", ["switchback", "switchback-m"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_is_quantized_once_per_step_with_accumulation(kind, transposed, interpreted):
    make = (
        (lambda: SwitchBackConv1D(48, 96, kind=kind)) if transposed else (lambda: SwitchBackLinear(96, 48, kind=kind))
    )
    layer = make()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        interpreted.clear()
        for _ in range(3):
            x = torch.randn(5, 96, requires_grad=True)
            y = layer(x)
            fresh = make()
            fresh.load_state_dict(layer.state_dict())
            torch.testing.assert_close(y, fresh(x), rtol=0, atol=0)
            y.sum().backward()
        assert interpreted[::2] == [True, False, False], step  # every other one is of the fresh layer
        optimizer.step()
        optimizer.zero_grad()


def test_two_forwards_before_one_backward_share_the_codes(interpreted):
    layer, x = SwitchBackLinear(96, 48), torch.randn(5, 96, requires_grad=True)
    (layer(x) + layer(2 * x)).sum().backward()
    assert interpreted == [True, False]
    expected = 3 * int8.dequantize(*int8.quantize_tensorwise(layer.weight.detach())).sum(0)
    assert torch.allclose(x.grad, expected.expand_as(x), rtol=0.02, atol=0.05)


def test_a_weight_that_changes_before_backward_is_refused_like_that_of_nn_linear(interpreted):
    for layer in (SwitchBackLinear(96, 48), nn.Linear(96, 48)):
        x = torch.randn(5, 96, requires_grad=True)
        y = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            y.sum().backward()


def test_an_evaluation_between_forward_and_backward_does_not_touch_the_codes(interpreted):
    """With averaged weights that are swapped in through `.data`, as many libraries do."""
    layer, x = SwitchBackLinear(96, 48), torch.randn(5, 96, requires_grad=True)
    y, own = layer(x), layer.weight.data
    layer.weight.data = own * 2
    layer.eval()
    with torch.no_grad():
        layer(x)
    layer.weight.data = own
    y.sum().backward()
    expected = int8.dequantize(*int8.quantize_tensorwise(own)).sum(0)
    assert torch.allclose(x.grad, expected.expand_as(x), rtol=0.02, atol=0.02)
