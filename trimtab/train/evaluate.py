"""A trained run: its validation loss at full length, generated text, or zero-shot classification of pictures."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.data import open_corpus, open_pairs
from trimtab.data.tokenizers import TextTokenizer
from trimtab.nn import CLIP
from trimtab.runs import RunError, RunFolder
from trimtab.train.build import build_model, build_task, check_data
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.config import CLIPRun, GPTRun, RunConfig, load_config
from trimtab.train.memory import check_weights
from trimtab.train.processes import Processes
from trimtab.train.zero_shot import ZeroShot, classify, encode_captions, encode_images

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
        result |= name_pictures(config, model)
    return result


def name_pictures(config: CLIPRun, model: nn.Module) -> dict[str, Any]:
    """Validation pictures, none of which was trained on: the class of each by zero-shot classification, and the caption
    of each among all validation captions."""
    assert isinstance(model, CLIP)
    pairs = open_pairs(config.data.corpus, size=config.model.image_size, cache=config.data.cache)
    found = classify(model, pairs)
    images, captions = pairs.load("validation")
    names = sorted(set(captions))
    similarity = encode_images(model, images) @ encode_captions(model, names).t()
    right = torch.tensor([names.index(caption) for caption in captions])
    nearest = similarity.topk(min(5, len(names)), dim=1).indices == right[:, None]
    return {
        "zero_shot_top1": found.top1,
        "zero_shot_one_prompt": found.single,
        "chance": found.chance,
        "classes": found.classes,
        "prompts": found.prompts,
        "caption_top1": nearest[:, 0].float().mean().item(),
        "caption_top5": nearest.any(dim=1).float().mean().item(),
        "captions": len(names),
    }


def zero_shot(folder: Path) -> ZeroShot:
    """Zero-shot classification by the last checkpoint of a CLIP's run."""
    config, model, _ = load_run(folder)
    if not isinstance(config, CLIPRun) or not isinstance(model, CLIP):
        raise RunError(f"{folder} is not the run of a CLIP, so it has no zero-shot accuracy; try `trimtab eval`")
    return classify(model, open_pairs(config.data.corpus, size=config.model.image_size, cache=config.data.cache))


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
