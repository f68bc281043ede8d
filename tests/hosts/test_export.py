"""A model of ours opens in other libraries and computes the same there."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.conftest import seed
from tests.hosts import zoo
from trimtab import cli
from trimtab.data.tokenizers import END, Bytes, Ids, train_bpe
from trimtab.hosts.export import export
from trimtab.hosts.hf import restore
from trimtab.nn import CLIP, CLIP_SIZES, GPT, GPTConfig, revert_linears

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers and of the ONNX exporter
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*# The axis name.*:UserWarning"),
]

TINY = GPTConfig(vocab=257, depth=2, width=32, heads=2, context=32)
TOKENS = torch.randint(0, 257, (2, 12), generator=seed(0))
LAYOUTS = {
    "rope": (TINY, "GPTNeoXForCausalLM"),
    "rope, biases, tied": (replace(TINY, bias=True, tied=True), "GPTNeoXForCausalLM"),
    "rope, layer-scale, full muParam": (replace(TINY, layer_scale=0.1, mup="full"), "GPTNeoXForCausalLM"),
    "rope, stable embedding, tied": (replace(TINY, embedding="stable", tied=True), "GPTNeoXForCausalLM"),
    "qk-norm": (replace(TINY, qk_norm="shared", mlp_ratio=2), "PersimmonForCausalLM"),
    "qk-norm, full muParam": (replace(TINY, qk_norm="shared", mup="full", norm_eps=1e-5), "PersimmonForCausalLM"),
    "learned": (replace(TINY, positions="learned"), "GPT2LMHeadModel"),
    "GPT-2": (replace(TINY, positions="learned", bias=True, tied=True, norm_eps=1e-5), "GPT2LMHeadModel"),
    "learned, linear scale": (replace(TINY, positions="learned", attention_scale="linear"), "GPT2LMHeadModel"),
}


def build(config: GPTConfig) -> GPT:
    """A model with all parameters random: gains of one and biases of zero would hide mistakes."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, mean=1.0 if p.dim() == 1 else 0.0, std=0.2)
    return model


def load(folder) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", LAYOUTS)
def test_transformers_opens_a_gpt_and_computes_the_same_logits(name, tmp_path):
    config, architecture = LAYOUTS[name]
    model = build(config)
    state = {key: x.clone() for key, x in model.state_dict().items()}
    said = export(model, tmp_path / "out", "hf", tokenizer=Bytes())
    assert architecture in said[0]
    theirs = load(tmp_path / "out")
    assert type(theirs).__name__ == architecture
    expected = model(TOKENS)
    assert (theirs(TOKENS).logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


@torch.no_grad()
def test_it_generates_the_same_text(tmp_path):
    from transformers import AutoTokenizer

    model, prompt = build(replace(TINY, qk_norm="shared")), "a β"
    export(model, tmp_path / "out", "hf", tokenizer=Bytes())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt)["input_ids"]]])
    assert ids.tolist() == [[256, *prompt.encode()]]
    made = load(tmp_path / "out").generate(ids, max_new_tokens=10, do_sample=False)
    for _ in range(made.shape[1] - ids.shape[1]):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(made, ids)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_tokenizer_is_that_of_the_run(kind, tmp_path):
    from transformers import AutoTokenizer

    ours = Bytes() if kind == "bytes" else train_bpe([b"the cat and the dog, the bird and the fish " * 20], 300)
    said = export(build(replace(TINY, vocab=ours.vocab)), tmp_path / "out", "hf", tokenizer=ours)
    assert "AutoTokenizer" in said[-1]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the cat", "  two spaces\n\ttab", "βeta 🐟", f"before{END}after", "\x00\x7f", "<|endoftext|>"):
        assert theirs(text)["input_ids"] == list(ours.encode(text)), text
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == ours.end
    said = export(build(TINY), tmp_path / "ids", "hf", tokenizer=Ids(257))
    assert "no tokenizer in it" in said[-1]


@torch.no_grad()
def test_an_int8_run_opens_plain_and_can_be_restored(tmp_path):
    model = build(replace(TINY, linear="switchback"))
    said = export(model, tmp_path / "out", "hf", tokenizer=Bytes())
    assert "trimtab.hosts.hf.restore" in said[1]
    theirs, int8 = load(tmp_path / "out"), model(TOKENS)
    assert (restore(load(tmp_path / "out"))(TOKENS).logits - int8).abs().max() < 1e-4 * int8.abs().max()
    revert_linears(model)
    plain = model(TOKENS)
    assert (theirs(TOKENS).logits - plain).abs().max() < 1e-5 * plain.abs().max()
    assert (plain - int8).abs().max() > 1e-3 * plain.abs().max()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention": "squared-relu"}, "attention='squared-relu'"),
        ({"kappa": 4.0}, "kappa=4.0"),
        ({"qk_norm": "per-head"}, "qk_norm='per-head' with LayerNorm exists there only with other MLPs"),
        ({"qk_norm": "whole"}, "qk_norm='whole'"),
        ({"qk_norm": "shared", "positions": "learned"}, "only with rotary positions"),
    ],
)
def test_what_transformers_does_not_have_is_refused_with_the_reason(change, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        export(build(replace(TINY, **change)), tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
    assert export(build(replace(TINY, **change)), tmp_path / "out", "safetensors")


def pictures() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 257, (3, 64), generator=seed(0))
    tokens[torch.arange(3), torch.tensor([5, 40, 63])] = 258
    return torch.randn(3, 3, 32, 32, generator=seed(1)), tokens


def build_clip(**changes) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(replace(CLIP_SIZES["tiny"], depth=2, text_depth=1, text_width=32, text_heads=2, **changes)).eval()
    for name, p in model.named_parameters():
        if p.dim() == 1 and name != "logit_scale":
            nn.init.normal_(p, mean=1.0, std=0.2)
    return model


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"bias": False, "layer_scale": 0.5, "attention_scale": "linear"}], ids=str)
def test_transformers_opens_a_clip_and_computes_the_same_features(changes, tmp_path):
    from transformers import AutoModel

    model, (images, tokens) = build_clip(**changes), pictures()
    export(model, tmp_path / "out", "hf")
    out = AutoModel.from_pretrained(tmp_path / "out").eval()(input_ids=tokens, pixel_values=images)
    image, text, scale = model(images, tokens)
    torch.testing.assert_close(out.image_embeds, image, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.text_embeds, text, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.logits_per_image, scale * image @ text.t(), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="qk_norm='shared' is not in its CLIP"):
        export(build_clip(qk_norm="shared"), tmp_path / "other", "hf")


@torch.no_grad()
def test_onnx_of_a_gpt_and_of_a_clip_without_int8_layers(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = build(replace(TINY, linear="switchback", qk_norm="shared"))
    said = export(model, tmp_path / "gpt", "onnx")
    assert "replaced by plain ones" in said[0]
    assert "checked with onnxruntime" in said[1]
    revert_linears(model)
    session = onnxruntime.InferenceSession(tmp_path / "gpt" / "model.onnx")
    for tokens in (TOKENS, TOKENS[:1, :5], TOKENS[:, :1]):  # any batch, any length
        (logits,) = session.run(["logits"], {"tokens": tokens.numpy()})
        expected = model(tokens)
        assert (torch.from_numpy(logits) - expected).abs().max() < 1e-5 * expected.abs().max()
    clip, (images, tokens) = build_clip(), pictures()
    export(clip, tmp_path / "clip", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "clip" / "model.onnx")
    image, text, _ = session.run(None, {"images": images.numpy(), "tokens": tokens.numpy()})
    torch.testing.assert_close(torch.from_numpy(image), clip.encode_image(images), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(text), clip.encode_text(tokens), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="shapes of a Linear's inputs are not known"):
        export(nn.Linear(2, 2), tmp_path / "other", "onnx")


def test_safetensors_are_plain_weights_with_a_config(tmp_path):
    model = build(replace(TINY, linear="switchback"))
    export(model, tmp_path / "out", "safetensors")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described.pop("model") == "GPT"
    other = GPT(replace(GPTConfig(**described), linear="float"))
    other.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    revert_linears(model)
    assert torch.equal(other.eval()(TOKENS), model(TOKENS))
    with pytest.raises(ValueError, match="exists already"):
        export(model, tmp_path / "out", "onnx")
    theirs, _ = zoo.build(zoo.gpt2)  # a user-defined run may train a model of transformers
    assert "its own save_pretrained" in export(theirs, tmp_path / "theirs", "hf")[0]
    assert torch.equal(load(tmp_path / "theirs").lm_head.weight, theirs.lm_head.weight)
    with pytest.raises(ValueError, match=r"is none of trimtab\.nn\. --to safetensors works"):
        export(nn.Linear(2, 2), tmp_path / "new", "hf")
    with pytest.raises(ValueError, match="unknown format 'gguf'; choose one of hf, safetensors, onnx"):
        export(model, tmp_path / "new", "gguf")
    assert "user-defined" in export(nn.Linear(2, 2), tmp_path / "linear", "safetensors")[0]


@torch.no_grad()
def test_torch_export_of_gpt_and_clip():
    length = torch.export.Dim("length", min=2, max=32)
    for config in (TINY, replace(TINY, qk_norm="shared"), replace(TINY, positions="learned")):
        model = build(config)
        program = torch.export.export(model, (TOKENS,), dynamic_shapes=({1: length},))
        expected = model(TOKENS[:, :7])
        assert (program.module()(TOKENS[:, :7]) - expected).abs().max() < 1e-5 * expected.abs().max()
    clip, inputs = build_clip(), pictures()
    for ours, theirs in zip(clip(*inputs), torch.export.export(clip, inputs).module()(*inputs), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


PLAIN = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (auto.from_pretrained(sys.argv[1]) for auto in (AutoModelForCausalLM, AutoTokenizer))
print(model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=4, do_sample=False).tolist())
assert not any(name.startswith("trimtab") for name in sys.modules)
"""


def test_the_command_exports_a_run(tmp_path, monkeypatch, capsys):
    from trimtab.recipes import gpt_lab
    from trimtab.schedule import LearningRate
    from trimtab.train import train

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 400)
    config = gpt_lab()
    data = replace(config.data, corpus=str(tmp_path / "text.txt"), cache=str(tmp_path / "cache"))
    schedule = replace(config.schedule, lr=LearningRate())
    config = replace(config, model=replace(TINY, linear="switchback"), steps=2, batch=2, data=data, schedule=schedule)
    train(config, tmp_path / "run")
    capsys.readouterr()
    for to in ("hf", "safetensors"):
        assert cli.run(lambda to=to: cli.runs.export(tmp_path / "run", to=to)) == 0
        shown = capsys.readouterr().out
        assert f"step 2 of {tmp_path / 'run'} is in run-{to}" in shown
    done = subprocess.run([sys.executable, "-c", PLAIN, "run-hf"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])[0]) == 8
    assert cli.run(lambda: cli.runs.export(tmp_path / "run", to="hf")) == 2
    assert "exists already" in capsys.readouterr().err
