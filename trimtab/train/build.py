"""From a config to a task (model, batches and losses) and an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab import optim
from trimtab.data import Batches, PairBatches, TextBatches, open_corpus, open_pairs
from trimtab.nn import CLIP, GPT, ByteTokenizer, ConfigError, Loss, contrastive_loss
from trimtab.nn.contrastive import ContrastiveLoss
from trimtab.runs import RunError, SavedConfig
from trimtab.train.config import CLIPRun, GPTRun, ModuleRun, OptimConfig, RunConfig
from trimtab.train.module import ModuleBatches, build_module, compute_loss
from trimtab.train.processes import Processes

Batch = dict[str, Any]


@dataclass
class Task:
    model: nn.Module
    batches: Callable[[str, int], Batches]  # of a split ("train" or "validation") and a seed
    loss: Callable[[nn.Module, Batch], Tensor]  # for the backward pass
    evaluate: Callable[[nn.Module, Batch], dict[str, Tensor]]  # must contain "loss"
    eval_batch: int  # rows of an evaluation batch, over all processes
    sha256: str  # of the data
    micro_batch: int | None = field(default=None, kw_only=True)  # rows that are evaluated at once; None: all
    after_step: Callable[[], None] = field(default=lambda: None, kw_only=True)

    @torch.no_grad()
    def validate(self, model: nn.Module, count: int) -> dict[str, Tensor]:
        """The means of `evaluate` over the first validation batches, at full length."""
        batches, sums = self.batches("validation", 0), dict[str, Tensor]()
        training = model.training
        model.eval()
        for _ in range(count):
            parts = split(batches.next(self.eval_batch), self.micro_batch)
            for part in parts:
                for name, x in self.evaluate(model, part).items():
                    sums[name] = sums.get(name, torch.zeros_like(x, dtype=torch.float32)) + x.float() / len(parts)
        model.train(training)
        return {name: x / count for name, x in sums.items()}


def build_task(config: RunConfig, processes: Processes) -> Task:
    torch.manual_seed(config.seed)
    if isinstance(config, GPTRun):
        return _gpt_task(config, processes)
    if isinstance(config, ModuleRun):
        return _module_task(config, processes)
    assert isinstance(config, CLIPRun)
    return _clip_task(config, processes)


def split(batch: dict[str, Any], rows: int | None) -> list[dict[str, Any]]:
    """Micro-batches of equal size."""
    count = len(next(iter(batch.values())))
    if rows is None or rows >= count:
        return [batch]
    if count % rows:
        raise ValueError(f"a batch of {count} rows does not split into micro-batches of {rows}")
    return [{key: value[i : i + rows] for key, value in batch.items()} for i in range(0, count, rows)]


def check_data(task: Task, saved: SavedConfig) -> None:
    """Raise RunError if the data is not that of the run."""
    if task.sha256 != saved.sha256:
        raise RunError(
            f"the data has changed: its sha256 is {task.sha256[:12]} and was {saved.sha256[:12]} when the run started; "
            "use --force to continue with it"
        )


def build_model(config: RunConfig) -> nn.Module:
    """The model without data, for weights from a checkpoint."""
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
    shard = {"rank": processes.rank, "world": processes.world}

    def batches(split: str, seed: int) -> Batches:
        return TextBatches(corpus, split, context=config.model.context, seed=seed, **shard)

    def score(run: nn.Module, batch: Batch) -> Loss:
        found: Loss = run(batch["tokens"].to(device), batch["targets"].to(device))
        return found

    def loss(run: nn.Module, batch: Batch) -> Tensor:
        return score(run, batch).loss

    def evaluate(run: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": score(run, batch).ce}

    return Task(model, batches, loss, evaluate, config.batch, corpus.sha256, micro_batch=config.micro_batch)


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

    def score(run: nn.Module, batch: Batch) -> ContrastiveLoss:
        tokens = tokenizer.encode(batch["captions"])
        return contrastive_loss(*run(batch["images"].to(device), tokens.to(device)))

    def loss(run: nn.Module, batch: Batch) -> Tensor:
        return score(run, batch).loss

    def evaluate(run: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return score(run, batch)._asdict()

    rows = min(config.batch, held_out - held_out % processes.world)
    return Task(model, batches, loss, evaluate, rows, pairs.sha256, after_step=model.clamp_logit_scale)


def _module_task(config: ModuleRun, processes: Processes) -> Task:
    build, device = config.model.build, processes.device
    if processes.world > 1:
        raise ConfigError(f"{build} makes the batches of one process, and there are {processes.world}; start one")
    made = build_module(config.model)

    def batches(split: str, seed: int) -> Batches:
        return ModuleBatches(build, made.data, split, seed)

    def loss(run: nn.Module, batch: Batch) -> Tensor:
        return compute_loss(build, run, batch, device)

    model = made.model.to(device)
    return Task(model, batches, loss, lambda run, batch: {"loss": loss(run, batch)}, config.batch, made.sha256)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Param groups have an `lr_ratio`: the factor of muParam on the scheduled learning rate."""
    bare: Any = getattr(model, "module", model)
    exempt: dict[str, Any] = {} if config.embedding_bits == 32 else {"keep32": ()}
    groups = optim.groups(
        bare,
        lr=config.lr,
        weight_decay=config.weight_decay,
        mup_ratio=float(getattr(bare, "mup_ratio", 1.0)),
        independent_decay=config.independent_decay,
        **exempt,
    )
    made = _make_optimizer(groups, config)
    for group in made.param_groups:
        group["lr_ratio"] = group["lr"] / config.lr
    return made


def _make_optimizer(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    adam: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    state: dict[str, Any] = {"bits": config.bits, "codebook": config.codebook, "block": config.block}
    state |= {"skip_nonfinite": True} if config.release else {}  # the loop sees a gradient when it is too late
    match config.name:
        case "torch-adamw":
            if config.independent_decay:
                raise ConfigError("torch-adamw has no optim.independent_decay; try optim.name='adamw'")
            plain = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
            return torch.optim.AdamW(plain, **adam, fused=True)
        case "adamw":
            return optim.AdamW(groups, **adam, **state, rms_scaled=config.rms_scaled)
        case "stable-adamw":
            return optim.StableAdamW(groups, **adam, **state, beta2_power=config.beta2_power)
        case "adam":
            return optim.Adam(groups, **adam, **state)
        case "lamb":
            return optim.LAMB(groups, **adam, **state)
        case "ademamix":
            return optim.AdEMAMix(groups, lr=config.lr, eps=config.eps, **state)
        case "adafactor":  # its eps is added to squares, so it is not that of Adam
            return optim.AdafactorMomentum(groups, lr=config.lr, betas=config.betas)
        case "lion":
            return optim.Lion(groups, lr=config.lr, betas=config.betas, **state)
        case "adagrad":
            return optim.Adagrad(groups, lr=config.lr, eps=config.eps, **state)
        case "sgd":
            return optim.SGD(groups, lr=config.lr, momentum=config.betas[0], **state)
