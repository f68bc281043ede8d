"""Trained models in other libraries' formats: Hugging Face transformers, plain safetensors, ONNX.

    GPT, rotary positions                     -> GPTNeoXForCausalLM
    GPT, rotary positions, qk-norm "shared"   -> PersimmonForCausalLM
    GPT, learned positions                    -> GPT2LMHeadModel
    CLIP                                      -> CLIPModel

These architectures are part of transformers and compute the same function: LayerNorm before each branch, GELU in its
tanh form, one MLP matrix up and one down. What they do not have is folded into neighbouring weights (layer-scale, the
attention scale 1 / head width, a normalised embedding), or the export is refused with the reason. Missing biases become
zeros.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trimtab.data.tokenizers import BPE, END, Bytes, TextTokenizer
from trimtab.hints import load_extra
from trimtab.nn import CLIP, GPT, CLIPConfig, GPTConfig, convert_linears, revert_linears
from trimtab.nn.attention import ROPE_BASE
from trimtab.nn.config import BlockConfig
from trimtab.nn.embedding import StableEmbedding
from trimtab.nn.transformer import Block, Transformer

FORMATS = ("hf", "safetensors", "onnx")
GELU = "gelu_pytorch_tanh"
OPSET = 18

State = dict[str, Tensor]


def export(model: nn.Module, folder: Path, to: str, *, tokenizer: TextTokenizer | None = None) -> list[str]:
    """Write the model into a new folder; returns what a user should know, a sentence each. The model does not change.

    Args:
        to: "hf", "safetensors" or "onnx".
        tokenizer: of a GPT; saved for AutoTokenizer ("hf" only).
    """
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}; choose one of {', '.join(FORMATS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; name another folder, or remove it")
    if to == "hf":
        return _export_hf(model, folder, tokenizer)
    return _export_safetensors(model, folder) if to == "safetensors" else _export_onnx(model, folder)


# --- safetensors


def _export_safetensors(model: nn.Module, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = getattr(model, "config", None)
    if not isinstance(config, BlockConfig):
        return ["there is no config.json: the model is user-defined, and its code is needed to build it"]
    described = {"model": type(model).__name__, **asdict(config)}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return [f"the names of the weights are those of trimtab.nn.{type(model).__name__}, in plain layers"]


# --- ONNX


def _export_onnx(model: nn.Module, folder: Path) -> list[str]:
    load_extra("onnxscript", extra="onnx", purpose="exporting to ONNX")
    said = []
    model = copy.deepcopy(model).float().cpu().eval()
    if revert_linears(model).converted:
        said.append("the int8 layers were replaced by plain ones with the same weights: ONNX has no such operator")
    batch = torch.export.Dim("batch", min=1, max=2**20)
    if isinstance(model, GPT):
        context, outputs = model.config.context, ["logits"]
        inputs = {"tokens": (torch.arange(2 * min(8, context)) % model.config.vocab).view(2, -1)}
        shapes: Any = {"tokens": {0: batch}}
        if context > 1:
            shapes["tokens"][1] = torch.export.Dim("length", min=1, max=context)
    elif isinstance(model, CLIP):
        size, config = model.config.image_size, model.config
        tokens = torch.arange(2 * config.context).view(2, -1) % (config.vocab - 1)
        tokens[:, -1] = config.vocab - 1  # the end token
        inputs = {"images": torch.randn(2, config.channels, size, size), "tokens": tokens}
        shapes, outputs = {"images": {0: batch}, "tokens": {0: batch}}, ["image_features", "text_features", "scale"]
    else:
        raise ValueError(
            f"the shapes of a {type(model).__name__}'s inputs are not known here; call revert_linears(model) and then "
            "torch.onnx.export(model, inputs)"
        )
    # Not by torch.onnx.export, which would make a batch of any size one of size 2 without a word if it failed.
    exported = torch.export.export(model, tuple(inputs.values()), dynamic_shapes=shapes)
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": outputs}
    program = torch.onnx.export(exported, dynamo=True, opset_version=OPSET, verbose=False, **names)
    assert program is not None
    folder.mkdir(parents=True, exist_ok=True)
    program.save(str(folder / "model.onnx"))
    return [*said, _compare_onnx(model, folder / "model.onnx", inputs)]


@torch.no_grad()
def _compare_onnx(model: nn.Module, path: Path, inputs: dict[str, Tensor]) -> str:
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        return "not checked, because onnxruntime is not installed"
    session = onnxruntime.InferenceSession(str(path))
    expected = model(*inputs.values())
    expected = (expected,) if isinstance(expected, Tensor) else tuple(expected)
    found = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    worst = max(float((torch.from_numpy(y) - x).abs().max()) for x, y in zip(expected, found, strict=True))
    if not worst < 1e-2 * max(1.0, *(float(x.abs().max()) for x in expected)):
        raise RuntimeError(f"onnxruntime computes something else from {path}: the largest difference is {worst:.2g}")
    return f"checked with onnxruntime: the largest difference of an output is {worst:.1g}"


# --- Hugging Face


def _export_hf(model: nn.Module, folder: Path, tokenizer: TextTokenizer | None) -> list[str]:
    transformers = load_extra("transformers", extra="hf", purpose="exporting to transformers")
    config = getattr(model, "config", None)
    if isinstance(model, transformers.PreTrainedModel):
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        return [f"it is a {type(model).__name__} of transformers, saved by its own save_pretrained"]
    why = _why_not(config) if isinstance(config, BlockConfig) else f"a {type(model).__name__} is none of trimtab.nn"
    if why is not None:
        raise ValueError(f"no architecture of transformers computes this model: {why}. --to safetensors works")
    end = None if tokenizer is None else tokenizer.end
    plain = copy.deepcopy(model).cpu().eval()
    revert_linears(plain)
    if isinstance(plain, GPT):
        make = _gpt2 if plain.config.positions == "learned" else _neox
        made, state = make(transformers, plain, end)
    else:
        assert isinstance(plain, CLIP)
        made, state = _clip(transformers, plain)
    missing, unexpected = made.load_state_dict(state, strict=False)
    # A tied head has no entry of its own.
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    made.tie_weights()
    made.to(next(plain.parameters()).dtype)
    said = [f"it opens as {type(made).__name__}: transformers' from_pretrained({str(folder)!r})"]
    assert isinstance(config, BlockConfig)
    if config.linear != "float":
        convert_linears(made, config.linear, when="always")
        said.append(
            f"the run computes in {config.linear}; the saved model has the same weights in plain layers, and "
            "trimtab.hosts.hf.restore(model) converts them again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with _quiet(transformers):
        made.save_pretrained(folder)
    if isinstance(model, CLIP):
        return [*said, "the tokenizer is not part of it: trimtab.nn.ByteTokenizer makes the ids"]
    return [*said, _save_tokenizer(transformers, tokenizer, folder)]


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _why_not(config: BlockConfig) -> str | None:
    """Why transformers has no architecture for this config, or None."""
    if config.attention != "softmax":
        return f"attention={config.attention!r} is in none of them"
    if config.kappa is not None:
        return f"kappa={config.kappa} (queries and keys of fixed length) is in none of them"
    if config.qk_norm == "off":
        return None
    if isinstance(config, CLIPConfig):
        return f"qk_norm={config.qk_norm!r} is not in its CLIP"
    assert isinstance(config, GPTConfig)
    if config.qk_norm != "shared":
        return f"qk_norm={config.qk_norm!r} with LayerNorm exists there only with other MLPs (StableLM, Cohere)"
    if config.positions == "learned":
        return "qk_norm='shared' with LayerNorm exists there only with rotary positions (Persimmon)"
    return None


def _neox(transformers: Any, model: GPT, end: int | None) -> tuple[Any, State]:
    """GPT-NeoX, or with qk-norm Persimmon, whose layers have the same names. Rows of qkv are sorted by head."""
    config, heads = model.config, model.config.heads
    normed = config.qk_norm == "shared"
    shared = {
        **_sizes(config),
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": _is_tied(model),
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE, "partial_rotary_factor": 1.0},
        **_ends(end),
    }
    if normed:
        made = transformers.PersimmonForCausalLM(transformers.PersimmonConfig(qk_layernorm=True, **shared))
        top, table, attention, last = "model", "embed_tokens", "self_attn", "final_layernorm"
    else:
        made = transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(use_parallel_residual=False, attention_bias=True, **shared)
        )
        top, table, attention, last = "gpt_neox", "embed_in", "attention", "final_layer_norm"

    def by_head(x: Tensor) -> Tensor:
        rows: Tensor = x.unflatten(0, (3, heads, config.head_width)).transpose(0, 1).flatten(0, 2)
        return rows

    state = {f"{top}.{table}.weight": _table(model), **_affine(f"{top}.{last}", model.norm)}
    for i, block in _folded(model.transformer):
        at = f"{top}.layers.{i}"
        state |= _affine(f"{at}.input_layernorm", block.norm1) | _affine(f"{at}.post_attention_layernorm", block.norm2)
        state |= _affine(f"{at}.{attention}.query_key_value", block.attention.qkv, by_head)
        state |= _affine(f"{at}.{attention}.dense", block.attention.out)
        state |= _affine(f"{at}.mlp.dense_h_to_4h", block.mlp.up) | _affine(f"{at}.mlp.dense_4h_to_h", block.mlp.down)
        if normed:
            state |= _affine(f"{at}.{attention}.q_layernorm", block.attention.q_norm)
            state |= _affine(f"{at}.{attention}.k_layernorm", block.attention.k_norm)
    return made, state | _head(model)


def _gpt2(transformers: Any, model: GPT, end: int | None) -> tuple[Any, State]:
    config = model.config
    assert model.positions is not None
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.depth,
            n_head=config.heads,
            n_inner=config.mlp_ratio * config.width,
            activation_function=GELU,
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=_is_tied(model),
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **_ends(end),
        )
    )
    state = {"transformer.wte.weight": _table(model), "transformer.wpe.weight": model.positions.weight}
    state |= _affine("transformer.ln_f", model.norm)
    for i, block in _folded(model.transformer):
        at = f"transformer.h.{i}"
        state |= _affine(f"{at}.ln_1", block.norm1) | _affine(f"{at}.ln_2", block.norm2)
        layers = {"attn.c_attn": block.attention.qkv, "attn.c_proj": block.attention.out}
        layers |= {"mlp.c_fc": block.mlp.up, "mlp.c_proj": block.mlp.down}
        for name, layer in layers.items():
            found = _affine(f"{at}.{name}", layer)
            state |= found | {f"{at}.{name}.weight": found[f"{at}.{name}.weight"].t()}  # a Conv1D: [in, out]
    return made, state | _head(model)


def _clip(transformers: Any, model: CLIP) -> tuple[Any, State]:
    config = model.config
    end = config.vocab - 1
    # Not 2, which transformers takes for the mark of old checkpoints: it would look for the largest id.
    text = {"vocab_size": config.vocab, "max_position_embeddings": config.context, "bos_token_id": end - 1}
    text |= {"eos_token_id": end, "pad_token_id": 0, "projection_dim": config.embed}
    vision = {"image_size": config.image_size, "patch_size": config.patch, "num_channels": config.channels}
    vision |= {"projection_dim": config.embed}
    made = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=text | _sizes(config.text_tower),
            vision_config=vision | _sizes(config.image_tower),
            projection_dim=config.embed,
        )
    )
    image, words = model.visual, model.text
    state = {
        "logit_scale": model.logit_scale[0],
        "visual_projection.weight": image.proj.t(),
        "text_projection.weight": words.proj.t(),
        "vision_model.embeddings.class_embedding": image.class_embedding,
        "vision_model.embeddings.patch_embedding.weight": image.conv1.weight,
        "vision_model.embeddings.position_embedding.weight": image.positional_embedding,
        "text_model.embeddings.token_embedding.weight": words.token_embedding.weight,
        "text_model.embeddings.position_embedding.weight": words.positional_embedding,
        **_affine("vision_model.pre_layrnorm", image.ln_pre),
        **_affine("vision_model.post_layernorm", image.ln_post),
        **_affine("text_model.final_layer_norm", words.ln_final),
    }
    for tower, blocks in (("vision_model", image.transformer), ("text_model", words.transformer)):
        for i, block in _folded(blocks):
            at = f"{tower}.encoder.layers.{i}"
            state |= _affine(f"{at}.layer_norm1", block.norm1) | _affine(f"{at}.layer_norm2", block.norm2)
            for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
                state |= _affine(f"{at}.self_attn.{name}", block.attention.qkv, partial(_third, place))
            state |= _affine(f"{at}.self_attn.out_proj", block.attention.out)
            state |= _affine(f"{at}.mlp.fc1", block.mlp.up) | _affine(f"{at}.mlp.fc2", block.mlp.down)
    return made, state


def _sizes(config: BlockConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_ratio * config.width,
        "hidden_act": GELU,
        "layer_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
    }


def _third(place: int, x: Tensor) -> Tensor:
    return x.chunk(3)[place]


def _ends(end: int | None) -> dict[str, int | None]:
    # A document follows the end of another, so the end token also starts a text, and batches may be padded with it.
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def _affine(name: str, layer: nn.Module, change: Callable[[Tensor], Tensor] = lambda x: x) -> State:
    """Weight and bias of a linear layer or norm; zeros for a bias that it does not have."""
    weight: Any = layer.weight
    bias: Any = getattr(layer, "bias", None)
    weight = weight.detach()
    bias = weight.new_zeros(len(weight)) if bias is None else bias.detach()
    return {f"{name}.weight": change(weight), f"{name}.bias": change(bias)}


def _folded(transformer: Transformer) -> Iterator[tuple[int, Any]]:
    """The blocks, with layer-scale in the weights of the branch, and any attention scale in those of the queries.

    Changes the weights: the model must be a copy.
    """
    config = transformer.config
    for i, block in enumerate(transformer.blocks):
        assert isinstance(block, Block)
        with torch.no_grad():
            for gain, layer in ((block.scale1, block.attention.out), (block.scale2, block.mlp.down)):
                if gain is not None:
                    layer.weight.mul_(gain[:, None])
                    if layer.bias is not None:
                        layer.bias.mul_(gain)
            factor = block.attention.scale * math.sqrt(config.head_width)
            if factor != 1 and config.qk_norm == "off":
                for x in (block.attention.qkv.weight, block.attention.qkv.bias):
                    if x is not None:
                        x[: config.width].mul_(factor)
            elif factor != 1:
                norm: Any = block.attention.q_norm
                norm.weight.mul_(factor)
        yield i, block


def _is_tied(model: GPT) -> bool:
    # A normalised embedding is stored as its normalised rows, and the head keeps the others.
    return model.config.tied and not isinstance(model.embedding, StableEmbedding)


@torch.no_grad()
def _table(model: GPT) -> Tensor:
    table: Tensor = model.embedding(torch.arange(model.config.vocab))
    return table


def _head(model: GPT) -> State:
    weight = model.embedding.weight if model.head is None else model.head.weight
    return {} if _is_tied(model) else {"lm_head.weight": weight.detach()}


# --- Tokenizers


def _save_tokenizer(transformers: Any, tokenizer: TextTokenizer | None, folder: Path) -> str:
    if isinstance(tokenizer, Bytes):
        inner = _byte_tokenizer()
    elif isinstance(tokenizer, BPE):
        library = load_extra("tokenizers", extra="hf", purpose="exporting a tokenizer")
        inner = library.Tokenizer.from_str(tokenizer.inner.to_str())
    else:
        return "there is no tokenizer in it: the run was trained on token files without one"
    assert tokenizer.end is not None
    end = inner.id_to_token(tokenizer.end) or END
    # split_special_tokens: as in training, no text encodes to the end token.
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    assert saved.convert_tokens_to_ids(end) == tokenizer.end
    saved.save_pretrained(folder)
    return f"AutoTokenizer opens its tokenizer; {end!r} separated the texts: start a prompt with tokenizer.bos_token_id"


def _byte_tokenizer() -> Any:
    """One id per byte, with the id of the byte: byte-level BPE without merges."""
    library = load_extra("tokenizers", extra="hf", purpose="exporting a tokenizer")
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    # GPT-2's alphabet: bytes that are not visible characters are shown by those from 256 on.
    hidden = iter(range(256, 512))
    vocab = {chr(b if b in shown else next(hidden)): b for b in range(256)}
    inner = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = library.decoders.ByteLevel()
    return inner
