"""A trained run: its validation loss at full length, generated text, or zero-shot classification of pictures."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.data import open_corpus, open_pairs
from trimtab.data.tokenizers import TextTokenizer
from trimtab.nn import CLIP, ByteTokenizer
from trimtab.runs import RunError, RunFolder
from trimtab.train.build import build_model, build_task, check_data
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.config import CLIPRun, GPTRun, RunConfig, load_config
from trimtab.train.memory import check_weights
from trimtab.train.processes import Processes

MOST = 10_000_000  # batches of an evaluation, tokens of a text: more would take days


def load_run(folder: Path, step: int | None = None, *, trust: str | None = None) -> tuple[RunConfig, nn.Module, int]:
    """The config, the model and the step of the last checkpoint, or of that of `step`; -1 is the best one. A run with
    a user-defined model is loaded only if `trust` is the name of its function."""
    config, _ = load_config(folder, trust=trust)
    checkpoints = Checkpoints(RunFolder(folder).checkpoints, 1, Processes())
    chosen = checkpoints.choose(step)
    check_weights(config, Processes())
    model = build_model(config)
    checkpoints.load(chosen, model, None)
    return config, model.eval(), chosen


def load_tokenizer(folder: Path, config: RunConfig) -> TextTokenizer | None:
    """The tokenizer of a run's text; None if it has no text, as a CLIP."""
    if not isinstance(config, GPTRun):
        return None
    corpus = open_corpus(config.data.corpus, tokenizer=config.data.tokenizer, cache=config.data.cache)
    if config.data.tokenizer.startswith("bpe:") and corpus.sha256 != RunFolder(folder).require_config().sha256:
        raise RunError(f"{config.data.corpus} has changed since the training, and with it the tokenizer; restore it")
    return corpus.tokenizer


@torch.no_grad()
def evaluate(
    folder: Path, *, step: int | None = None, batches: int = 32, force: bool = False, trust: str | None = None
) -> dict[str, Any]:
    """Validation loss at full length; perplexity and bits per token for text, zero-shot accuracy for pictures. Data
    that has changed since the training is refused unless `force`."""
    if not 1 <= batches <= MOST:
        raise RunError(f"batches={batches} is not a number from 1 to {MOST:,}; try 32")
    config, model, chosen = load_run(folder, step, trust=trust)
    task = build_task(config, Processes())
    if not force:
        check_data(task, RunFolder(folder).require_config())
    means = {name: x.item() for name, x in task.validate(model, batches).items()}
    result: dict[str, Any] = {"step": chosen, **means}
    if isinstance(config, GPTRun):
        result |= {"perplexity": math.exp(min(means["loss"], 700)), "bits_per_token": means["loss"] / math.log(2)}
    elif isinstance(config, CLIPRun):
        result |= zero_shot(config, model)
    return result


def zero_shot(config: CLIPRun, model: nn.Module) -> dict[str, Any]:
    """Classify each validation picture by the nearest of all validation captions, which were not trained on."""
    assert isinstance(model, CLIP)
    pairs = open_pairs(config.data.corpus, size=config.model.image_size, cache=config.data.cache)
    images, captions = pairs.load("validation")
    names = sorted(set(captions))
    tokens = ByteTokenizer(context=config.model.context).encode(names)
    text = torch.cat([model.encode_text(part) for part in tokens.split(256)])
    similarity = torch.cat([model.encode_image(part) @ text.t() for part in images.split(256)])
    right = torch.tensor([names.index(caption) for caption in captions])
    found = similarity.topk(min(5, len(names)), dim=1).indices == right[:, None]
    return {
        "zero_shot_top1": found[:, 0].float().mean().item(),
        "zero_shot_top5": found.any(dim=1).float().mean().item(),
        "chance": 1 / len(names),
        "captions": len(names),
    }


@torch.no_grad()
def sample(
    folder: Path,
    *,
    prompt: str = "",
    tokens: int = 300,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    step: int | None = None,
    trust: str | None = None,
) -> str:
    """The prompt and the text that a trained GPT continues it with."""
    _check_sampling(tokens, temperature, top_k, seed)
    config, model, _ = load_run(folder, step, trust=trust)
    if not isinstance(config, GPTRun):
        kind = "a CLIP" if isinstance(config, CLIPRun) else "a user-defined model"
        raise RunError(f"{folder} holds {kind}, which writes no text; try `trimtab eval {folder}`")
    tokenizer = load_tokenizer(folder, config)
    if tokenizer is None or tokenizer.end is None:
        raise RunError(f"{config.data.corpus} is a token file without a tokenizer: tokens cannot be turned into text")
    ids = torch.tensor([[tokenizer.end, *tokenizer.encode(prompt)]])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits = model(ids[:, -config.model.context :])[0, -1, : tokenizer.vocab]
        ids = torch.cat([ids, draw(logits, temperature, top_k, generator)[None]], dim=1)
    return tokenizer.decode(ids[0, 1:].tolist())


def _check_sampling(tokens: int, temperature: float, top_k: int | None, seed: int) -> None:
    if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
        got = f"{temperature} and {top_k}"
        raise RunError(f"temperature must be a number of at least 0 and top_k at least 1, got {got}; try 0.8 and 50")
    if not 0 <= tokens <= MOST:
        raise RunError(f"tokens={tokens} is not a number from 0 to {MOST:,}; try 300")
    if not -(2**63) <= seed < 2**64:
        raise RunError(f"seed={seed} has more than 64 bits; try 0")


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token; the most likely one if the temperature is 0."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    return torch.multinomial((logits / temperature).softmax(dim=0), 1, generator=generator)
