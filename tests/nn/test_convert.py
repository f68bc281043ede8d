"""Converting a model's linear layers keeps everything but their products."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.conftest import seed
from trimtab import optim
from trimtab.nn.convert import convert_linears, freeze_linears, revert_linears
from trimtab.nn.linear import SwitchBackConv1D, SwitchBackLinear
from trimtab.nn.rounding import measure_rounding


class Conv1D(nn.Module):
    """Like Hugging Face's: y = x W + b with W [in, out]. test_hugging_face has the real one."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.conv = Conv1D(16, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.again = self.layers[0]  # the same layer in two places
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(self.up(x).relu()) + self.conv(x)
        for layer in (*self.layers, self.again):
            x = x + layer(x)
        return self.head(x)


TOKENS = torch.randint(0, 11, (4, 9), generator=seed(0))


def test_parameters_names_and_optimizer_go_on():
    model, plain = Model(), Model()
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
    reference = optim.AdamW(plain.named_parameters(), lr=1e-2)
    for m, o in ((model, optimizer), (plain, reference)):
        m(TOKENS).square().mean().backward()
        o.step()
        o.zero_grad()
    before = dict(model.named_parameters())
    report = convert_linears(model, "switchback", when="always")
    assert report.converted.keys() == {"up", "down", "conv", "again", "layers.0", "layers.1"}
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert model.again is model.layers[0]
    assert model.state_dict().keys() == plain.state_dict().keys()
    for _ in range(5):
        for m, o in ((model, optimizer), (plain, reference)):
            m(TOKENS).square().mean().backward()
            o.step()
            o.zero_grad()
    for (name, p), q, start in zip(model.named_parameters(), plain.parameters(), Model().parameters(), strict=True):
        assert not torch.equal(p, q), name
        assert (p - q).norm() < 0.35 * (q - start).norm(), name


def test_the_report_says_what_was_done_and_why_not():
    model = Model()
    model.extra = nn.MultiheadAttention(16, 4)
    model.hooked = nn.Linear(16, 16)
    model.hooked.register_forward_hook(lambda *_: None)
    model.normed = parametrizations.weight_norm(nn.Linear(16, 16))
    model.double = nn.Linear(16, 16).double()
    model.lm_head = nn.Linear(16, 11, bias=False)
    model.tied = nn.Linear(16, 11, bias=False)
    model.tied.weight = model.embed.weight
    report = convert_linears(model, "switchback-m", skip=["layers.*", model.down])
    assert report.converted.keys() == {"up", "conv", "again", "extra.in_proj_weight", "extra.out_proj"}
    assert report.kept == {
        "down": "skipped",
        "layers.0": "skipped",
        "layers.1": "skipped",
        "head": "an output head (name matches 'head'); name it in `only` to convert it",
        "lm_head": "an output head (name matches '*_head'); name it in `only` to convert it",
        "hooked": "it has hooks or parametrizations, which a new layer would lose; convert before adding them",
        "normed": "a ParametrizedLinear, which has its own forward",
        "double": "its weight is torch.float64",
        "tied": "its weight is shared with an embedding",
    }
    assert "5 linear layers converted to switchback-m, 9 kept" in str(report)
    assert "too small for int8 to be faster" in report.converted["up"] or "in float below" in report.converted["up"]
    again = convert_linears(model, "switchback", only=lambda name, module: name in ("up", "head"))
    assert again.converted.keys() == {"head"}
    assert again.kept["up"] == "already switchback-m; revert_linears(model) first"


def test_reverting_gives_the_model_back():
    model = Model()
    expected, before = model(TOKENS), dict(model.named_parameters())
    convert_linears(model, "switchback", when="always")
    assert not torch.equal(model(TOKENS), expected)
    model.eval()
    report = revert_linears(model)
    assert len(report.converted) == 6
    assert torch.equal(model(TOKENS), expected)
    assert [type(m) for m in model.modules()] == [type(m) for m in Model().modules()]
    assert all(before[name] is p for name, p in model.named_parameters())
    assert not any(m.training for m in model.modules())
    assert model.again is model.layers[0]
    assert not revert_linears(model).converted


def test_frozen_models_evaluate_the_same():
    model = Model().eval()
    convert_linears(model, when="always")
    with torch.no_grad():
        expected = model(TOKENS)
        freeze_linears(model)
        assert torch.equal(model(TOKENS), expected)
        assert all(m._frozen for m in model.modules() if isinstance(m, SwitchBackLinear | SwitchBackConv1D))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "int4"}, "unknown kind 'int4'"),
        ({"skip": "nothing.*"}, r"names 'nothing\.\*', which matches no linear layer of this model; it has up, down"),
        ({"only": ["up", "missing"]}, "names 'missing'"),
        ({"only": nn.Linear}, "name patterns, modules or functions"),
        ({"skip": 3}, "got int"),
        ({"threshold": 6.0}, "belongs to llm-int8"),
        ({"when": "never"}, "when must be"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_leaves_the_model_alone(options, message):
    model = Model()
    with pytest.raises((ValueError, TypeError), match=message):
        convert_linears(model, **options)
    assert not any(isinstance(m, SwitchBackLinear | SwitchBackConv1D) for m in model.modules())
    with pytest.raises(ValueError, match="itself a linear layer"):
        convert_linears(nn.Linear(3, 3))


def test_converted_models_copy_and_compile():
    model = Model()
    convert_linears(model, when="always")
    other = copy.deepcopy(model)
    assert torch.equal(other(TOKENS), model(TOKENS))
    assert revert_linears(other).converted.keys() == {"up", "down", "conv", "again", "layers.0", "layers.1"}


def test_groups_scale_and_decay_converted_layers_as_before():
    shape = lambda groups: [(g["lr"], g["weight_decay"], [n for n, _ in g["params"]]) for g in groups]  # noqa: E731
    model = Model()
    before = shape(optim.groups(model, lr=0.1, mup_ratio=0.5))
    convert_linears(model)
    assert shape(optim.groups(model, lr=0.1, mup_ratio=0.5)) == before


# --- Statistics


@pytest.mark.parametrize("kind", ["switchback", "switchback-q", "fp8-tensorwise"])
def test_rounding_is_measured_layer_by_layer(kind):
    model = Model()
    convert_linears(model, kind, when="always")
    with measure_rounding(model) as seen:
        model(TOKENS).square().sum().backward()
    assert seen.keys() >= {"up", "down", "conv"}
    low, high = (0.01, 0.08) if kind.startswith("fp8") else (0.001, 0.012)
    for name in ("up", "conv"):
        for operand in ("input", "weight", "grad"):
            assert low < seen[name].error(operand) < high
    if kind == "switchback":
        scales = {"input": 16, "weight": 16 * 32, "grad": 32}  # values that share a scale
        for operand, count in scales.items():
            assert 1 / count <= seen["up"].saturated(operand) < 8 / count
    assert all(module.rounding is None for module in model.modules() if hasattr(module, "rounding"))


def test_what_rounds_to_zero_is_counted():
    layer = SwitchBackLinear(64, 8)
    x = torch.full((4, 64), 1e-4)
    x[:, 0] = 1.0
    with measure_rounding(nn.Sequential(layer)) as seen:
        layer(x)
    assert seen["0"].flushed("input") == pytest.approx(63 / 64)
    with pytest.raises(ValueError, match="no grad was measured, only input, weight"):
        seen["0"].error("grad")
    with pytest.raises(ValueError, match="no quantized layer"), measure_rounding(nn.Linear(2, 2)):
        pass


# --- Hugging Face


def test_hugging_face_s_gpt2_trains_converted_as_it_does_plain():
    transformers = pytest.importorskip("transformers", reason="pip install 'trimtab[hf]'")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
    )
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config)
    model = copy.deepcopy(plain)
    report = convert_linears(model, "switchback", when="always")
    assert len(report.converted) == 8
    assert list(report.kept) == ["lm_head"]
    assert model.state_dict().keys() == plain.state_dict().keys()
    tokens = torch.randint(0, 50, (8, 16), generator=seed(0))
    losses = []
    for m in (plain, model):
        optimizer = optim.AdamW(m.named_parameters(), lr=1e-2)
        for _ in range(15):
            loss = m(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] < 2.0  # from ln 50 = 3.9
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert len(revert_linears(model).converted) == 8
    assert type(model.transformer.h[0].mlp.c_fc) is type(plain.transformer.h[0].mlp.c_fc)


@pytest.mark.parametrize(
    "name",
    [
        *("visual_projection", "text_projection", "embed_out", "output", "router", "score", "classifier", "lm_head"),
        *("model.output", "block.moe.router.layer", "classifier.out_proj", "head.fc", "qa_outputs"),
    ],
)
def test_heads_and_routers_are_known_by_their_names(name):
    *path, last = name.split(".")
    model = nn.ModuleDict({"dense": nn.Linear(16, 16), "attention_output": nn.Linear(16, 16)})
    inner = model
    for part in path:
        inner[part] = nn.ModuleDict()
        inner = inner[part]
    inner[last] = nn.Linear(16, 16)
    report = convert_linears(model, when="always")
    assert report.kept.keys() == {name}
    assert report.kept[name].startswith("a router (name" if "router" in name else "an output head (name matches")
    assert name in str(report)


def test_a_hugging_face_model_says_itself_which_layer_is_its_head():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=64))
    report = convert_linears(model, when="always")
    (head,) = report.kept
    assert model.get_submodule(head) is model.get_output_embeddings()
    assert "get_output_embeddings()" in report.kept[head]


def test_the_gate_of_experts_is_a_router_and_other_gates_are_not():
    def experts() -> nn.ModuleList:
        return nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    model = nn.ModuleDict(
        {
            "moe": nn.ModuleDict({"gate": nn.Linear(16, 2), "experts": experts()}),
            "mlp": nn.ModuleDict({"gate": nn.Linear(16, 16), "up": nn.Linear(16, 16)}),
        }
    )
    report = convert_linears(model, when="always")
    assert report.kept == {"moe.gate": "a router (a gate beside experts); name it in `only` to convert it"}
    assert len(report.converted) == 4
