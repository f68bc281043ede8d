"""The config of a run: a frozen dataclass that is checked when it is built and saved with the run.

There is one class per kind of model: `GPTRun`, `CLIPRun`, and `ModuleRun` for a user-defined model. A recipe
(trimtab/recipes.py) is a function that returns a config.

    config = with_values(gpt_tiny(), {"optim.lr": 0.01, "model.context": 64})      # dotted names, checked
    from_json(to_json(config)) == config
"""

import functools
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from trimtab.hints import did_you_mean
from trimtab.nn import CLIPConfig, GPTConfig
from trimtab.nn import ConfigError as ConfigError
from trimtab.nn.config import check_not_huge
from trimtab.runs import RunError, RunFolder, SavedConfig
from trimtab.runs.records import flatten as flatten
from trimtab.schedule import BatchWarmup, LearningRate, SeqLenWarmup
from trimtab.schedule.cut import Mode
from trimtab.schedule.seqlen import Arithmetic, Kind
from trimtab.screen import printable
from trimtab.watch import Actions, Alarm

Optimizer = Literal[
    "adamw", "stable-adamw", "adam", "lion", "lamb", "ademamix", "sgd", "adagrad", "adafactor", "torch-adamw"
]
Parallel = Literal["ddp", "fsdp2"]
Run = TypeVar("Run", bound="RunConfig")
# Of learning rate, weight decay and eps. Published ones are below 100 (LARS has the largest learning rates, about 30);
# SGD with very small gradients can need thousands.
MAX_RATE = 1e4
MAX_THREADS = 4096  # more than the cores of any machine; a thread has a stack, so a million do not fit
MAX_PREFETCH = 1000  # every batch that is prepared is kept in memory


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    name: Optimizer = "stable-adamw"  # torch-adamw: PyTorch's own fused one, for comparison
    lr: float = 3e-3  # the peak of the schedule
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    independent_decay: bool = False  # decay by weight_decay * lr / peak, independent of the peak
    bits: Literal[8, 32] = 8  # of the optimizer's state
    codebook: Literal[  # of 8-bit state
        "quadratic", "dynamic-symmetric", "dynamic", "linear", "dynamic-flush", "linear-flush"
    ] = "quadratic"
    block: int = 256  # values that share a scale, in 8-bit state
    embedding_bits: Literal[8, 32] = 32  # of the state of embeddings
    rms_scaled: bool = False  # multiply the step of each tensor by the size of its weights (adamw)
    beta2_power: float | None = None  # beta2 = 1 - step^-power instead of a constant (stable-adamw)
    clip_norm: float | None = 1.0  # of all gradients together
    release: bool = False  # update parameters during the backward pass, and free each gradient at once

    def __post_init__(self) -> None:
        _check_fields(self, "optim.")
        for name, better in (("lr", 1e-3), ("eps", 1e-8)):
            if not 0 < getattr(self, name) <= MAX_RATE:
                got = f"optim.{name}={getattr(self, name)}"
                raise ConfigError(f"{got} must be above zero and at most {MAX_RATE:g}; try optim.{name}={better}")
        if not 0 <= self.weight_decay <= MAX_RATE:
            raise ConfigError(f"optim.weight_decay={self.weight_decay} must be from 0 to {MAX_RATE:g}; try 0.1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas={self.betas} are not in [0, 1); try optim.betas=(0.9, 0.95)")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            what = "finite" if self.clip_norm == math.inf else "above zero"
            raise ConfigError(f"optim.clip_norm={self.clip_norm} must be {what}; try 1.0, or None for no clipping")
        if self.beta2_power is not None and not 0 < self.beta2_power < math.inf:
            raise ConfigError(f"optim.beta2_power={self.beta2_power} must be above zero; try optim.beta2_power=0.8")
        if self.beta2_power is not None and self.name != "stable-adamw":
            raise ConfigError(f"optim.beta2_power belongs to stable-adamw, got optim.name={self.name!r}")
        if self.rms_scaled and self.name != "adamw":
            raise ConfigError(f"optim.rms_scaled belongs to adamw, got optim.name={self.name!r}")
        if self.name == "torch-adamw" and self.bits != 32:
            raise ConfigError("optim.name='torch-adamw' keeps 32-bit state; try optim.bits=32")
        if self.name == "adafactor" and self.bits != 32:
            raise ConfigError("optim.name='adafactor' keeps 32-bit state; try optim.bits=32")
        if self.embedding_bits < self.bits:
            raise ConfigError("optim.embedding_bits=8 is for 8-bit state; try optim.bits=8")
        if self.release and self.name in ("torch-adamw", "adafactor"):
            raise ConfigError(f"{self.name} has no optim.release; try optim.name='adamw'")
        if self.release and self.clip_norm is not None:
            raise ConfigError(
                f"optim.clip_norm={self.clip_norm} needs all gradients at once, and optim.release frees each of them "
                "during the backward pass; try optim.clip_norm=None with optim.name='stable-adamw'"
            )
        if self.block < 1:
            raise ConfigError(f"optim.block={self.block} is too small; try optim.block=256")
        if self.name == "torch-adamw" and (self.codebook, self.block) != ("quadratic", 256):
            raise ConfigError("optim.codebook and optim.block are for 8-bit state, which torch-adamw does not have")


@dataclass(frozen=True, kw_only=True)
class SeqLenConfig:
    """Sequence length warmup, as in `trimtab.schedule.SeqLenWarmup`. Its last length is `model.context`."""

    start: int | None = None  # the first length; None: no warmup
    steps: int = 1  # duration of the warmup
    multiple: int = 8  # lengths are rounded down to it
    kind: Kind = "linear"
    degree: float = 2.0  # of kind root
    lengths: tuple[int, ...] = ()  # the only lengths used; replaces `multiple`
    until: tuple[int, ...] = ()  # of kind discrete: the last step of each length but the last
    seed: int = 0  # of kind mixed
    cut_mode: Mode = "truncate"  # reshape: the tokens that are cut off become more rows
    arithmetic: Arithmetic = "exact"  # deepspeed: the rounding errors of DeepSpeed, of kinds linear and root

    def ending_at(self, end: int) -> SeqLenWarmup:
        first = self.lengths[0] if self.lengths else end
        return SeqLenWarmup(**(vars(self) | {"start": first if self.start is None else self.start, "end": end}))


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch-size warmup, as in `trimtab.schedule.BatchWarmup`. Its last size is the run's `batch`."""

    start: int | None = None  # the first batch size; None: no warmup
    increment: int = 1
    samples: int = 1  # duration of the warmup

    def ending_at(self, end: int) -> BatchWarmup:
        start = end if self.start is None else self.start
        return BatchWarmup(start=start, increment=self.increment, samples=self.samples, end=end)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    lr: LearningRate
    seqlen: SeqLenConfig = field(default_factory=SeqLenConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    force: bool = False  # allow sequence length and batch size to warm up together


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    corpus: str = "stdlib"  # or a file, a folder, a nanoGPT .bin, hf:NAME; for CLIP emoji, shapes or tar shards
    tokenizer: str = "bytes"  # or bpe:SIZE
    cache: str | None = None  # folder of token files; None: the user's cache folder
    prefetch: int = 2  # batches prepared ahead

    def __post_init__(self) -> None:
        if not 1 <= self.prefetch <= MAX_PREFETCH:
            size, better = ("small", 1) if self.prefetch < 1 else ("large", MAX_PREFETCH)
            raise ConfigError(f"data.prefetch={self.prefetch} is too {size}; try data.prefetch={better}")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Signals, alarms, and the actions on alarms (`trimtab.watch`)."""

    every: int = 4  # steps between two measurements of the tensors; 0: no watcher
    deep_every: int = 40  # of layers and totals, which cost more
    record_every: int = 20  # steps between two records on disk; steps with an alarm are always recorded
    ignore: int | None = None  # first steps without spike and drift alarms; None: 1000, or steps / 20 if that is less
    skip: tuple[str, ...] = ()  # alarms at which the step is skipped: "non-finite", "rms spike"
    shorten: tuple[str, ...] = ()  # at which the step is divided by RMS_t
    lower_beta2: tuple[str, ...] = ()  # at which beta2 is 0.9 for 100 steps
    roll_back: tuple[str, ...] = ()  # at which the run loads its last checkpoint and skips the batches

    def __post_init__(self) -> None:
        _check_fields(self, "watch.")
        for name, least in (("every", 0), ("deep_every", 1), ("record_every", 1), ("ignore", 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ConfigError(f"watch.{name}={getattr(self, name)} is too small; try watch.{name}={least}")
        try:
            self.actions(lambda alarm: None)
        except ValueError as error:
            raise ConfigError(f"watch.{error}") from None

    def actions(self, restore: Callable[[Alarm], None]) -> Actions:
        chosen = {name: getattr(self, name) for name in ("skip", "shorten", "lower_beta2", "roll_back")}
        return Actions(**chosen, restore=restore)


@dataclass(frozen=True, kw_only=True)
class ModuleConfig:
    """A user-defined model and data: a function and its arguments. See module.py."""

    build: str  # "package.file:function"
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # keyword arguments; JSON values
    context: int = 1  # tokens of a row, for the token clock and for sequence length warmup


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    model: GPTConfig | CLIPConfig | ModuleConfig
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
    log_every: int = 10  # steps between lines if the output is not a terminal; the log has every step
    tensorboard: bool = False  # also log to TensorBoard,
    wandb: bool = False  # to Weights & Biases,
    mlflow: bool = False  # or to MLflow
    autocast: Literal["off", "bfloat16"] = "off"
    compile: bool = False  # torch.compile, once per length
    parallel: Parallel = "ddp"  # with more than one process
    threads: int | None = None  # None: PyTorch's choice
    stop_after_skips: int = 10  # steps in a row without a finite loss
    diverged_at: float | None = 2.0  # stop after 3 evaluations or 100 steps above this times the first loss

    def __post_init__(self) -> None:
        _check_fields(self)
        counts = ("steps", "batch", "eval_every", "eval_batches", "checkpoint_every", "keep", "log_every")
        for name in (*counts, "stop_after_skips"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is too small; try {name}=1")
        for name in ("tokens", "threads", "diverged_at"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above zero, or None")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative; try seed={-self.seed}")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ConfigError(f"threads={self.threads} is more than any machine has; try threads=None")
        micro = self.micro_batch
        if micro is not None and (micro < 1 or self.batch % micro):
            raise ConfigError(
                f"micro_batch={micro} does not divide batch={self.batch}; try {math.gcd(micro, self.batch)}"
            )
        if self.optim.release and micro is not None:
            raise ConfigError(f"optim.release updates in every backward pass; try micro_batch=None, got {micro}")
        if self.optim.release and self.watch.every:
            raise ConfigError(
                "optim.release frees the gradients that the watcher measures; try watch.every=0, or optim.release=False"
            )
        for name in ("seqlen", "batch"):
            try:
                getattr(self, f"{name}_warmup")
            except ValueError as error:
                end = f" (end is {_FOLLOWS[f'schedule.{name}.end']})" if "end=" in str(error) else ""
                raise ConfigError(f"schedule.{name}: {error}{end}") from None
        seqlen, batch = self.seqlen_warmup, self.batch_warmup
        if seqlen.start < seqlen.end and batch.start < batch.end and not self.schedule.force:
            raise ConfigError(
                "schedule.seqlen and schedule.batch both warm up, and both reduce the tokens of a step; switch one "
                "off, or set schedule.force=True"
            )

    @property
    def seqlen_warmup(self) -> SeqLenWarmup:
        """The lengths of the run; constant if there is no warmup."""
        return self.schedule.seqlen.ending_at(self.model.context)

    @property
    def batch_warmup(self) -> BatchWarmup:
        """The batch sizes of the run; constant if there is no warmup."""
        return self.schedule.batch.ending_at(self.batch)


@dataclass(frozen=True, kw_only=True)
class GPTRun(RunConfig):
    """Train a GPT on text."""

    model: GPTConfig


@dataclass(frozen=True, kw_only=True)
class CLIPRun(RunConfig):
    """Train a CLIP on image-caption pairs."""

    model: CLIPConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seqlen_warmup.start < self.model.context:
            raise ConfigError("schedule.seqlen: captions cannot be cut, because their last token is their output")
        if self.micro_batch is not None:
            raise ConfigError(
                f"micro_batch={self.micro_batch}: the loss compares each caption with all others of its batch, so it "
                "cannot be split; try micro_batch=None and more processes, or model.checkpointing=True"
            )


@dataclass(frozen=True, kw_only=True)
class ModuleRun(RunConfig):
    """Train a user-defined model."""

    model: ModuleConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_warmup.start < self.batch:
            raise ConfigError(f"schedule.batch: the batches of {self.model.build} are as large as it makes them")


KINDS: dict[str, type[RunConfig]] = {"gpt": GPTRun, "clip": CLIPRun, "module": ModuleRun}
# Fields that may change when a run is resumed: they do not change what is computed, except for the order of sums.
FREE: tuple[str, ...] = (
    *("eval_every", "eval_batches", "checkpoint_every", "keep", "log_every", "parallel", "threads"),
    *("tensorboard", "wandb", "mlflow"),
    *("stop_after_skips", "diverged_at", "data.cache", "data.prefetch"),
    "data.corpus",  # it may have moved; its sha256 must be the same
    *("watch.every", "watch.deep_every", "watch.record_every", "watch.ignore"),
)


def kind_of(config: RunConfig) -> str:
    return next(name for name, cls in KINDS.items() if type(config) is cls)


def to_json(config: RunConfig) -> dict[str, Any]:
    """Dictionaries, lists, numbers and strings."""
    # asdict, not msgspec.to_builtins, which leaves out fields that an older file did not have. JSON: lists, not tuples.
    values: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return {"kind": kind_of(config), **values}


def from_json(data: Mapping[str, Any]) -> RunConfig:
    if data.get("kind") not in KINDS:
        raise ConfigError(f"a config of kind {data.get('kind')!r} is not known; try one of {', '.join(KINDS)}")
    cls, values = KINDS[data["kind"]], {key: value for key, value in data.items() if key != "kind"}
    for name in flatten(values):
        _find_type(cls, name)
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        # The message of a check in __post_init__ is complete; msgspec's own names the place.
        raise ConfigError(str(error.__cause__ or error).replace("`$.", "`")) from None


def upgrade(data: Mapping[str, Any]) -> dict[str, Any]:
    """A config as format 1 saved it, in format 2: the ends of the schedules follow from `model.context` and `batch`."""
    schedule, model = dict(data["schedule"]), dict(data["model"])
    for name in ("seqlen", "batch"):
        part = schedule[name] = dict(schedule[name])
        end = part.pop("end", None)
        if name == "seqlen" and end is not None and model.setdefault("context", end) != end:
            raise ConfigError(f"schedule.seqlen.end={end} is not model.context={model['context']}")
        if part["start"] == end:
            part["start"] = None
    return {**data, "schedule": schedule, "model": model}


def load_config(folder: Path, *, trust: str | None = None) -> tuple[RunConfig, SavedConfig]:
    """The config of a run, and what was saved with it. Raises RunError if the run cannot be continued or loaded.

    A config may name a function that builds the model. Nothing runs it here, but the caller will, so it must be the
    one that the user trusts.
    """
    saved = RunFolder(folder).require_config()
    try:
        config = from_json(upgrade(saved.config) if saved.format < 2 else saved.config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder} has a config that cannot be used: {printable(str(error))}") from None
    if isinstance(config, ModuleRun) and config.model.build != trust:
        named = printable(config.model.build)
        raise RunError(
            f"{folder} was trained with the code {named}, which runs on this machine if the run is loaded; if you "
            f"trust it, add --trust {named} (in Python trust={named!r})"
        )
    return config, saved


def differences(old: RunConfig, new: RunConfig) -> list[tuple[str, Any, Any]]:
    """Fields that differ between two configs: dotted name, and both values as JSON."""
    a, b = ({key: json.dumps(x) for key, x in flatten(to_json(config)).items()} for config in (old, new))
    return [(key, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]


def with_model(config: Run, **changes: Any) -> Run:
    return replace(config, model=replace(config.model, **changes))


def with_values(config: Run, values: Mapping[str, Any]) -> Run:
    """Change fields by dotted names. A value has the type of its field, or is text as on a command line."""
    data = to_json(config)
    for name, value in flatten(values).items():
        kind = _find_type(type(config), name.replace("-", "_"))
        *groups, last = name.replace("-", "_").split(".")
        place = data
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{name}: {group} has no fields")
        place[last] = _convert(value, kind, name)
    return cast(Run, from_json(data))


_FOLLOWS = {"schedule.seqlen.end": "model.context", "schedule.batch.end": "batch"}


@functools.cache
def _fields(cls: Any, prefix: str = "") -> dict[str, Any]:
    """The types of all fields by dotted name."""
    found: dict[str, Any] = {}
    hints: dict[str, Any] = get_type_hints(cls)
    for name, kind in hints.items():
        nested = isinstance(kind, type) and is_dataclass(kind)
        found |= _fields(kind, f"{prefix}{name}.") if nested else {prefix + name: kind}
    return found


def _find_type(cls: Any, name: str) -> Any:
    """The type of the field with this dotted name; Any for an option of a user-defined model."""
    known = _fields(cls)
    if name in known:
        return known[name]
    if name in _FOLLOWS:
        raise ConfigError(f"{name} is not a field: it is always {_FOLLOWS[name]}. Set {_FOLLOWS[name]} instead")
    for field_name, kind in known.items():
        if name.startswith(f"{field_name}."):
            if get_origin(kind) is dict:
                return Any
            raise ConfigError(f"{name}: {field_name} has no fields")
    group = name
    while group and not any(other.startswith(f"{group}.") for other in known):
        group = group.rpartition(".")[0]
    inside = dict.fromkeys(n.removeprefix(f"{group}.").split(".")[0] for n in known if not group or n.startswith(group))
    has = f"{group or cls.__name__} has {', '.join(inside)}"
    if group == name:
        raise ConfigError(f"{name} is a group of fields; set one of them: {has}")
    raise ConfigError(f"{name} is not a field of {cls.__name__}.{did_you_mean(name, known)} {has}")


def _convert(value: Any, kind: Any, name: str) -> Any:
    """Check a value, or parse it if it is text."""
    if kind is Any:
        return value
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if type(None) in kinds and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    kind = next(one for one in kinds if one is not type(None))
    if get_origin(kind) is tuple and isinstance(value, str):
        value = re.findall(r"[^\s,]+", value)
    text = isinstance(value, str) or (isinstance(value, list | tuple) and any(isinstance(x, str) for x in value))
    try:
        found = msgspec.convert(value, kind, strict=not text)
    except msgspec.ValidationError:
        found = math.nan
    for x in found if isinstance(found, tuple) else (found,):
        if isinstance(x, float) and not math.isfinite(x):
            raise ConfigError(f"{name}={value!r} {_requirement(kind)}")
    return found


def _requirement(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"is not known; try one of {', '.join(map(repr, get_args(kind)))}"
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    if get_origin(kind) is not tuple:
        return f"is not {words[kind]}"
    first, *others = get_args(kind)
    count = "" if others == [Ellipsis] else f"{1 + len(others)} "
    return f"needs a list of {count}values, each {words[first]}"


def _check_fields(config: Any, group: str = "") -> None:
    """Check choices, and that whole numbers are not too large for a machine."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, hint = getattr(config, item.name), hints[item.name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ConfigError(f"{item.name}={value!r} {_requirement(hint)}")
        check_not_huge(item, value, group)
