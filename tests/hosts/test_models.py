"""`convert_linears` on real architectures: what is converted, what it computes, what is on disk."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.hosts import zoo
from trimtab import optim
from trimtab.hosts.hf import restore
from trimtab.nn import SwitchBackConv1D, convert_linears, revert_linears
from trimtab.nn.convert import MARK
from trimtab.nn.experts import SwitchBackExperts
from trimtab.nn.tuning import NEVER

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages that are imported here

KEPT = {
    "gpt2": {"lm_head"},
    "llama": {"lm_head"},
    "mixtral": {"lm_head"},
    "gpt_oss": {"lm_head"},
    "bert": {"cls.predictions.decoder", "cls.predictions.transform.dense"},
    "t5": {"lm_head"},
    "vit": {"classifier"},
    "clip": {"visual_projection", "text_projection"},
    "timm_vit": {"head"},
    "timm_convnext": {"head.fc"},
    "open_clip": set(),  # its projections are no layers
}
SHARES = {"vit": 0.70, "timm_vit": 0.78, "timm_convnext": 0.69, "clip": 0.79, "open_clip": 0.84}  # tiny: large patches


def names(makers) -> list[str]:
    return [make.__name__ for make in makers]


@pytest.mark.parametrize("make", zoo.MODELS, ids=names(zoo.MODELS))
def test_real_architectures_convert_train_and_revert(make):
    model, loss = zoo.build(make)
    plain, types = copy.deepcopy(model), [type(m) for m in model.modules()]
    report = convert_linears(model, when="always")
    assert report.kept.keys() == KEPT[make.__name__], report
    assert report.share >= SHARES.get(make.__name__, 0.92), report
    assert f"converted: {report.share:.1%} of the matrix parameters" in str(report)
    assert model.state_dict().keys() == plain.state_dict().keys()
    first = loss(model).item()
    assert first == pytest.approx(loss(plain).item(), rel=0.03)
    assert first != loss(plain).item()
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-3)
    for _ in range(5):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss(model).item() < first - 0.01
    assert revert_linears(model).converted.keys() == report.converted.keys()
    assert [type(m) for m in model.modules()] == types


@pytest.mark.parametrize("make", [zoo.mixtral, zoo.gpt_oss])
def test_experts_compute_what_the_plain_ones_do(make):
    plain, loss = zoo.build(make)
    model = copy.deepcopy(plain)
    report = convert_linears(model, when=NEVER)  # every product in float: what differs is ours
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert report.converted[name].startswith("4 experts of 32, 128, bias=" + str(make is zoo.gpt_oss))
    for m in (plain, model):
        loss(m).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)
    # Copies are independent and keep working.
    experts = next(m for m in model.modules() if isinstance(m, SwitchBackExperts))
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        x, index, weights = torch.randn(5, 32), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
        assert torch.equal(other(x, index, weights), experts(x, index, weights))
        assert isinstance(other, SwitchBackExperts)
    assert experts(torch.zeros(0, 32), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)).shape == (0, 32)
    experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="do not support expert parallelism"):
        loss(model)


def test_stacks_of_matrices_that_are_not_known_are_reported_with_their_share():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 32, 16))

    model = nn.ModuleDict({"up": nn.Linear(32, 64), "experts": Experts(), "conv": nn.Conv1d(32, 32, 16)})
    report = convert_linears(model)
    assert list(report.kept) == ["experts.w"]
    total = 32 * 64 + 4 * 32 * 16 + 32 * 32 * 16
    assert f"(4 x 32 x 16) of a Experts, which has its own forward; {2048 / total:.1%}" in report.kept["experts.w"]
    assert report.share == pytest.approx(2048 / total)


HEADS = [
    ("BertForQuestionAnswering", "Bert", {"qa_outputs"}),
    ("BertForNextSentencePrediction", "Bert", {"cls.seq_relationship"}),
    ("RobertaForSequenceClassification", "Roberta", {"classifier.dense", "classifier.out_proj"}),
    (
        "ElectraForPreTraining",
        "Electra",
        {"discriminator_predictions.dense", "discriminator_predictions.dense_prediction"},
    ),
    ("LlamaForSequenceClassification", "Llama", {"score"}),
    ("XLMRobertaForMaskedLM", "XLMRoberta", {"lm_head.dense", "lm_head.decoder"}),
]


@pytest.mark.parametrize(("cls", "config", "heads"), HEADS)
def test_heads_of_other_tasks_stay_and_blocks_do_not(cls, config, heads):
    import transformers

    made = getattr(transformers, f"{config}Config")(vocab_size=50, **zoo.SIZES, **zoo.ENDS)
    report = convert_linears(getattr(transformers, cls)(made), when="always")
    assert report.kept.keys() == heads
    assert len(report.converted) >= 12
    if config == "Bert":
        assert "bert.encoder.layer.0.output.dense" in report.converted


@pytest.mark.parametrize("name", ["resnet", "swin", "deit_distilled", "efficientnet"])
def test_timm_s_heads_stay(name):
    zoo.use_vision()
    import timm

    made = {
        "resnet": ("resnet10t", {"num_classes": 4}, {"fc"}),
        "swin": (
            "swin_tiny_patch4_window7_224",
            {"num_classes": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)},
            {"head.fc"},
        ),
        "deit_distilled": (
            "deit_tiny_distilled_patch16_224",
            {"num_classes": 4, "embed_dim": 32, "depth": 1, "num_heads": 2},
            {"head", "head_dist"},
        ),
        "efficientnet": ("efficientnet_lite0", {"num_classes": 4}, {"classifier"}),
    }[name]
    with torch.device("meta"):
        model = timm.create_model(made[0], pretrained=False, **made[1])
    assert convert_linears(model, when="always").kept.keys() == made[2]


# --- On disk

OPEN = """
import sys
import torch, transformers
inputs = torch.load(sys.argv[2], weights_only=True)
model = getattr(transformers, sys.argv[3]).from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    torch.save(model(**inputs)[0 if len(sys.argv) < 5 else sys.argv[4]], sys.argv[2])
assert not any(name.startswith("trimtab") for name in sys.modules)
"""


def inputs_of(make) -> dict[str, torch.Tensor]:
    if make is zoo.vit:
        return {"pixel_values": zoo.IMAGES}
    inputs = {"input_ids": zoo.TOKENS}
    if make is zoo.t5:
        inputs |= {"decoder_input_ids": zoo.TOKENS}
    return inputs | ({"pixel_values": zoo.IMAGES} if make is zoo.clip else {})


@torch.no_grad()
@pytest.mark.parametrize("make", zoo.HUGGING_FACE, ids=names(zoo.HUGGING_FACE))
def test_a_saved_model_is_plain_and_can_be_restored(make, tmp_path):
    model, _ = zoo.build(make)
    plain = copy.deepcopy(model).eval()
    convert_linears(model.eval(), when="always")
    inputs = inputs_of(make)
    int8, exact = model(**inputs)[0], plain(**inputs)[0]
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop(MARK)[0]["kind"] == "switchback"
    plain.save_pretrained(tmp_path / "plain")
    assert config == json.loads((tmp_path / "plain" / "config.json").read_text())
    opened = type(model).from_pretrained(tmp_path).eval()
    assert [type(m) for m in opened.modules()] == [type(m) for m in plain.modules()]
    assert torch.equal(opened(**inputs)[0], exact)
    assert restore(opened) is opened
    assert [type(m) for m in opened.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(opened(**inputs)[0], int8)
    assert not torch.equal(int8, exact)
    revert_linears(opened)
    assert not hasattr(opened.config, MARK)


@torch.no_grad()
@pytest.mark.parametrize("make", [zoo.gpt2, pytest.param(zoo.mixtral, marks=pytest.mark.slow)], ids=["gpt2", "mixtral"])
def test_transformers_opens_it_without_trimtab(make, tmp_path):
    model, _ = zoo.build(make)
    exact = model.eval()(**inputs_of(make))[0]
    convert_linears(model, when="always")
    model.save_pretrained(tmp_path / "model")
    torch.save(inputs_of(make), tmp_path / "tensors.pt")
    words = [str(tmp_path / "model"), str(tmp_path / "tensors.pt"), type(model).__name__]
    done = subprocess.run([sys.executable, "-c", OPEN, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "tensors.pt", weights_only=True), exact)


def test_restoring_follows_the_head_and_says_what_is_wrong(tmp_path):
    from transformers import GPT2ForSequenceClassification, GPT2Model

    model, _ = zoo.build(zoo.gpt2)
    report = convert_linears(model, when={f"transformer.h.{i}.{n}": 7 for i in range(2) for n in LAYERS})
    model.save_pretrained(tmp_path)
    for cls, prefix in ((GPT2Model, ""), (GPT2ForSequenceClassification, "transformer.")):
        other = restore(cls.from_pretrained(tmp_path))
        mark = getattr(other.config, MARK)
        assert mark == [
            {
                "kind": "switchback",
                "threshold": 0.0,
                "int8_from": {f"{prefix}h.{i}.{n}": 7 for i in range(2) for n in LAYERS},
            }
        ]
        assert len(mark[0]["int8_from"]) == len(report.converted)
    plain, _ = zoo.build(zoo.gpt2)
    with pytest.raises(ValueError, match="does not say that its layers were quantized"):
        restore(plain)
    setattr(plain.config, MARK, "switchback")
    with pytest.raises(ValueError, match="is damaged"):
        restore(plain)
    setattr(plain.config, MARK, [{"kind": "switchback", "threshold": 0.0, "int8_from": {"transformer.gone": 0}}])
    with pytest.raises(ValueError, match=r"quantized layer transformer\.gone, and this GPT2LMHeadModel has none"):
        restore(plain)
    assert not any(isinstance(m, SwitchBackConv1D) for m in plain.modules())
    plain.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_: None)
    setattr(
        plain.config, MARK, [{"kind": "switchback", "threshold": 0.0, "int8_from": {"transformer.h.0.mlp.c_fc": 0}}]
    )
    with pytest.raises(ValueError, match=r"1 layers could not be quantized again, .*c_fc: it has hooks"):
        restore(plain)


LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()", "a block"])
def test_a_compiled_model_is_refused_with_the_remedy(how):
    model, _ = zoo.build(zoo.gpt2)
    if how == "torch.compile(model)":
        model = torch.compile(model, backend="eager")
    elif how == "model.compile()":
        model.compile(backend="eager")
    else:
        model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
    with pytest.raises(ValueError, match=r"is compiled, .*convert first: convert_linears\(model\), then model = torch"):
        convert_linears(model)
