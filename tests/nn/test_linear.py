"""Quantized linear layers against their definition: the plain product of rounded operands, rounding passed through."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.conftest import seed
from tests.processes import mesh, on_two_processes
from trimtab.nn import kinds, tuning
from trimtab.nn.convert import convert_linears, revert_linears
from trimtab.nn.kinds import make_kind
from trimtab.nn.linear import Linear, SwitchBackConv1D, SwitchBackLinear
from trimtab.ops import int8

KINDS = ["switchback", "switchback-m", "switchback-q", "llm-int8", "fp8-tensorwise", "fp8-switchback"]
SWITCHED_BACK = ["switchback", "switchback-q", "fp8-switchback"]


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def layer(n: int = 96, m: int = 48, **options) -> SwitchBackLinear:
    torch.manual_seed(0)
    return SwitchBackLinear(n, m, **options)


def run(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Y, dX, dW, db."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(g)
    return y.detach(), x.grad, module.weight.grad, module.bias.grad if module.bias is not None else None


def plain(module: nn.Module) -> nn.Linear:
    """The same layer in full precision."""
    other = nn.Linear(module.in_features, module.out_features, module.bias is not None)
    other.load_state_dict(module.state_dict())
    return other


def by_definition(module: SwitchBackLinear, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The products of the rounded operands in float64, written without any of the layer's products."""
    kind, w = module.products, module.weight.detach()
    x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    by_column = lambda a: int8.dequantize(*(lambda c, s: (c, s[None]))(*int8.quantize_columnwise(a)))  # noqa: E731
    y = kind.round_input(x).double() @ kind.round_weight(w).double().t()
    w_back = by_column(w) if module.kind in ("switchback-q", "llm-int8") else kind.round_weight(w)
    dx = kind.round_grad(g).double() @ w_back.double()
    left, right = g, x
    if module.kind == "switchback-m":
        right = kind.round_input(x)
    elif module.kind == "llm-int8":
        left, right = by_column(g), by_column(x)
    elif module.kind == "fp8-tensorwise":
        left, right = kind.round_grad(g), kind.round_input(x)
    dw = left.double().t() @ right.double()
    bias = module.bias
    return y if bias is None else y + bias.detach().double(), dx, dw, None if bias is None else g.double().sum(0)


# --- The three products


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (1, 1)])  # any leading dimensions; odd feature counts
@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients_are_those_of_the_straight_through_definition(kind, shape, bias):
    *lead, n = shape
    module = layer(n, 13, bias=bias, kind=kind)
    x, g = torch.randn(*lead, n, generator=seed(1)), torch.randn(*lead, 13, generator=seed(2))
    y, dx, dw, db = run(module, x, g)
    assert y.shape == (*lead, 13)
    assert dx.shape == x.shape
    for got, expected in zip((y, dx, dw, db), by_definition(module, x, g), strict=True):
        if expected is None:
            assert got is None
        else:
            torch.testing.assert_close(got.double().view(expected.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SWITCHED_BACK)
def test_the_weight_gradient_is_exact(kind):
    module = layer(kind=kind)
    x, g = torch.randn(64, 96, generator=seed(1)), torch.randn(64, 48, generator=seed(2))
    _, _, dw, db = run(module, x, g)
    _, _, expected, expected_bias = run(plain(module), x, g)
    torch.testing.assert_close(dw, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(db, expected_bias, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("inner", "by_tensor", "by_row"), [(256, 0.0125, 0.0098), (1024, 0.0148, 0.0110), (4096, 0.0154, 0.0124)]
)
def test_gaussian_errors_are_those_of_the_paper_s_analysis(inner, by_tensor, by_row):
    x, g = torch.randn(256, inner, generator=seed(1)), torch.randn(256, 1024, generator=seed(2))
    for kind, expected in (("switchback", by_tensor), ("switchback-q", by_row)):
        module = SwitchBackLinear(inner, 1024, bias=False, kind=kind)
        nn.init.normal_(module.weight)
        y, dx, _, _ = run(module, x, g)
        exact_y, exact_dx, _, _ = run(plain(module), x, g)
        assert relative(y, exact_y) == pytest.approx(expected, rel=0.15)
        assert relative(dx, exact_dx) < 0.016


def test_spread_of_token_magnitudes_breaks_llm_int8_and_not_switchback():
    """Magnitudes of tokens spread by exp(spread * normal), for X and G apart. Medians of five draws."""

    def errors(kind: str, spread: int) -> list[float]:
        draws, module = [], layer(kind=kind)
        for draw in range(5):
            generator = seed(100 * spread + draw)
            loud = (spread * torch.randn(2, 2048, 1, generator=generator)).exp()
            x, g = torch.randn(2048, 96, generator=generator), torch.randn(2048, 48, generator=generator)
            exact = run(plain(module), loud[0] * x, loud[1] * g)
            got = run(module, loud[0] * x, loud[1] * g)
            draws.append([relative(a, b) for a, b in zip(got[:3], exact[:3], strict=True)])
        return torch.tensor(draws).median(dim=0).values.tolist()

    weight = []
    for spread in (0, 1, 2, 3):
        y, dx, dw = errors("switchback", spread)
        assert max(y, dx) < 0.014, "rows have scales of their own"
        assert dw < 1e-6
        y, dx, dw = errors("llm-int8", spread)
        assert max(y, dx) < 0.014
        weight.append(dw)
    assert weight[0] < 0.013
    assert weight[1] > 2.5 * weight[0]
    assert weight[2] > 5 * weight[0]
    assert weight[3] > 10 * weight[0]


def test_a_threshold_takes_outliers_out_of_int8():
    x, g = torch.randn(256, 96, generator=seed(1)), torch.randn(256, 48, generator=seed(2))
    x[:, 5] *= 50
    without, with_it = (layer(kind="llm-int8", threshold=threshold) for threshold in (0.0, 6.0))
    exact = run(plain(with_it), x, g)
    lossy, taken_out = run(without, x, g), run(with_it, x, g)
    assert relative(taken_out[0], exact[0]) < 0.3 * relative(lossy[0], exact[0])
    torch.testing.assert_close(taken_out[2][:, 5], exact[2][:, 5], rtol=1e-5, atol=1e-3)  # that column is exact
    assert relative(lossy[2][:, 5], exact[2][:, 5]) > 1e-3
    all_out = run(layer(kind="llm-int8", threshold=1e-9), x, g)
    torch.testing.assert_close(all_out[0], exact[0], rtol=1e-4, atol=1e-4)


def test_a_sum_too_long_for_int32_is_cut(monkeypatch):
    module = layer(9, 5, kind="llm-int8")
    x, g = torch.randn(100, 9, generator=seed(1)), torch.randn(100, 5, generator=seed(2))
    whole = run(module, x, g)[2]
    monkeypatch.setattr(kinds, "MAX_INNER", 30)
    torch.testing.assert_close(run(module, x, g)[2], whole)


@pytest.mark.parametrize("kind", KINDS)
def test_conv1d_is_the_same_layer_with_its_weight_transposed(kind):
    module = layer(12, 20, kind=kind)
    turned = SwitchBackConv1D(20, 12, kind=kind)
    turned.load_state_dict({"weight": module.weight.t(), "bias": module.bias})
    x, g = torch.randn(2, 9, 12, generator=seed(1)), torch.randn(2, 9, 20, generator=seed(2))
    ours, theirs = run(module, x, g), run(turned, x, g)
    for a, b in zip(ours, (*theirs[:2], theirs[2].t(), theirs[3]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert theirs[2].is_contiguous()


# --- Awkward inputs


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_values_come_out_as_such(kind, bad):
    module = layer(kind=kind)
    x, g = torch.randn(8, 96, generator=seed(1)), torch.randn(8, 48, generator=seed(2))
    x[3, 7] = bad
    y, _, dw, _ = run(module, x, g)
    assert not y[3].isfinite().any()
    assert not dw.isfinite().all()
    if kind != "fp8-tensorwise":  # which has one scale for all
        assert y[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    g[2, 1] = bad
    assert not run(module, x, g)[1][2].isfinite().any()
    with torch.no_grad():
        module.weight[0, 0] = bad
    assert not module(torch.ones(4, 96)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_no_rows_and_expanded_gradients(kind):
    module = layer(kind=kind, bias=False)
    y, dx, dw, _ = run(module, torch.zeros(4, 96), torch.zeros(4, 48))
    assert y.eq(0).all()
    assert dx.eq(0).all()
    assert dw.eq(0).all()
    y, dx, dw, _ = run(module, torch.zeros(2, 0, 96), torch.zeros(2, 0, 48))
    assert y.shape == (2, 0, 48)
    assert dw.eq(0).all()
    x = torch.randn(96, 2, 3, generator=seed(1)).permute(2, 1, 0).requires_grad_()  # not contiguous
    module(x).sum().backward()  # a gradient of stride 0
    assert x.grad.shape == x.shape


def test_what_cannot_be_multiplied_is_refused_in_words():
    module = layer()
    with pytest.raises(ValueError, match=r"in_features=96, got shape \(4, 95\)"):
        module(torch.zeros(4, 95))
    with pytest.raises(
        ValueError, match=r"input is torch\.bfloat16, the weight torch\.float32; cast one, or use torch\.autocast"
    ):
        module(torch.zeros(4, 96, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        module(torch.zeros(4, 96, dtype=torch.int64))
    with pytest.raises(ValueError, match="unknown kind 'int4'; choose one of switchback, switchback-m"):
        SwitchBackLinear(4, 4, kind="int4")
    with pytest.raises(ValueError, match="threshold belongs to llm-int8"):
        SwitchBackLinear(4, 4, threshold=6.0)
    with pytest.raises(ValueError, match="threshold must be at least 0"):
        SwitchBackLinear(4, 4, kind="llm-int8", threshold=-1.0)
    with pytest.raises(ValueError, match="when must be"):
        SwitchBackLinear(4, 4, when="sometimes")


class Conv1D(nn.Module):
    """As Hugging Face's, which is recognised by its name."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))


LIMIT = 133_144  # the largest n with n * 127^2 < 2^31


@pytest.mark.parametrize("kind", ["switchback", "switchback-m", "switchback-q", "llm-int8"])
def test_more_features_than_int32_can_sum_over_are_refused_when_the_layer_is_built(kind):
    assert LIMIT * 127**2 < 2**31 <= (LIMIT + 1) * 127**2
    for n, m, name in ((LIMIT + 1, 2, "in_features"), (2, LIMIT + 1, "out_features")):
        message = f"{name}=133145 is above 133144, where an int8 product could overflow int32; use nn.Linear"
        with pytest.raises(ValueError, match=message):
            SwitchBackLinear(n, m, kind=kind)
        with pytest.raises(ValueError, match=message):
            SwitchBackConv1D(m, n, kind=kind)
    for module in (SwitchBackLinear(LIMIT, 2, kind=kind), SwitchBackLinear(2, LIMIT, kind=kind)):
        x = torch.ones(1, module.in_features, requires_grad=True)
        module(x).sum().backward()  # both products run at the limit
        assert x.grad.isfinite().all()
    assert SwitchBackLinear(2, LIMIT + 1, kind="fp8-switchback")(torch.ones(1, 2)).shape == (1, LIMIT + 1)


def test_conversion_leaves_layers_with_too_many_features_as_they_are():
    layers = {"wide": nn.Linear(2, LIMIT + 1), "long": nn.Linear(LIMIT + 1, 2), "conv": Conv1D(LIMIT + 1, 2)}
    model = nn.ModuleDict({**layers, "fits": nn.Linear(2, LIMIT)})
    report = convert_linears(model, when="always")  # measuring a layer of this size takes half a minute
    assert report.converted.keys() == {"fits"}
    why = "features=133145 is above 133144, where an int8 product could overflow int32"
    assert report.kept == {"wide": f"out_{why}", "long": f"in_{why}", "conv": f"out_{why}"}
    assert all(model[name] is module for name, module in layers.items())
    # float8 is multiplied in floating point, and an output head is kept for what it is.
    assert convert_linears(model, "fp8-switchback", only="wide").converted.keys() == {"wide"}
    assert "output head" in convert_linears(nn.ModuleDict({"lm_head": nn.Linear(2, LIMIT + 1)})).kept["lm_head"]


# --- Derivatives that are not there


NO_SECOND = r"\(in_features=96, out_features=48\) has no second derivative.*revert_linears\(model\)"
NO_TRANSFORM = r"\(in_features=96, out_features=48\) works with backward\(\) only.*revert_linears\(model\)"


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_refused_and_never_wrong(kind):
    module, x = layer(kind=kind), torch.randn(5, 96, generator=seed(1), requires_grad=True)
    for wanted in (x, module.weight, module.bias):
        with pytest.raises(RuntimeError, match=NO_SECOND):
            torch.autograd.grad(module(x).square().sum(), wanted, create_graph=True)
    with pytest.raises(RuntimeError, match=NO_SECOND):
        module(x).square().sum().backward(create_graph=True)
    # A gradient penalty behind a last layer: its gradient does not depend on the input, but on the weight.
    y = module(x).sum()
    with pytest.raises(RuntimeError, match=NO_SECOND):
        (y + torch.autograd.grad(y, x, create_graph=True)[0].square().sum()).backward()
    # This one gave zeros.
    with pytest.raises(RuntimeError, match=NO_SECOND):
        torch.autograd.functional.hessian(lambda x: module(x).square().sum(), x.detach())
    assert module.weight.grad is None


def test_first_derivatives_several_at_once_are_those_one_by_one():
    for kind in KINDS:
        module, x = layer(kind=kind), torch.randn(5, 96, generator=seed(1), requires_grad=True)
        y, grads = module(x), torch.randn(3, 5, 48, generator=seed(2))
        wanted = x, module.weight, module.bias
        together = torch.autograd.grad(y, wanted, grads, is_grads_batched=True, retain_graph=True)
        alone = [torch.autograd.grad(y, wanted, g, retain_graph=True) for g in grads]
        for got, expected in zip(together, zip(*alone, strict=True), strict=True):
            torch.testing.assert_close(got, torch.stack(expected), rtol=1e-6, atol=1e-6)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, in forward mode
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_is_refused_and_works_after_reverting(kind, name):
    module, x = layer(kind=kind), torch.randn(2, 96, generator=seed(1))
    with pytest.raises(RuntimeError, match=NO_TRANSFORM):
        TRANSFORMS[name](module, x)
    model = nn.Sequential(module)
    revert_linears(model)
    TRANSFORMS[name](model, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, in forward mode
def test_forward_mode_and_transformed_parameters_are_refused():
    module, x = layer(), torch.randn(2, 96, generator=seed(1))
    with pytest.raises(RuntimeError, match=NO_TRANSFORM), torch.autograd.forward_ad.dual_level():
        module(torch.autograd.forward_ad.make_dual(x, x))
    with pytest.raises(RuntimeError, match=NO_TRANSFORM):
        torch.func.grad(lambda p: torch.func.functional_call(module, p, (x,)).sum())(dict(module.named_parameters()))
    # Without a transform, functional_call is a call.
    assert torch.equal(torch.func.functional_call(module, dict(module.named_parameters()), (x,)), module(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, in forward mode
@pytest.mark.parametrize("name", ["grad", "vmap", "jvp"])
def test_torch_func_is_refused_in_a_compiled_function_too(name):
    module, x = layer(), torch.randn(2, 96, generator=seed(1))
    with pytest.raises(RuntimeError, match=NO_TRANSFORM):
        torch.compile(lambda x: TRANSFORMS[name](module, x), backend="aot_eager")(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, in forward mode
def test_small_calls_in_float_have_all_derivatives():
    module, x = layer(when="faster"), torch.randn(2, 96, generator=seed(1))
    assert module.int8_from > len(x)
    for form in (torch.func.hessian, torch.func.jacfwd, torch.func.grad):
        got, expected = (form(lambda x, m=m: m(x).square().sum())(x) for m in (module, plain(module)))
        torch.testing.assert_close(got, expected)


# --- The weight's codes


@pytest.fixture
def quantizations(monkeypatch) -> list[int]:
    """One entry per quantization of a weight."""
    made: list[int] = []
    real = kinds.SwitchBack.quantize_weight

    def counted(self, w):
        made.append(1)
        return real(self, w)

    monkeypatch.setattr(kinds.SwitchBack, "quantize_weight", counted)
    return made


def test_the_weight_is_quantized_once_per_step(quantizations):
    module = layer()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(1, 4):
        for micro_batch in range(3):
            module(torch.randn(8, 96, generator=seed(micro_batch))).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert len(quantizations) == step


WRITES = {
    "an optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=1.0).step(),
    "in place": lambda m: m.weight.detach().mul_(-1),
    "through .data": lambda m: m.weight.data.copy_(-m.weight.data),
    "one value through .data": lambda m: m.weight.data.view(-1)[17].neg_(),
    "rows exchanged through .data": lambda m: m.weight.data.copy_(m.weight.data.flip(0)),
    "numpy": lambda m: m.weight.detach().numpy().__imul__(-1),
    "another tensor": lambda m: setattr(m.weight, "data", -m.weight.data),
    "a state dict": lambda m: m.load_state_dict({"weight": -m.weight, "bias": m.bias}),
    "a new parameter": lambda m: setattr(m, "weight", nn.Parameter(-m.weight.detach())),
    "preserved version": lambda m: _write_unseen(m.weight),
}


def _write_unseen(w: Tensor) -> None:
    # How FSDP2 fills a parameter with what it has gathered.
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
        w.neg_()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_codes_never_go_stale(write, frozen):
    module = layer()
    x = torch.randn(8, 96, generator=seed(1))
    module(x).square().sum().backward()
    if frozen:
        if write == "one value through .data":
            pytest.skip("the one write that a frozen layer may miss, as documented in its docstring")
        module.eval().freeze()
        module.weight.requires_grad_(False)
    before = module(x)
    WRITES[write](module)
    after = module(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, copy.deepcopy(module)(x))


def test_frozen_codes_are_used_in_evaluation_and_not_in_training(quantizations):
    module = layer()
    x = torch.randn(8, 96, generator=seed(1))
    module.eval()
    with torch.no_grad():
        expected = module(x)
        module.freeze()
        quantizations.clear()
        assert torch.equal(module(x), expected)
        assert not quantizations
    module.train()
    with torch.no_grad():
        module.weight.mul_(2)
    torch.testing.assert_close(module(x) - module.bias, 2 * (expected - module.bias))
    module.thaw()
    assert module._frozen is None


def test_weights_changed_between_forward_and_backward_do_not_change_the_gradient():
    # The gradient belongs to the forward that was run.
    module = layer(bias=False)
    x = torch.randn(8, 96, generator=seed(1)).requires_grad_()
    y = module(x)
    expected = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    with torch.no_grad():
        module.weight.zero_()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


# --- Memory


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    total: dict[int, int] = {}
    keep = []

    def pack(t: Tensor) -> Tensor:
        keep.append(t)
        total[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    weight_codes = module.weight.numel() if isinstance(module, SwitchBackLinear) else 0
    return sum(size for pointer, size in total.items() if pointer not in own) - weight_codes


def test_switchback_m_keeps_a_quarter_of_the_activations():
    x = torch.randn(4096, 256, generator=seed(1)).requires_grad_()
    full = saved_bytes(nn.Linear(256, 64), x)
    assert full == x.nbytes
    assert saved_bytes(layer(256, 64, kind="switchback-m"), x) <= 0.30 * full
    assert saved_bytes(layer(256, 64), x) == pytest.approx(full, rel=0.01)


def test_what_no_gradient_needs_is_not_kept():
    x = torch.randn(64, 96, generator=seed(1))
    module = layer()
    module.weight.requires_grad_(False)
    assert saved_bytes(module, x.requires_grad_()) <= 4  # codes of the weight and its scale, and nothing of x
    module(x).sum().backward()
    assert module.weight.grad is None
    assert x.grad is not None
    module.weight.requires_grad_()
    x.requires_grad_(False)
    module(x).sum().backward()
    assert module.weight.grad is not None


# --- Hosts


# PyTorch's own tracing of an autograd.Function makes an instance of it, and warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_whole_and_gives_the_same(kind):
    module = layer(kind=kind, threshold=3.0 if kind == "llm-int8" else 0.0)
    x, g = torch.randn(3, 5, 96, generator=seed(1)), torch.randn(3, 5, 48, generator=seed(2))
    expected = run(module, x, g)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = compiled(x)
    y.backward(g)
    for got, want in zip((y, x.grad, module.weight.grad, module.bias.grad), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8-tensorwise", "fp8-switchback"])
def test_products_of_float8_codes_agree_with_the_simulation(kind, dtype, monkeypatch):
    x, g = torch.randn(17, 96, generator=seed(1)).to(dtype), torch.randn(17, 48, generator=seed(2)).to(dtype)
    module = layer(kind=kind).to(dtype)
    expected = run(module, x, g)
    module.forget()
    monkeypatch.setattr(kinds, "has_product", lambda device: True)  # `torch._scaled_mm` runs on CPUs too
    assert [codes.dtype for codes in module.products.quantize_weight(module.weight)][:2] == [torch.float8_e4m3fn] * 2
    # In bfloat16 the simulation rounds its operands once more.
    limit = 1e-6 if dtype == torch.float32 else 5e-3
    assert all(relative(got, want) < limit for got, want in zip(run(module, x, g), expected, strict=True))
    assert [x.shape for x in run(module, x[:0], g[:0])[:2]] == [(0, 48), (0, 96)]
    odd = layer(7, 5, kind=kind)  # sizes that `torch._scaled_mm` refuses
    assert odd.products.quantize_weight(odd.weight)[0].dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_its_dtype_and_keeps_master_weights(kind):
    module = layer(kind=kind)
    x = torch.randn(16, 96, generator=seed(1)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert module.weight.grad.dtype == x.grad.dtype == torch.float32
    exact = plain(module)(x.detach())
    assert relative(y, exact) < (0.06 if kind.startswith("fp8") else 0.015)


def test_a_layer_in_bfloat16_works():
    module = layer().to(torch.bfloat16)
    x = torch.randn(16, 96, generator=seed(1)).to(torch.bfloat16).requires_grad_()
    y = module(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == module.weight.grad.dtype == torch.bfloat16
    assert relative(y, layer()(x.float())) < 0.01


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_nothing(kind, reentrant):
    module = nn.Sequential(layer(kind=kind), nn.GELU(), layer(48, 10, kind=kind))
    x = torch.randn(16, 96, generator=seed(1)).requires_grad_()
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in (x, *module.parameters())]
    x.grad = None
    module.zero_grad()
    checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
    for p, grad in zip((x, *module.parameters()), expected, strict=True):
        assert torch.equal(p.grad, grad)


def test_state_dicts_are_those_of_nn_linear_and_copies_start_clean():
    module = layer()
    module(torch.zeros(2, 96))
    module.freeze()
    assert module.state_dict().keys() == nn.Linear(96, 48).state_dict().keys()
    plain(module).load_state_dict(module.state_dict(), strict=True)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._made is None
        assert other._frozen is None
        assert torch.equal(other(torch.ones(2, 96)), module(torch.ones(2, 96)))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    assert len(buffer.getvalue()) < 4 * 96 * 48 + 4 * 48 + 4096


def test_small_calls_stay_in_float_where_that_is_faster_and_the_layer_says_so(monkeypatch):
    monkeypatch.setattr("trimtab.nn.linear.int8_from", lambda *_: 256)
    module = SwitchBackLinear(512, 256, when="faster")
    assert f"in float below {module.int8_from} tokens" in repr(module)
    x = torch.randn(256, 512, generator=seed(1))
    exact = Linear(512, 256)
    exact.load_state_dict(module.state_dict())
    assert torch.equal(module(x[1:]), exact(x[1:]))
    assert not torch.equal(module(x), exact(x))
    monkeypatch.setattr("trimtab.nn.linear.int8_from", lambda *_: tuning.NEVER)
    assert module.int8_from == 256  # a layer asks once
    assert "too small for int8 to be faster" in repr(SwitchBackLinear(64, 64, when="faster"))


def test_a_number_of_tokens_repeats_a_choice():
    assert SwitchBackLinear(64, 64, when=100).int8_from == 100
    with pytest.raises(ValueError, match="'always', 'faster' or a number of tokens, got -1"):
        SwitchBackLinear(64, 64, when=-1)


# --- Several processes


@on_two_processes
def compare_with_one_process(kind: str, sharded: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            SwitchBackLinear(32, 64, kind=kind), nn.GELU(), SwitchBackLinear(64, 24, bias=False, kind=kind)
        )

    alone, shared = build(), build()
    if sharded:
        for module in shared:
            fully_shard(module, mesh=mesh())
        model = fully_shard(shared, mesh=mesh())
    else:
        model = DistributedDataParallel(shared)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (alone, model)]
    rank = mesh().get_local_rank()
    for step in range(3):
        x = torch.randn(16, 32, generator=seed(step))
        # Rows have their own scales, so half a batch gives the same rows; only means over it are taken apart.
        alone(x).square().mean().backward()
        model(x[8 * rank : 8 * rank + 8]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(alone.parameters(), model.parameters(), strict=True):
        whole = q.full_tensor() if sharded else q
        torch.testing.assert_close(whole, p, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("kind", ["switchback", "switchback-m", "switchback-q", "fp8-switchback"])
def test_several_processes_do_what_one_does(kind, sharded):
    with warnings.catch_warnings():
        compare_with_one_process(kind, sharded)


def test_kinds_know_their_names():
    for kind in KINDS:
        assert isinstance(make_kind(kind), kinds.SwitchBack)


@pytest.mark.parametrize("kind", ["switchback", "switchback-q", "fp8-switchback"])
def test_codes_made_in_inference_mode_serve_training(kind):
    """Lightning evaluates in inference mode before it trains."""
    layer, x = SwitchBackLinear(64, 32, kind=kind), torch.randn(8, 64, requires_grad=True)
    with torch.inference_mode():
        layer(x.detach())
    layer(x).sum().backward()
    layer.requires_grad_(False).eval()
    with torch.inference_mode():
        layer.freeze()
    layer(x).sum().backward()
