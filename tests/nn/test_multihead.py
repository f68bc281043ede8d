"""A quantized nn.MultiheadAttention is a drop-in: float products are the plain module's, int8 ones are near."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import seed
from tests.train.conftest import _one_thread  # noqa: F401
from trimtab import optim
from trimtab.nn.convert import convert_linears, freeze_linears, revert_linears
from trimtab.nn.linear import SwitchBackLinear
from trimtab.nn.multihead import SwitchBackAttention
from trimtab.nn.rounding import measure_rounding
from trimtab.nn.tuning import NEVER

B, T, S, E, H = 3, 7, 5, 32, 4


def attention(**options) -> nn.ModuleDict:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, **options)
    for p in module.parameters():
        if p.dim() == 1:
            nn.init.normal_(p)  # biases are zero at first, and would hide mistakes
    return nn.ModuleDict({"attn": module})


def inputs(*, batch_first: bool = False, cross: bool = False, widths: tuple[int, int] = (E, E)) -> list[Tensor]:
    def draw(length: int, width: int) -> Tensor:
        x = torch.randn(B, length, width, generator=seed(length + width))
        return (x if batch_first else x.transpose(0, 1)).requires_grad_()

    if not cross:
        return [draw(T, E)] * 3
    return [draw(T, E), draw(S, widths[0]), draw(S, widths[1])]


MASKS = {
    "none": {},
    "causal": {"attn_mask": torch.ones(T, T).triu(1).bool(), "is_causal": True},
    "float": {"attn_mask": torch.randn(T, T, generator=seed(1))},
    "per head": {"attn_mask": torch.randn(B * H, T, T, generator=seed(1))},
    "padding": {"key_padding_mask": torch.arange(T) >= torch.tensor([[7], [4], [2]])},
    "both": {
        "attn_mask": torch.ones(T, T).triu(1).bool(),
        "key_padding_mask": torch.arange(T) >= torch.tensor([[7], [4], [2]]),
    },
}
KINDS = {
    "self": ({}, {}),
    "batch first": ({"batch_first": True}, {"batch_first": True}),
    "no bias": ({"bias": False}, {}),
    "bias_k": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "cross": ({}, {"cross": True}),
    "other widths": ({"kdim": 16, "vdim": 48}, {"cross": True, "widths": (16, 48)}),
}


@pytest.mark.parametrize("weights", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=str)
@pytest.mark.parametrize(
    ("kind", "mask"),
    [(kind, mask) for kind in KINDS for mask in MASKS if mask == "none" or "cross" not in KINDS[kind][1]],
)
def test_outputs_weights_and_gradients_are_those_of_the_plain_module(kind, mask, weights):
    options, shapes = KINDS[kind]
    masks = dict(MASKS[mask])
    if kind == "bias_k":
        # With this hint alone PyTorch leaves the mask out and hides the added keys, which it does not in other calls.
        masks.pop("is_causal", None)
    plain = attention(**options)
    ours = copy.deepcopy(plain)
    convert_linears(ours, when=NEVER)  # every product in float: what differs is ours
    rough = copy.deepcopy(plain)
    convert_linears(rough, when="always")
    results = []
    for model in (plain, ours, rough):
        x = inputs(**shapes)
        y, shown = model["attn"](*x, **masks, **weights)
        y.square().mean().backward()
        grads = [p.grad for p in model.parameters()] + [x[0].grad, x[2].grad]
        results.append((y, shown, torch.cat([g.flatten() for g in grads])))
    (y, shown, grads), (y_ours, shown_ours, grads_ours), (y_rough, _, grads_rough) = results
    torch.testing.assert_close(y_ours, y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads_ours, grads, rtol=1e-4, atol=1e-6)
    assert (shown is None) == (shown_ours is None)
    if shown is not None:
        torch.testing.assert_close(shown_ours, shown, rtol=1e-5, atol=1e-6)
    for rounded, exact in ((y_rough, y), (grads_rough, grads)):
        assert 1e-4 < (rounded - exact).norm() / exact.norm() < 0.05


def test_one_row_without_a_batch():
    plain, x = attention(), torch.randn(T, E, generator=seed(0))
    ours = copy.deepcopy(plain)
    convert_linears(ours, when=NEVER)
    padding = torch.arange(T) > 4
    for options in ({}, {"key_padding_mask": padding}, {"need_weights": False}):
        expected, got = (model["attn"](x, x, x, **options) for model in (plain, ours))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_parameters_state_dict_and_hooks_stay():
    model, plain = attention(), attention()
    calls: list[int] = []
    model["attn"].register_forward_hook(lambda *_: calls.append(1))
    before = dict(model.named_parameters())
    report = convert_linears(model, when="always")
    assert report.converted.keys() == {"attn.in_proj_weight", "attn.out_proj"}
    assert report.share == 1.0
    assert isinstance(model["attn"], SwitchBackAttention)
    assert all(before[name] is p for name, p in model.named_parameters())
    assert model.state_dict().keys() == plain.state_dict().keys()
    x = inputs()
    model["attn"](*x)
    assert calls == [1]
    with pytest.raises(ValueError, match="takes no nested tensors"):
        model["attn"](*[torch.nested.nested_tensor([torch.randn(T, E)], layout=torch.jagged)] * 3)
    again = convert_linears(model)
    assert again.kept["attn.in_proj_weight"] == "already switchback; revert_linears(model) first"
    assert revert_linears(model).converted.keys() == report.converted.keys()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert torch.equal(model["attn"](*x)[0], plain["attn"](*x)[0])


def test_a_refused_conversion_leaves_the_module_alone():
    model = attention()
    for options in ({"when": "never"}, {"threshold": 6.0}, {"kind": "int4"}):
        with pytest.raises(ValueError, match=r"when must be|belongs to llm-int8|unknown kind"):
            convert_linears(model, **options)
        assert [type(m) for m in model.modules()] == [type(m) for m in attention().modules()]


def test_each_projection_can_be_left_out():
    x = inputs()
    exact = attention()["attn"](*x)[0]
    for skip, kept in (("*.out_proj", "attn.out_proj"), ("*.in_proj_weight", "attn.in_proj_weight")):
        model = attention()
        report = convert_linears(model, skip=skip, when="always")
        assert report.kept == {kept: "skipped"}
        assert 0 < (model["attn"](*x)[0] - exact).norm() / exact.norm() < 0.02
        assert isinstance(model["attn"].out_proj, SwitchBackLinear) == (kept != "attn.out_proj")


def test_it_copies_pickles_freezes_and_is_measured():
    model = attention().eval()
    convert_linears(model, when="always")
    x = [inputs()[0].detach()] * 3
    with torch.no_grad():
        expected = model["attn"](*x)[0]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other["attn"](*x)[0], expected)
            other["attn"].in_proj_weight.mul_(2)  # the copy has weights and codes of its own
            assert not torch.equal(other["attn"](*x)[0], expected)
            assert torch.equal(model["attn"](*x)[0], expected)
        freeze_linears(model)
        assert torch.equal(model["attn"](*x)[0], expected)
    with measure_rounding(model) as seen:
        model["attn"](*x)[0].sum().backward()
    assert 0.001 < seen["attn.quantized.in_proj_weight"].error("weight") < 0.02


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # the plain fast path
@pytest.mark.parametrize("norm_first", [False, True])
def test_pytorch_s_fast_path_does_not_bypass_the_int8_layers(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    nested = model.use_nested_tensor
    x, padding = torch.randn(B, T, E, generator=seed(0)), torch.arange(T) >= torch.tensor([[7], [4], [2]])
    report = convert_linears(model, when="always")
    assert len(report.converted) == 8
    trained = model(x, src_key_padding_mask=padding)
    model.eval()
    with torch.no_grad():
        evaluated = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(evaluated, trained.detach(), rtol=1e-4, atol=1e-5)
        revert_linears(model)
        plain = model(x, src_key_padding_mask=padding)
    assert (plain - trained)[~padding].abs().max() > 1e-3
    assert model.use_nested_tensor == nested
    assert all(layer.activation_relu_or_gelu == 1 for layer in model.layers)


def test_a_converted_decoder_trains_as_the_plain_one():
    torch.manual_seed(0)
    plain = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 64, dropout=0.0), 1)
    ours = copy.deepcopy(plain)
    convert_linears(ours, when="always")
    x, memory = torch.randn(T, B, E, generator=seed(0)), torch.randn(S, B, E, generator=seed(1))
    losses = []
    for model in (plain, ours):
        optimizer = optim.AdamW(model.named_parameters(), lr=3e-3)
        for _ in range(10):
            loss = (model(x, memory) - x.flip(0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
def test_it_compiles_into_one_graph():
    model = attention()
    convert_linears(model, when="always")
    x = inputs()[0].detach()
    expected = model["attn"](x, x, x, need_weights=False)[0]
    compiled = torch.compile(model["attn"], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, need_weights=False)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_subclass_with_its_own_forward_is_kept():
    class Own(nn.MultiheadAttention):
        pass

    report = convert_linears(nn.ModuleDict({"attn": Own(E, H)}))
    assert report.kept == {
        "attn.in_proj_weight": "a Own, which has its own forward",
        "attn.out_proj": "a NonDynamicallyQuantizableLinear, which has its own forward",
    }
