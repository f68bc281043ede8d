"""Attention by the kernel is softmax attention: value and gradient, in every size, layout and instruction set."""

import pytest
import torch
from torch import Tensor

from tests.conftest import seed
from trimtab.ops import backends
from trimtab.ops.float32.attention import attention, attention_packed, attention_reference

pytestmark = pytest.mark.skipif(backends.native is None, reason="needs the native kernels")

# batch, time, heads, head width: below, at and above a panel of queries and of features.
SIZES = [(1, 1, 1, 1), (2, 7, 3, 5), (1, 32, 2, 32), (2, 33, 1, 33), (1, 64, 2, 16), (1, 131, 1, 72)]


def inputs(batch: int, time: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    qkv = torch.randn(batch, time, 3, heads, width, generator=seed(0))
    return 2 * qkv, torch.randn(batch, time, heads, width, generator=seed(1))


def run(function, qkv: Tensor, g: Tensor, **options) -> tuple[Tensor, Tensor]:
    qkv = qkv.detach().clone().requires_grad_()
    y = function(qkv, **options)
    return y.detach(), torch.autograd.grad(y, qkv, g)[0]


def split(qkv: Tensor, **options) -> Tensor:
    return attention(*qkv.unbind(2), **options)


def reference(qkv: Tensor, **options) -> Tensor:
    return attention_reference(*qkv.unbind(2), **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_value_and_gradient_match_float64(level, sizes, causal):
    qkv, g = inputs(*sizes)
    options = {"causal": causal, "scale": sizes[-1] ** -0.5}
    exact = run(reference, qkv.double(), g.double(), **options)
    for function in (attention_packed, split):
        for got, expected in zip(run(function, qkv, g, **options), exact, strict=True):
            # Gradients of up to 10 are sums of both signs; PyTorch's own kernel errs as much.
            torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=5e-5)


def test_one_tensor_and_three_give_the_same_bits():
    qkv, g = inputs(2, 50, 3, 24)
    both = [run(function, qkv, g, causal=True, scale=0.2) for function in (attention_packed, split)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_the_kernel_is_the_one_that_runs(monkeypatch):
    qkv, _ = inputs(1, 8, 2, 16)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    attention_packed(qkv, causal=True, scale=0.25)


def test_large_logits_do_not_overflow():
    qkv, g = inputs(1, 40, 1, 16)
    qkv[:, :, :2] *= 60
    exact = run(reference, qkv.double(), g.double(), causal=True, scale=0.25)
    got = run(attention_packed, qkv, g, causal=True, scale=0.25)
    assert all(x.isfinite().all() for x in got)
    torch.testing.assert_close(got[0], exact[0].float(), rtol=1e-2, atol=1e-2)  # logits of 10^4, so 1e-3 of each


def test_a_nan_reaches_later_queries_and_no_earlier_ones():
    qkv, _ = inputs(1, 40, 1, 16)
    qkv[0, 20, 1] = torch.nan
    y = attention_packed(qkv, causal=True, scale=0.25)
    assert y[0, 20:].isnan().all()
    assert y[0, :20].isfinite().all()


def test_second_derivatives_are_those_of_the_definition():
    qkv, _ = inputs(1, 6, 1, 4)
    found = []
    for function in (attention_packed, split, reference):
        x = qkv.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(x, causal=True, scale=0.5).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    for other in found[:2]:
        torch.testing.assert_close(other, found[2], rtol=1e-3, atol=1e-3)


def test_other_dtypes_and_compiled_functions_take_pytorchs():
    qkv, _ = inputs(1, 9, 2, 8)
    expected = attention_packed(qkv, causal=True, scale=0.3)
    half = attention_packed(qkv.bfloat16(), causal=True, scale=0.3)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)
    compiled = torch.compile(attention_packed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(qkv, causal=True, scale=0.3), expected)


def test_an_empty_batch_gives_an_empty_result():
    assert attention_packed(torch.empty(0, 5, 3, 2, 8), causal=True, scale=1.0).shape == (0, 5, 2, 8)
