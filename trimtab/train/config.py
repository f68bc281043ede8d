"""Everything that decides a run, in one frozen dataclass that is saved with it.

One kind of run per model: `GPTRun`, `CLIPRun`, and `ModuleRun` for somebody's own. Configs are checked when they are
built, go to JSON and come back, and nothing changes them afterwards. Recipes (trimtab/recipes.py) are functions that
return one.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from trimtab.nn import CLIPConfig, ConfigError, GPTConfig
from trimtab.runs import RunError, RunFolder, SavedConfig
from trimtab.schedule import BatchWarmup, LearningRate, SeqLenWarmup
from trimtab.watch import Actions, Alarm

Optimizer = Literal["adamw", "stable-adamw", "adam", "lion", "lamb", "ademamix", "sgd", "torch-adamw"]
Parallel = Literal["ddp", "fsdp2"]
Run = TypeVar("Run", bound="RunConfig")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    name: Optimizer = "stable-adamw"  # torch-adamw: PyTorch's own fused one, for comparison
    lr: float = 3e-3  # the peak; the schedule moves it
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    independent_decay: bool = False  # decay by weight_decay * lr / peak, whatever the peak is
    bits: Literal[8, 32] = 8  # of the optimizer's state
    codebook: Literal["quadratic", "dynamic-symmetric", "dynamic", "linear"] = "quadratic"  # what 8 bits mean
    block: int = 256  # values that share a scale, in 8 bits
    beta2_power: float | None = None  # beta2 = 1 - step^-power instead of a constant (stable-adamw)
    clip_norm: float | None = 1.0  # of all gradients together

    def __post_init__(self) -> None:
        _check_choices(self)
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"optim.lr={self.lr} must be above zero; try optim.lr=0.001")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"optim.clip_norm={self.clip_norm} must be above zero; try 1.0, or None for no clipping")
        if self.beta2_power is not None and self.name != "stable-adamw":
            raise ConfigError(f"optim.beta2_power belongs to stable-adamw, got optim.name={self.name!r}")
        if self.name == "torch-adamw" and self.bits != 32:
            raise ConfigError("optim.name='torch-adamw' keeps 32-bit state; try optim.bits=32")
        if self.block < 1:
            raise ConfigError(f"optim.block={self.block} is too small; try optim.block=256")
        if self.name == "torch-adamw" and (self.codebook, self.block) != ("quadratic", 256):
            raise ConfigError("optim.codebook and optim.block are of 8-bit state, which torch-adamw does not have")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    lr: LearningRate
    seqlen: SeqLenWarmup  # off where start is end
    batch: BatchWarmup  # off where start is end
    force: bool = False  # allow sequence length and batch size to warm up together


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    corpus: str = "stdlib"  # or a file, a folder, a nanoGPT .bin, hf:NAME; for CLIP emoji, shapes or tar shards
    tokenizer: str = "bytes"  # or bpe:SIZE
    cache: str | None = None  # where token files are kept; None: the user's cache folder
    prefetch: int = 2  # batches prepared ahead

    def __post_init__(self) -> None:
        if self.prefetch < 1:
            raise ConfigError(f"data.prefetch={self.prefetch} is too small; try data.prefetch=1")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What looks at every step, and what it may do about an alarm (`trimtab.watch`)."""

    every: int = 4  # steps between two looks at the tensors; 0: nobody looks
    deep_every: int = 40  # steps between two looks at layers and totals, which cost more
    record_every: int = 20  # steps between two lines of signals.jsonl; looks with an alarm have one too
    ignore: int | None = None  # first steps without spikes and drift; None: 1000, or a twentieth of a shorter run
    skip: tuple[str, ...] = ()  # alarms at which a step is not taken: "non-finite", "rms spike"
    shorten: tuple[str, ...] = ()  # at which it is divided by RMS_t
    lower_beta2: tuple[str, ...] = ()  # at which beta2 is 0.9 for 100 steps
    roll_back: tuple[str, ...] = ()  # at which the run goes back to its last checkpoint and leaves the batches out

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("deep_every", 1), ("record_every", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"watch.{name}={getattr(self, name)} is too small; try watch.{name}={least}")
        try:
            self.actions(lambda alarm: None)
        except ValueError as error:
            raise ConfigError(f"watch.{error}") from None

    def actions(self, restore: Callable[[Alarm], None]) -> Actions:
        chosen = {name: getattr(self, name) for name in ("skip", "shorten", "lower_beta2", "roll_back")}
        return Actions(**chosen, restore=restore)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    optim: OptimConfig
    schedule: ScheduleConfig
    data: DataConfig = field(default_factory=DataConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    steps: int  # at most; a run ends at the first of steps and tokens
    tokens: int | None = None
    batch: int  # sequences or pairs per step, over all processes
    micro_batch: int | None = None  # per process and backward pass; None: the whole batch at once
    seed: int = 0
    eval_every: int = 100
    eval_batches: int = 8
    checkpoint_every: int = 500  # and at the end
    keep: int = 2  # checkpoints, besides the best
    log_every: int = 10  # lines on a screen that is not a terminal; the log file has every step
    tensorboard: bool = False  # also write the log for TensorBoard
    autocast: Literal["off", "bfloat16", "float16"] = "off"
    compile: bool = False  # torch.compile, once for each length
    parallel: Parallel = "ddp"  # where there is more than one process
    threads: int | None = None  # None: PyTorch's choice
    stop_after_skips: int = 10  # steps in a row whose loss is not finite
    diverged_at: float | None = 2.0  # stop when 3 evaluations or 100 steps in a row are above this times the first one

    def __post_init__(self) -> None:
        _check_choices(self)
        counts = ("steps", "batch", "eval_every", "eval_batches", "checkpoint_every", "keep", "log_every")
        for name in (*counts, "stop_after_skips"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is too small; try {name}=1")
        for name in ("tokens", "threads", "diverged_at"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above zero, or None")
        micro = self.micro_batch
        if micro is not None and (micro < 1 or self.batch % micro):
            raise ConfigError(
                f"micro_batch={micro} does not divide batch={self.batch}; try {math.gcd(micro, self.batch)}"
            )
        if self.autocast == "float16":
            raise ConfigError("autocast='float16' needs a loss scale, which the loop does not keep; try 'bfloat16'")
        warming = self.schedule.seqlen.start < self.schedule.seqlen.end
        if warming and self.schedule.batch.start < self.schedule.batch.end and not self.schedule.force:
            raise ConfigError(
                "schedule.seqlen and schedule.batch both warm up, and both cut the tokens of a step; switch one off, "
                "or say schedule.force=True"
            )
        if self.schedule.batch.end != self.batch:
            raise ConfigError(f"schedule.batch.end={self.schedule.batch.end} must be batch={self.batch}")


@dataclass(frozen=True, kw_only=True)
class GPTRun(RunConfig):
    """Train a GPT on text."""

    model: GPTConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.seqlen.end != self.model.context:
            raise ConfigError(
                f"schedule.seqlen.end={self.schedule.seqlen.end} must be model.context={self.model.context}"
            )


@dataclass(frozen=True, kw_only=True)
class CLIPRun(RunConfig):
    """Train a CLIP on pictures with captions."""

    model: CLIPConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.seqlen.start < self.schedule.seqlen.end:
            raise ConfigError("schedule.seqlen: captions end with the token that is read out, so they cannot be cut")
        if self.micro_batch is not None:
            raise ConfigError(
                f"micro_batch={self.micro_batch}: every caption is compared with all others of its batch, so a part "
                "of it has another loss; try micro_batch=None and more processes, or model.checkpointing=True"
            )


@dataclass(frozen=True, kw_only=True)
class ModuleConfig:
    """Somebody's own model and data: a function, and what it is called with. See module.py."""

    build: str  # "package.file:function"
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # its keywords; JSON values


@dataclass(frozen=True, kw_only=True)
class ModuleRun(RunConfig):
    """Train somebody's own model. Rows have schedule.seqlen.end tokens, as far as the clocks are concerned."""

    model: ModuleConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.batch.start < self.schedule.batch.end:
            raise ConfigError(f"schedule.batch: the batches of {self.model.build} are as large as it makes them")


KINDS: dict[str, type[RunConfig]] = {"gpt": GPTRun, "clip": CLIPRun, "module": ModuleRun}
# What may be different when a run goes on: nothing of this changes what it computes, but for the order of sums.
FREE: tuple[str, ...] = (
    "eval_every",
    "eval_batches",
    "checkpoint_every",
    "keep",
    "log_every",
    "tensorboard",
    "parallel",
    "threads",
)
FREE += ("stop_after_skips", "diverged_at", "data.cache", "data.prefetch")
FREE += ("watch.every", "watch.deep_every", "watch.record_every", "watch.ignore")


def kind_of(config: RunConfig) -> str:
    return next(name for name, cls in KINDS.items() if type(config) is cls)


def to_json(config: Any) -> dict[str, Any]:
    """Plain dictionaries, lists, numbers and strings."""
    result: dict[str, Any] = {"kind": kind_of(config)} if isinstance(config, RunConfig) else {}
    for item in fields(config):
        value = getattr(config, item.name)
        result[item.name] = (
            to_json(value) if is_dataclass(value) else list(value) if isinstance(value, tuple) else value
        )
    return result


def from_json(data: Mapping[str, Any]) -> RunConfig:
    if data.get("kind") not in KINDS:
        raise ConfigError(f"a config of kind {data.get('kind')!r} is not known; try one of {', '.join(KINDS)}")
    return _read(KINDS[data["kind"]], {key: value for key, value in data.items() if key != "kind"}, "")


def load_config(folder: Path) -> tuple[RunConfig, SavedConfig]:
    """The config of a run, and what was saved with it. Raises RunError if the run cannot be continued or loaded."""
    saved = RunFolder(folder).require_config()
    try:
        return from_json(saved.config), saved
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder} has a config that cannot be used: {error}") from None


def differences(old: RunConfig, new: RunConfig) -> list[tuple[str, Any, Any]]:
    """Fields that two configs do not share, by dotted name."""
    a, b = dict(_flatten(to_json(old))), dict(_flatten(to_json(new)))
    return [(key, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]


def with_model(config: Run, **changes: Any) -> Run:
    return replace(config, model=replace(config.model, **changes))  # type: ignore[attr-defined, call-arg]


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value)


def _check_choices(config: Any) -> None:
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ConfigError(f"{name}={value!r} is not known; try one of {', '.join(map(repr, get_args(hint)))}")


def _read(cls: Any, data: Mapping[str, Any], prefix: str) -> Any:
    known = {item.name for item in fields(cls)}
    unknown = data.keys() - known
    if unknown:
        raise ConfigError(f"{prefix}{sorted(unknown)[0]} is not a field of {cls.__name__}; it has {', '.join(known)}")
    hints, values = get_type_hints(cls), {}
    for key, value in data.items():
        hint = next((kind for kind in (hints[key], *get_args(hints[key])) if is_dataclass(kind)), None)
        if hint is not None and isinstance(value, Mapping):
            values[key] = _read(hint, value, f"{prefix}{key}.")
        else:
            values[key] = tuple(value) if isinstance(value, list) else value
    return cls(**values)
