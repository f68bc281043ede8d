"""float32 products by the fast libraries are the products: at every size, and with every derivative."""

import pytest
import torch
from torch.nn import functional as F

from tests.conftest import seed
from trimtab.ops import backends
from trimtab.ops.float32 import product
from trimtab.ops.float32.product import linear, product_nn, product_nt, product_tn

native = pytest.mark.skipif(backends.native is None, reason="needs the native kernels")

# inner, rows, columns: below, at and above a tile, a block of the result and a block of the sum; primes.
SIZES = [(1, 1, 1), (7, 5, 3), (256, 12, 32), (257, 13, 33), (300, 193, 385), (521, 101, 769), (64, 400, 2)]


def run_kernel(a: torch.Tensor, b: torch.Tensor, threads: int) -> torch.Tensor:
    assert backends.native is not None
    out = torch.full((a.shape[1], b.shape[1]), torch.nan)
    sizes = (*a.shape, b.shape[1])
    backends.native.product(a.data_ptr(), b.data_ptr(), out.data_ptr(), *sizes, threads)
    return out


@native
@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernel_is_the_product_at_every_level(level, sizes):
    inner, rows, columns = sizes
    a, b = torch.randn(inner, rows, generator=seed(0)), torch.randn(inner, columns, generator=seed(1))
    exact = a.double().t() @ b.double()
    # float32 sums of up to 521 products of unit normals
    torch.testing.assert_close(run_kernel(a, b, 2), exact.float(), rtol=1e-5, atol=1e-4)


@native
def test_the_number_of_threads_does_not_change_a_bit():
    a, b = torch.randn(700, 391, generator=seed(0)), torch.randn(700, 130, generator=seed(1))
    one, *others = (run_kernel(a, b, threads) for threads in (1, 2, 3, 7))
    assert all(torch.equal(one, other) for other in others)


@pytest.fixture(params=["onednn", "torch"])
def library(request, monkeypatch):
    """Both branches, on every machine that has them."""
    if request.param == "onednn" and (backends.native is None or not torch.backends.mkldnn.is_available()):
        pytest.skip("needs oneDNN and the native kernels")
    monkeypatch.setattr(backends, "float_product", lambda: (request.param, "a test"))
    monkeypatch.setattr(product, "SMALL", 0)
    return request.param


def test_the_three_products(library):
    x, w, g = (torch.randn(shape, generator=seed(0)) for shape in ((65, 33), (47, 33), (65, 47)))
    for got, expected in (
        (product_nt(x, w), x.double() @ w.double().t()),
        (product_nn(g, w), g.double() @ w.double()),
        (product_tn(g, x), g.double().t() @ x.double()),
        (product_nt(x, w.t().contiguous().t()), x.double() @ w.double().t()),
        (product_tn(g.t().contiguous().t(), x), g.double().t() @ x.double()),
    ):
        torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_has_the_gradients_of_pytorchs(library, bias):
    x = torch.randn(3, 7, 20, generator=seed(0), requires_grad=True)
    w = torch.randn(11, 20, generator=seed(1), requires_grad=True)
    b = torch.randn(11, generator=seed(2), requires_grad=True) if bias else None
    g = torch.randn(3, 7, 11, generator=seed(3))
    leaves = [t for t in (x, w, b) if t is not None]
    ours, theirs = linear(x, w, b), F.linear(x, w, b)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, leaves, g), strict=True):
        torch.testing.assert_close(one, other)


def test_a_linear_layer_can_be_differentiated_twice(library):
    x = torch.randn(5, 6, generator=seed(0), requires_grad=True)
    w = torch.randn(4, 6, generator=seed(1), requires_grad=True)
    found = []
    for function in (linear, F.linear):
        (first,) = torch.autograd.grad(function(x, w).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, w)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)  # sums of fifth powers, up to 10^4


def test_other_dtypes_frozen_weights_and_torch_func_work(library):
    x, w = torch.randn(5, 6, generator=seed(0)), torch.randn(4, 6, generator=seed(1))
    assert linear(x.double(), w.double()).dtype == torch.float64
    assert linear(x.bfloat16(), w.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, w).dtype == torch.bfloat16
    leaf = x.clone().requires_grad_()
    linear(leaf, w).sum().backward()
    torch.testing.assert_close(leaf.grad, w.sum(0).expand(5, 6))
    got = torch.func.vmap(torch.func.grad(lambda row: linear(row, w).square().sum()))(x)
    torch.testing.assert_close(got, 2 * (x @ w.t()) @ w)


def test_it_compiles_into_one_graph(library):
    x, w = torch.randn(5, 6, generator=seed(0)), torch.randn(4, 6, generator=seed(1))
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), x @ w.t())
