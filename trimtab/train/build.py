"""From a config to the things that run: a task (model, batches and how they are scored) and an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trimtab import optim
from trimtab.data import PairBatches, TextBatches, open_corpus, open_pairs
from trimtab.nn import CLIP, GPT, ByteTokenizer, ConfigError, contrastive_loss
from trimtab.train.config import CLIPRun, GPTRun, ModuleRun, OptimConfig, RunConfig
from trimtab.train.module import ModuleBatches, build_module, loss_of
from trimtab.train.processes import Processes


class Batches(Protocol):
    def next(self, batch: int) -> dict[str, Any]: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


@dataclass
class Task:
    """What is trained, on what, and how it is scored."""

    model: nn.Module
    batches: Callable[[str, int], Batches]  # split, seed
    loss: Callable[[nn.Module, dict[str, Any]], Tensor]  # for the backward pass
    evaluate: Callable[[nn.Module, dict[str, Any]], dict[str, Tensor]]  # "loss" is what is compared
    length: int  # of a full sequence
    eval_batch: int  # rows of one evaluation batch, over all processes
    sha256: str  # of the data
    after_step: Callable[[], None] = lambda: None


def build_task(config: RunConfig, processes: Processes) -> Task:
    torch.manual_seed(config.seed)
    if isinstance(config, GPTRun):
        return _gpt_task(config, processes)
    if isinstance(config, ModuleRun):
        return _module_task(config, processes)
    assert isinstance(config, CLIPRun)
    return _clip_task(config, processes)


def build_model(config: RunConfig) -> nn.Module:
    """The model alone, for weights that come from a checkpoint."""
    if isinstance(config, GPTRun):
        return GPT(config.model)
    if isinstance(config, ModuleRun):
        return build_module(config.model).model
    assert isinstance(config, CLIPRun)
    return CLIP(config.model)


def _gpt_task(config: GPTRun, processes: Processes) -> Task:
    corpus = open_corpus(config.data.corpus, tokenizer=config.data.tokenizer, cache=config.data.cache)
    if corpus.vocab > config.model.vocab:
        raise ConfigError(
            f"model.vocab={config.model.vocab} is too small for the {corpus.vocab} tokens of "
            f"{config.data.corpus} in {config.data.tokenizer}; try model.vocab={corpus.vocab}"
        )
    model, device = GPT(config.model).to(processes.device), processes.device

    def batches(split: str, seed: int) -> Batches:
        return TextBatches(
            corpus, split, context=config.model.context, seed=seed, rank=processes.rank, world=processes.world
        )

    def loss(run: nn.Module, batch: dict[str, Any]) -> Tensor:
        result: Tensor = run(batch["tokens"].to(device), batch["targets"].to(device)).loss
        return result

    def evaluate(run: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"loss": run(batch["tokens"].to(device), batch["targets"].to(device)).ce}

    return Task(model, batches, loss, evaluate, config.model.context, config.batch, corpus.sha256)


def _clip_task(config: CLIPRun, processes: Processes) -> Task:
    pairs = open_pairs(config.data.corpus, size=config.model.image_size, cache=config.data.cache)
    tokenizer = ByteTokenizer(context=config.model.context)
    if tokenizer.vocab > config.model.vocab:
        raise ConfigError(f"model.vocab={config.model.vocab} is too small for bytes; try model.vocab={tokenizer.vocab}")
    most, held_out = len(pairs.indices("train")), len(pairs.indices("validation"))
    if config.batch > most:
        raise ConfigError(f"batch={config.batch} is more than the {most} pairs of {config.data.corpus}; try {most}")
    model, device = CLIP(config.model).to(processes.device), processes.device

    def batches(split: str, seed: int) -> Batches:
        return PairBatches(pairs, split, seed=seed, rank=processes.rank, world=processes.world)

    def score(run: nn.Module, batch: dict[str, Any]) -> Any:
        tokens = tokenizer.encode(batch["captions"])
        return contrastive_loss(*run(batch["images"].to(device), tokens.to(device)))

    def evaluate(run: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        found = score(run, batch)
        return {"loss": found.loss, "image_accuracy": found.image_accuracy, "text_accuracy": found.text_accuracy}

    def loss(run: nn.Module, batch: dict[str, Any]) -> Tensor:
        result: Tensor = score(run, batch).loss
        return result

    rows = min(config.batch, held_out - held_out % processes.world)
    clamp = model.clamp_logit_scale
    return Task(model, batches, loss, evaluate, config.model.context, rows, pairs.sha256, after_step=clamp)


def _module_task(config: ModuleRun, processes: Processes) -> Task:
    build, device = config.model.build, processes.device
    if processes.world > 1:
        raise ConfigError(f"{build} makes the batches of one process, and there are {processes.world}; start one")
    made = build_module(config.model)

    def batches(split: str, seed: int) -> Batches:
        return ModuleBatches(build, made.data, split, seed)

    def loss(run: nn.Module, batch: dict[str, Any]) -> Tensor:
        return loss_of(build, run, batch, device)

    def evaluate(run: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"loss": loss_of(build, run, batch, device)}

    return Task(made.model.to(device), batches, loss, evaluate, config.model.context, config.batch, made.sha256)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Groups carry `lr_ratio`: what muParam makes of the scheduled learning rate."""
    bare: Any = getattr(model, "module", model)
    ratio = float(getattr(bare, "mup_ratio", 1.0))
    groups = optim.groups(
        bare,
        lr=config.lr,
        weight_decay=config.weight_decay,
        mup_ratio=ratio,
        independent_decay=config.independent_decay,
    )
    if config.name == "torch-adamw":
        if config.independent_decay:
            raise ConfigError("optim.independent_decay is ours; torch-adamw does not have it. Try optim.name='adamw'")
        plain = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
        made: torch.optim.Optimizer = torch.optim.AdamW(
            plain, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
    else:
        made = _ours(groups, config)
    for group in made.param_groups:
        group["lr_ratio"] = group["lr"] / config.lr
    return made


def _ours(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    state: dict[str, Any] = {"bits": config.bits, "codebook": config.codebook, "block": config.block}
    shared = {"lr": config.lr, **state}
    adam = {**shared, "betas": config.betas, "eps": config.eps}
    match config.name:
        case "adamw":
            return optim.AdamW(groups, **adam)
        case "stable-adamw":
            return optim.StableAdamW(groups, **adam, beta2_power=config.beta2_power)
        case "adam":
            return optim.Adam(groups, **adam)
        case "lamb":
            return optim.LAMB(groups, **adam)
        case "ademamix":
            return optim.AdEMAMix(groups, **shared, eps=config.eps)
        case "lion":
            return optim.Lion(groups, **shared, betas=config.betas)
        case _:
            return optim.SGD(groups, **shared, momentum=config.betas[0])
