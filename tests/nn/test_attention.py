"""Attention: bounded logits with qk-norm, causal, and equal to the fused kernel."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import seed
from trimtab.nn.attention import Attention, Kappa, rotate, rotation_for
from trimtab.nn.tap import listen
from trimtab.nn.transformer import Transformer, TransformerConfig

KINDS = ["off", "shared", "per-head", "whole"]


def config(**switches: Any) -> TransformerConfig:
    return TransformerConfig(**{"depth": 1, "width": 24, "heads": 3, "rope": True, **switches})


def attention(**switches: Any) -> Attention:
    torch.manual_seed(0)
    return Attention(config(**switches))


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=seed(1))


def tapped(module: torch.nn.Module, *args: Any) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    with listen(module, lambda name, x: values.update({name: x.clone()})):
        module(*args)
    return values


def by_hand(module: Attention, x: Tensor, rotation: Any) -> Tensor:
    """Softmax of the logits that listeners get: what the fused kernel must compute."""
    z = tapped(module, x, rotation)["logits"]
    v = module.qkv(x).chunk(3, dim=-1)[2].unflatten(-1, (module.heads, -1)).transpose(1, 2)
    return module.out((z.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", ["sqrt", "linear"])
@pytest.mark.parametrize("qk_norm", KINDS)
def test_the_fused_kernel_computes_softmax_of_the_logits_that_are_heard(qk_norm, scale, causal):
    module = attention(qk_norm=qk_norm, attention_scale=scale, causal=causal, bias=True)
    x, rotation = inputs(2, 7, 24), rotation_for(torch.arange(7), 8)
    # float32 sums of 7 terms in another order
    torch.testing.assert_close(module(x, rotation), by_hand(module, x, rotation), rtol=1e-5, atol=1e-6)


def test_listening_changes_no_bit_of_output_or_gradient():
    module, x = attention(), inputs(2, 7, 24).requires_grad_()
    quiet = module(x)
    with listen(module, lambda name, value: None):
        listened = module(x)
    assert torch.equal(quiet, listened)
    grads = [torch.autograd.grad(y.square().sum(), module.qkv.weight)[0] for y in (quiet, listened)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("width", [24, 96])
def test_qk_norm_bounds_logits_by_the_root_of_the_head_width_however_large_the_input(width):
    x = 1e3 * inputs(4, 16, width)
    bound = math.sqrt(width // 3)
    normed = tapped(attention(width=width, qk_norm="shared", causal=False), x)["logits"]
    assert normed.abs().max() <= bound * (1 + 1e-6)
    assert normed.abs().max() > bound / 3  # and the bound is near
    assert tapped(attention(width=width, causal=False), x)["logits"].abs().max() > 1e3 * bound


def test_qk_norms_have_the_gains_their_names_say():
    sizes = {
        kind: {n: p.numel() for n, p in attention(qk_norm=kind).named_parameters() if "norm" in n} for kind in KINDS
    }
    assert sizes == {
        "off": {},
        "shared": {"q_norm.weight": 8, "k_norm.weight": 8},
        "per-head": {"q_norm.weight": 24, "k_norm.weight": 24},
        "whole": {"q_norm.weight": 24, "k_norm.weight": 24},
    }


def test_each_qk_norm_normalises_over_what_its_name_says():
    x = inputs(2, 5, 24) * torch.linspace(0.1, 9, 24)
    for kind in ("shared", "per-head"):
        q = tapped(attention(qk_norm=kind), x)["q"]
        torch.testing.assert_close(q.square().mean(-1), torch.ones(2, 3, 5), rtol=1e-3, atol=0)  # eps
    q = tapped(attention(qk_norm="whole"), x)["q"]
    torch.testing.assert_close(q.square().mean((1, 3)), torch.ones(2, 5), rtol=1e-3, atol=0)
    assert (q.square().mean(-1) - 1).abs().max() > 0.05  # one head may be larger than another


def test_shared_gains_act_on_every_head_and_per_head_gains_on_their_own():
    x = inputs(2, 5, 24)
    for kind, changed in (("shared", [True, True, True]), ("per-head", [True, False, False])):
        module = attention(qk_norm=kind)
        before = tapped(module, x)["k"]
        with torch.no_grad():
            module.k_norm.weight[0] = 2.0
        after = tapped(module, x)["k"]
        assert [not torch.equal(a, b) for a, b in zip(before.unbind(1), after.unbind(1), strict=True)] == changed


def test_kappa_gives_queries_and_keys_their_size():
    # golden value
    torch.testing.assert_close(Kappa(100.0)(torch.tensor([3.0, 4.0])), torch.tensor([8.485281, 11.313709]))
    values = tapped(attention(kappa=50.0), inputs(2, 6, 24), rotation_for(torch.arange(6), 8))
    for name in ("q", "k"):
        torch.testing.assert_close(values[name].square().mean(-1), torch.full((2, 3, 6), 50.0))
    diagonal = values["logits"].masked_fill(values["logits"].isinf(), 0)
    assert diagonal.abs().max() <= 50 * math.sqrt(8) * (1 + 1e-6)  # kappa * sqrt(head width) * cosine


def test_the_scale_is_one_over_the_head_width_or_over_its_root():
    x = inputs(1, 6, 24)
    root, linear = (tapped(attention(attention_scale=s, causal=False), x)["logits"] for s in ("sqrt", "linear"))
    torch.testing.assert_close(root, linear * math.sqrt(8))


def test_zero_queries_start_with_uniform_attention_and_other_weights_as_without():
    zero, plain = attention(zero_queries=True, causal=False), attention(causal=False)
    assert (tapped(zero, inputs(1, 6, 24))["logits"] == 0).all()
    assert (tapped(plain, inputs(1, 6, 24))["logits"] != 0).all()
    assert torch.equal(zero.qkv.weight[24:], plain.qkv.weight[24:])
    assert torch.equal(zero.out.weight, plain.out.weight)


@pytest.mark.parametrize("causal", [True, False])
def test_squared_relu_attention_is_its_equation(causal):
    module, x = attention(attention="squared-relu", causal=causal).double(), inputs(1, 5, 24).double()
    z = tapped(module, x)["logits"][0]
    v = module.qkv(x)[0, :, 48:].unflatten(-1, (3, 8))
    y = torch.zeros(5, 3, 8, dtype=torch.float64)
    for head in range(3):
        for i in range(5):
            for j in range(i + 1 if causal else 5):
                y[i, head] += max(z[head, i, j].item(), 0) ** 2 / math.sqrt(5) * v[j, head]
    torch.testing.assert_close(module(x)[0], module.out(y.flatten(1)))


@pytest.mark.parametrize("kind", ["softmax", "squared-relu"])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_reach_exactly_the_tokens_that_are_seen(kind, causal):
    torch.manual_seed(0)
    model = Transformer(config(depth=2, attention=kind, causal=causal, qk_norm="shared"))
    x = inputs(1, 6, 24).requires_grad_()
    for time in range(6):
        (grad,) = torch.autograd.grad(model(x)[0, time].square().sum(), x)
        reached = grad[0].abs().sum(-1) > 0
        assert reached.tolist() == [not causal or other <= time for other in range(6)]


def test_masked_logits_are_minus_infinity_and_no_others():
    z = tapped(attention(), inputs(1, 4, 24))["logits"]
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    assert (z[..., future] == -torch.inf).all()
    assert z[..., ~future].isfinite().all()


def test_rotation_keeps_sizes_and_makes_products_depend_on_distance_alone():
    q, k = inputs(2, 1, 1, 1, 8).unbind()
    rotated = lambda x, position: rotate(x, rotation_for(torch.tensor([position]), 8))  # noqa: E731
    torch.testing.assert_close(rotated(q, 1000).norm(), q.norm())
    near, far = (rotated(q, start + 3) * rotated(k, start) for start in (2, 77))
    torch.testing.assert_close(near.sum(), far.sum(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(near.sum(), (rotated(q, 2) * rotated(k, 2)).sum(), rtol=1e-2)


def test_positions_may_be_given_and_their_origin_does_not_matter():
    torch.manual_seed(0)
    model, x = Transformer(config(depth=2)), inputs(2, 5, 24)
    shifted = model(x, positions=torch.arange(5) + 40)
    torch.testing.assert_close(model(x), shifted, rtol=1e-4, atol=1e-5)
    per_row = model(x, positions=torch.stack([torch.arange(5), torch.arange(0, 50, 10)]))
    torch.testing.assert_close(per_row[0], model(x)[0])
    assert not torch.allclose(per_row[1], model(x)[1], atol=1e-2)


def test_without_rotation_attention_that_sees_everything_does_not_know_the_order():
    order = torch.tensor([3, 0, 4, 1, 2])
    for rope, same in ((False, True), (True, False)):
        torch.manual_seed(0)
        model, x = Transformer(config(rope=rope, causal=False)), inputs(1, 5, 24)
        assert torch.allclose(model(x)[:, order], model(x[:, order]), atol=1e-5) is same


@pytest.mark.parametrize("kind", ["softmax", "squared-relu"])
def test_autocast_keeps_logits_in_float32(kind):
    module, x = attention(attention=kind, qk_norm="shared"), inputs(2, 6, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = tapped(module, x, rotation_for(torch.arange(6), 8))
        y = module(x, rotation_for(torch.arange(6), 8))
    assert values["logits"].dtype == torch.float32
    assert y.dtype == torch.bfloat16
    # bfloat16 has 8 bits
    torch.testing.assert_close(y.float(), module(x, rotation_for(torch.arange(6), 8)), rtol=0.05, atol=0.05)
