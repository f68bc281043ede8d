"""The memory of a run, estimated before anything is allocated: a run that cannot fit is refused in one line.

    weights            4 bytes per parameter, and gradients as much
    optimizer state    4 bytes per parameter and moment; in 8 bits 1, and a share of a scale
    activations        what autograd keeps for one backward pass, at the longest length of the run

All numbers follow from the config alone. Weights and optimizer state are exact, except for the rows and columns of
Adafactor, which are not counted. Activations are a lower bound: small
and temporary tensors are not counted. So no run that fits is refused, but one that is accepted may still not fit.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trimtab.nn import CLIPConfig, ConfigError, GPTConfig
from trimtab.nn.config import TransformerConfig
from trimtab.optim.memory.release import HOLD
from trimtab.optim.options import DEFAULTS, choose_storage
from trimtab.train.config import CLIPRun, GPTRun, OptimConfig, RunConfig, with_model
from trimtab.train.processes import Processes

Known = GPTRun | CLIPRun  # runs whose models are known
Sizes = Iterator[tuple[int, int, bool]]  # tensors that are alike: their number, their size, whether they are embeddings
FLOAT = 4  # bytes
MOMENTS = {"lion": 1, "sgd": 1, "adagrad": 1, "adafactor": 1, "ademamix": 3}  # the other optimizers have 2
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes in one process. `rows` and `length` are those of its largest backward pass."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    accumulates: bool  # in the forward pass there are gradients, of an earlier micro-batch or in the buckets of DDP
    rows: int
    length: int

    @property
    def parts(self) -> dict[str, int]:
        """What is in memory at the same time. In a backward pass, gradients replace activations."""
        found = {"weights": self.weights, "optimizer state": self.optimizer}
        if self.accumulates or self.gradients >= self.activations:
            found["gradients"] = self.gradients
        if self.accumulates or self.gradients < self.activations:
            found["activations"] = self.activations
        return found

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def estimate(config: RunConfig, world: int = 1, sharded: bool = False) -> Memory | None:
    """The memory of each of `world` processes; None for a user-defined model."""
    return _estimate(config, world, sharded) if isinstance(config, Known) else None


def check_memory(config: RunConfig, processes: Processes) -> None:
    """Raise ConfigError if a run needs more memory than its device has."""
    check_weights(config, processes)
    has, share = device_memory(processes.device), _sharing(processes)
    if has is None or not isinstance(config, Known):
        return
    needed = _estimate(config, processes.world, processes.sharded)
    if needed.total * share > has:
        shown = ", ".join(f"{name} {_amount(size * share)}" for name, size in needed.parts.items())
        at = f" at length {needed.length} and {needed.rows} rows" if "activations" in needed.parts else ""
        raise ConfigError(
            f"this run needs at least {_amount(needed.total * share)} ({shown}{at}) and {_name(processes)} has "
            f"{_amount(has)}; try {_remedy(config, processes, has // share)}"
        )


def check_weights(config: RunConfig, processes: Processes) -> None:
    """Raise ConfigError if the weights alone do not fit. Every process builds the whole model, even if it is sharded
    later."""
    has, share = device_memory(processes.device), _sharing(processes)
    if has is None or not isinstance(config, Known):
        return
    weights = _weights(config) * share
    if weights > has:
        raise ConfigError(
            f"the weights of this model need {_amount(weights)} and {_name(processes)} has {_amount(has)}; try a "
            "smaller model.width or model.depth"
        )


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU, or of the machine if no control group allows less; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return None
    return min([machine, *_cgroup_limits()])


def _estimate(config: Known, world: int, sharded: bool) -> Memory:
    # Fewer steps than the run has, if it ends by tokens: no step has more of them than the last.
    steps = config.steps
    if config.tokens is not None:
        steps = min(steps, max(config.tokens // (config.batch * config.model.context), 1))
    batch, length = config.batch_warmup, config.seqlen_warmup.at(steps)
    share = batch.at((steps - 1) * batch.start) // world
    rows = share * (config.model.context // length if config.schedule.seqlen.cut_mode == "reshape" else 1)
    micro = min(config.micro_batch or rows, rows)
    shards = world if sharded else 1
    return Memory(
        weights=_weights(config) // shards,
        gradients=_weights(config) // (HOLD if config.optim.release else 1) // shards,
        optimizer=_optimizer_state(config) // shards,
        activations=_activations(config, micro, length) + share * _data(config),
        accumulates=micro < rows or (world > 1 and not sharded),
        rows=micro,
        length=length,
    )


# --- Weights and optimizer state


def _weights(config: Known) -> int:
    return FLOAT * sum(count * size for count, size, _ in _tensors(config.model))


def _tensors(model: GPTConfig | CLIPConfig) -> Sizes:
    norm = 2 if model.bias else 1
    if isinstance(model, GPTConfig):
        yield from _block_tensors(model.transformer)
        yield 1, model.vocab * model.width, True
        yield 0 if model.tied else 1, model.vocab * model.width, False
        yield 1 if model.positions == "learned" else 0, model.context * model.width, True
        yield norm, model.width, False
        yield 2 if model.embedding in ("stable", "norm") else 0, model.width, True
        return
    yield from _block_tensors(model.image_tower)
    yield from _block_tensors(model.text_tower)
    yield 1, model.channels * model.patch**2 * model.width, False
    yield 1, (2 + model.patches) * model.width, True  # the class token and positions
    yield 1, (model.vocab + model.context) * model.text_width, True
    for norms, width in ((2, model.width), (1, model.text_width)):
        yield norms * norm, width, False
        yield 1, width * model.embed, False
    yield 1, 1, False  # the logit scale


def _block_tensors(blocks: TransformerConfig) -> Sizes:
    depth, width, inner = blocks.depth, blocks.width, blocks.mlp_ratio * blocks.width
    for size in (3 * width, width, inner, inner):
        yield depth, size * width, False
    vectors = 2  # gains of the norms
    if blocks.bias:
        yield depth, 3 * width, False
        yield depth, inner, False
        vectors += 4  # of the norms, and of the two layers that end a branch
    if blocks.layer_scale is not None:
        vectors += 2
    if blocks.qk_norm in ("per-head", "whole"):
        vectors += 4 if blocks.qk_norm == "whole" and blocks.bias else 2
    yield depth * vectors, width, False
    yield 2 * depth if blocks.qk_norm == "shared" else 0, blocks.head_width, False


def _optimizer_state(config: Known) -> int:
    optim = config.optim
    moments = 0 if optim.name == "sgd" and not optim.betas[0] else MOMENTS.get(optim.name, 2)
    return moments * sum(count * _moment(optim, size, embeds) for count, size, embeds in _tensors(config.model))


def _moment(optim: OptimConfig, size: int, embeds: bool) -> int:
    """Bytes of one moment of a tensor."""
    group = DEFAULTS | {"bits": optim.bits, "block": optim.block, "codebook": optim.codebook}
    bits = choose_storage(size, group, "an embedding" if embeds and optim.embedding_bits == 32 else None).bits
    return FLOAT * size if bits == 32 else size + FLOAT * -(-size // optim.block)


# --- Activations


def _activations(config: Known, rows: int, length: int) -> int:
    """What autograd keeps at the end of the forward pass. With checkpointing: or has when it recomputes a block."""
    model = config.model
    if isinstance(model, GPTConfig):
        towers = [(model.transformer, length)]
        # The input of the last norm, and gradients from the loss, which does not have all logits in memory at once.
        rest = rows * length * model.width * (FLOAT + _product(config)) + FLOAT * model.vocab * model.width
    else:
        patches = model.patches
        if model.patch_dropout:
            patches = max(1, int(patches * (1 - model.patch_dropout)))
        towers = [(model.image_tower, 1 + patches), (model.text_tower, model.context)]
        # The input of the first norm. The loss compares all pairs: a product, and a softmax in each direction.
        rest = FLOAT * rows * ((1 + patches) * model.width + 3 * config.batch)
    blocks = [
        (tower.depth, rows * time * tower.width * FLOAT, rows * _block(config, tower, time)) for tower, time in towers
    ]
    if not model.checkpointing:
        return rest + sum(depth * block for depth, _, block in blocks)
    return sum(depth * kept for depth, kept, _ in blocks) + max(rest, *(b - kept for depth, kept, b in blocks if depth))


def _block(config: Known, blocks: TransformerConfig, time: int) -> int:
    """Bytes that autograd keeps of one block, for a row of `time` tokens."""
    product, ratio, softmax = _product(config), blocks.mlp_ratio, blocks.attention == "softmax"
    # Squared ReLU has no fused kernel: it keeps the attention weights, before and after their conversion.
    weights = 0 if softmax else blocks.heads * time * (FLOAT + product)
    if config.compile:  # only results of matrix products; the compiler recomputes the rest
        return time * (blocks.width * product * (6 + ratio) + weights)
    linear = 1 if blocks.linear == "switchback-m" else product  # the input of a linear layer, as codes or as it is
    per_width = 2 * FLOAT + (2 + ratio) * linear  # inputs of the norms, and of three linear layers
    per_width += (3 + ratio) * product + (
        product if softmax else linear
    )  # q, k, v; input of the GELU; attention's output
    if softmax and (blocks.rope or blocks.qk_norm != "off" or blocks.kappa is not None):
        per_width += 2 * product  # q and k, normalised or rotated
    return time * (blocks.width * per_width + weights)


def _product(config: Known) -> int:
    """Bytes of a value in the result of a matrix product."""
    return 2 if config.autocast == "bfloat16" else FLOAT


def _data(config: Known) -> int:
    """Bytes of a row of data: tokens and targets, or an image."""
    model = config.model
    return 16 * model.context if isinstance(model, GPTConfig) else FLOAT * model.channels * model.image_size**2


# --- The machine


def _cgroup_limits() -> Iterator[int]:
    """Limits of the control groups of this process and of all groups above them, as in a container."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # there is no such file, or it holds "max"
                yield int((folder / name).read_text())


def _sharing(processes: Processes) -> int:
    """Processes that share the memory of the device."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if processes.device.type == "cpu" and processes.world > 1 else 1


def _name(processes: Processes) -> str:
    return "this machine" if processes.device.type == "cpu" else str(processes.device)


# --- The remedy


def _remedy(config: Known, processes: Processes, has: int) -> str:
    """The first change with which the run fits, or what should be smaller."""
    for words, changed in _changes(config, processes.world):
        if _estimate(changed, processes.world, processes.sharded).total <= has:
            return words
    parts = _estimate(config, processes.world, processes.sharded).parts
    return (
        "a smaller batch or model.context"
        if max(parts, key=parts.__getitem__) == "activations"
        else "a smaller model.width"
    )


def _changes(config: Known, world: int) -> Iterator[tuple[str, Known]]:
    checkpointing = with_model(config, checkpointing=True)
    if config.optim.bits == 32 and config.optim.name != "torch-adamw":
        yield "optim.bits=8", replace(config, optim=replace(config.optim, bits=8))
    if isinstance(config, GPTRun):
        sizes = config.batch_warmup
        micro = math.gcd(sizes.start, sizes.increment if sizes.start < sizes.end else 0) // world
        micro = math.gcd(micro, config.micro_batch or 0)
        while micro > 1:
            micro = micro // 2 if micro % 2 == 0 else 1
            yield f"micro_batch={micro}", replace(config, micro_batch=micro)
    yield "model.checkpointing=True", checkpointing
    yield "autocast=bfloat16", replace(config, autocast="bfloat16")
    if isinstance(checkpointing, GPTRun):
        yield "micro_batch=1 and model.checkpointing=True", replace(checkpointing, micro_batch=1)


def _amount(size: int) -> str:
    """Bytes in words: 23.4 GB."""
    power = min((len(str(size)) - 1) // 3, 6)
    number = size / 1000**power
    digits = f"{number:.3g}" if number < 100 else f"{number:,.0f}"
    return f"{digits} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB')[power]}"
