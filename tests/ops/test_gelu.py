"""GELU by the kernel is GELU: value, slope and the slope's slope, in every size, dtype and layout, and compiled."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.conftest import LEVELS, seed, spread
from trimtab.ops import backends
from trimtab.ops.gelu import backward_reference, gelu, gelu_reference

native = pytest.mark.skipif(backends.native is None, reason="needs the native kernels")

# Below, at and above a vector and a task; a prime.
COUNTS = [0, 1, 7, 8, 17, 1031, 8192, 8193, 100_003]


def torch_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def everywhere() -> Tensor:
    """Floats of both signs from the smallest denormal to the largest number, densest where GELU bends."""
    bits = torch.arange(0, 0x7F800000, 9973, dtype=torch.int32)
    small, near = bits.view(torch.float32), torch.linspace(0, 14, 300_001)
    return torch.cat([small, -small, near, -near])


def slope(x: Tensor, function=gelu) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(function(x), x, torch.ones_like(x))
    return grad


# --- The definition


def test_the_definition_is_pytorchs_where_pytorchs_has_digits():
    x = torch.linspace(-3, 20, 10_001, dtype=torch.float64)
    torch.testing.assert_close(gelu_reference(x), torch_gelu(x), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(backward_reference(torch.ones_like(x), x), slope(x, torch_gelu), rtol=1e-13, atol=1e-14)


def test_its_derivatives_are_those_of_the_function():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gelu, x)
    assert torch.autograd.gradgradcheck(gelu, x)


# --- Second derivatives and torch.func

POINTS = torch.cat([torch.linspace(-8, 8, 65), torch.tensor([0.0, -0.75, 25.0, -25.0, 40.0, -40.0])])


def curvature(x: Tensor, function=gelu) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.sum(), x)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_second_derivative_is_computed_in_float32_and_rounded_once(dtype):
    x = POINTS.to(dtype)
    expected = curvature(x.double(), gelu_reference)
    got = curvature(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, in forward mode
@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_torch_func_gives_the_derivatives(transform):
    if transform is torch.func.hessian:
        got, expected = torch.func.hessian(lambda x: gelu(x).sum())(POINTS), curvature(POINTS.double(), torch_gelu)
        atol = 2e-5  # s (1 - s) cancels in the derivative of the definition, times x z'^2
    else:
        got, expected, atol = transform(gelu)(POINTS), slope(POINTS.double(), torch_gelu), 1e-6
    torch.testing.assert_close(got, expected.float().diag(), rtol=1e-5, atol=atol)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, in forward mode
def test_vmap_jvp_and_their_compositions_give_the_derivatives():
    x, v = torch.randn(4, 9, generator=seed(0)), torch.randn(4, 9, generator=seed(1))
    torch.testing.assert_close(torch.func.vmap(gelu)(x), gelu(x), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda x: gelu(x).sum()))(x), slope(x))
    value, tangent = torch.func.jvp(gelu, (x,), (v,))
    torch.testing.assert_close((value, tangent), (gelu(x), v * slope(x)))
    with torch.autograd.forward_ad.dual_level():
        y = gelu(torch.autograd.forward_ad.make_dual(x, v))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, v * slope(x))


@pytest.mark.parametrize("vectorize", [False, True])
def test_autograds_own_hessian_is_right_one_by_one_and_batched(vectorize):
    got = torch.autograd.functional.hessian(lambda x: gelu(x).sum(), POINTS, vectorize=vectorize)
    torch.testing.assert_close(got, curvature(POINTS.double(), torch_gelu).float().diag(), rtol=1e-5, atol=1e-6)


# --- The kernel


@native
def test_values_are_within_a_millionth_of_the_exact_ones_everywhere(level):
    x = everywhere()
    expected = gelu_reference(x.double())
    # Below that the logistic function leaves the normal numbers and counts as 0.
    assert ((gelu(x).double() - expected).abs() <= 1e-6 * expected.abs() + 2e-37).all()


@native
def test_slopes_are_within_a_millionth_of_their_terms_everywhere(level):
    x = everywhere()
    expected = backward_reference(torch.ones(len(x), dtype=torch.float64), x.double())
    got = slope(x).double()
    # The two terms s and x z' s (1 - s) cancel near x = -0.75.
    s = expected.new_tensor(1.0) * torch.sigmoid(1.5957691216 * (x.double() + 0.044715 * x.double() ** 3))
    terms = 2 * s + expected.abs()
    assert ((got - expected).abs() <= 1e-6 * terms + 5e-36).all()


@native
@pytest.mark.parametrize("count", COUNTS)
def test_every_length_and_thread_count_gives_the_same(count, level):
    x, grad = spread(count, seed(count), 3), torch.randn(count, generator=seed(1))
    before, threads = x.clone(), torch.get_num_threads()
    try:
        results = []
        for many in (1, 3):
            torch.set_num_threads(many)
            results.append((gelu(x), grad * slope(x)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][0], gelu_reference(x), rtol=2e-6, atol=0)
    torch.testing.assert_close(results[0][1], backward_reference(grad, x), rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


@native
@pytest.mark.skipif(len(LEVELS) < 2, reason="one instruction set")
def test_instruction_sets_agree_to_a_few_last_places():
    x = torch.randn(5000, generator=seed(0))
    assert backends.native is not None
    results = []
    for name in LEVELS:
        backends.native.set_level(name)
        results.append(gelu(x))
    backends.native.set_level(LEVELS[0])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=0)


def test_far_out_it_has_its_limits_and_nan_stays_nan():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e38, -1e38, 0.0, -0.0])
    torch.testing.assert_close(
        gelu(x), torch.tensor([math.inf, 0, math.nan, 1e38, 0, 0, 0]), rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(slope(x), torch.tensor([1, 0, math.nan, 1, 0, 0.5, 0.5]), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(gelu(x.double()).float().nan_to_num(7), gelu(x).nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    x = (3 * torch.randn(5001, generator=seed(0))).to(dtype)
    expected = gelu_reference(x.double())
    got = gelu(x)
    assert got.dtype == dtype
    # half a last place, which eps overstates at most twofold; float16 has denormals from 6e-5 down
    assert ((got.double() - expected).abs() <= 0.51 * torch.finfo(dtype).eps * expected.abs() + 4e-8).all()
    assert slope(x).dtype == dtype
    torch.testing.assert_close(slope(x).float(), slope(x.float()), rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_layout_gives_the_same_values(dtype):
    x = torch.randn(6, 10, 8, generator=seed(0)).to(dtype)
    for view in (x.transpose(0, 2), x[::2, 1:, ::3], x[:, :1].expand(6, 10, 8), x[0, 0, 0]):
        plain = view.clone(memory_format=torch.contiguous_format)
        assert gelu(view).is_contiguous()
        assert torch.equal(gelu(view), gelu(plain))
        assert torch.equal(slope(view), slope(plain))


def test_a_gradient_of_any_layout_will_do():
    x = torch.randn(6, 10, generator=seed(0), requires_grad=True)
    for grad in (torch.randn(10, 6, generator=seed(1)).t(), torch.tensor(2.0).expand(6, 10)):
        (got,) = torch.autograd.grad(gelu(x), x, grad)
        assert torch.equal(got, grad * slope(x))


def test_whole_numbers_are_refused():
    with pytest.raises(ValueError, match=r"floating-point values, got torch.int64; use x.float\(\)"):
        gelu(torch.arange(3))


# --- Under PyTorch's wrappers


def test_only_x_is_kept_for_the_backward_pass():
    kept: list[Tensor] = []
    x = torch.randn(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gelu(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_the_ops_keep_pytorchs_rules():
    checks = ("test_schema", "test_faketensor")
    x = torch.randn(5, 7)
    for args in ((x,), (x.t(),), (x.double(),)):
        torch.library.opcheck(torch.ops.trimtab.gelu.default, args, test_utils=checks)
        torch.library.opcheck(
            torch.ops.trimtab.gelu_backward.default, (torch.ones_like(*args), *args), test_utils=checks
        )


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own imports
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_computes_the_same(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), _Gelu(), nn.Linear(32, 8))
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 8, requires_grad=True)
        plain, fused = (torch.autograd.grad(m(x).square().sum(), [x, *model.parameters()]) for m in (model, compiled))
        for a, b in zip(plain, fused, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_compiler_sees_the_definition_and_can_fuse_it():
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_method")
        return graph

    torch.compile(gelu, fullgraph=True, backend=look)(torch.randn(3))
    assert "sigmoid" in seen


def test_checkpointing_and_autocast_change_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), _Gelu(), nn.Linear(32, 8))
    x = torch.randn(4, 8, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    (again,) = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).sum(), x)
    assert torch.equal(plain, again)
    with torch.autocast("cpu", torch.bfloat16):
        inner = model[0](x)
        assert gelu(inner).dtype == inner.dtype == torch.bfloat16
    torch.autograd.grad(gelu(inner).float().sum(), x)


class _Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)
