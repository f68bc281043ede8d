"""Interventions: named switches, each a function from a config to a config.

    apply(config, "qk-norm")           apply(config, "z-loss=1e-4")           apply(config, "8-bit=dynamic:256")

A switch changes only what its description says, so two arms of a study differ only by their switches. A switch that
does not apply to the subject is refused: otherwise two arms could be equal without notice. Switches are applied in the
given order; a share of the run (warmup) is a share of its steps at that moment.

A new intervention is a new row of SWITCHES.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from trimtab.hints import did_you_mean
from trimtab.lab.subjects import with_steps
from trimtab.train.config import (
    ConfigError,
    GPTRun,
    ModuleRun,
    OptimConfig,
    RunConfig,
    SeqLenConfig,
    kind_of,
    with_model,
)

WHOLE = 2**30  # a block that no tensor of a study is longer than
PACINGS = get_args(get_type_hints(SeqLenConfig)["kind"])
LINEARS = get_args(get_type_hints(get_type_hints(GPTRun)["model"])["linear"])


@dataclass(frozen=True)
class Switch:
    """A switch as given, and the config that it changes."""

    config: RunConfig
    name: str
    value: str  # "" if none was given
    base_width: int | None

    def number(self, default: float | None = None, *, above: float | None = None, below: float = math.inf) -> float:
        """The value as a number between two bounds; without `above`, at least 0."""
        if not self.value and default is not None:
            return default
        try:
            x = float(self.value)
        except ValueError:
            x = math.nan
        if not (x >= 0 if above is None else x > above) or not x < below:
            least = "from 0" if above is None else f"above {above:g}"
            most = f" and below {below:g}" if below < math.inf else ""
            example = default if default else min(below, 1) / 2
            raise ConfigError(f"{self.name}={self.value!r} is not a number {least}{most}; try {self.name}={example:g}")
        return x

    def choice(self, default: str, choices: tuple[str, ...]) -> str:
        value = self.value or default
        if value not in choices:
            raise ConfigError(f"{self.name}={value!r} is unknown; try one of {', '.join(choices)}")
        return value

    def count(self) -> int:
        if not self.value.isdecimal() or not int(self.value):
            raise ConfigError(f"{self.name}={self.value!r} is not a whole number from 1; try {self.name}=1000")
        return int(self.value)

    def flag(self) -> "Switch":
        """The same switch, which takes no value."""
        if self.value:
            raise ConfigError(f"{self.name} takes no value, got {self.value!r}; try {self.name}")
        return self

    def model(self, **changes: Any) -> RunConfig:
        """Change fields of the model, if it has them."""
        model = self.config.model
        if isinstance(self.config, ModuleRun):
            raise ConfigError(
                f"{self.name} changes Trimtab's own models, but {self.config.model.build} is yours; give your function "
                "an option for it, and sizes or studies that set the option"
            )
        missing = [name for name in changes if not hasattr(model, name)]
        if missing:
            raise ConfigError(f"{self.name} does not apply to a {kind_of(self.config)}: its model has no {missing[0]}")
        return with_model(self.config, **changes)

    def optim(self, **changes: Any) -> RunConfig:
        return replace(self.config, optim=replace(self.config.optim, **changes))

    def schedule(self, **changes: Any) -> RunConfig:
        return replace(self.config, schedule=replace(self.config.schedule, **changes))


def apply(config: RunConfig, text: str, *, base_width: int | None = None) -> RunConfig:
    """The config with one switch applied. `base_width`, for muParam, is the smallest width of the study."""
    name, equals, value = text.strip().partition("=")
    if name not in SWITCHES:
        raise ConfigError(
            f"there is no switch {name!r}.{did_you_mean(name, SWITCHES)} The switches are {', '.join(SWITCHES)}"
        )
    if equals and not value:
        raise ConfigError(f"{text!r} has no value after the equals sign; try {name} alone, or a value")
    try:
        return SWITCHES[name][1](Switch(config, name, value, base_width))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{text}: {error}") from None


def list_switches() -> list[tuple[str, str]]:
    """Rows of (name, description)."""
    return [(name, text) for name, (text, _) in SWITCHES.items()]


# --- Switches that need more than one expression


def _mup(switch: Switch) -> RunConfig:
    kind, _, width = (switch.value or "simple").partition(":")
    if kind not in ("simple", "intermediate", "full"):
        raise ConfigError(f"mup={switch.value!r} is unknown; try simple, intermediate or full, or simple:16")
    if width and not (width.isdecimal() and int(width)):
        raise ConfigError(f"mup={switch.value!r}: {width!r} is not a width; try mup={kind}:16")
    base = int(width) if width else switch.base_width
    if base is None:
        raise ConfigError(f"mup needs a base width; try mup={kind}:16")
    return switch.model(mup=kind, mup_base_width=base)


def _decay(switch: Switch, *, independent: bool) -> RunConfig:
    """The other kind of decay; without a value both are equal at the learning rate of the recipe."""
    optim = switch.config.optim
    scale = optim.lr ** (independent - optim.independent_decay)
    return switch.optim(independent_decay=independent, weight_decay=switch.number(optim.weight_decay * scale))


def _weight_decay(switch: Switch) -> RunConfig:
    if switch.value.endswith("x"):
        times = replace(switch, value=switch.value[:-1]).number()
        return switch.optim(weight_decay=times * switch.config.optim.weight_decay)
    return switch.optim(weight_decay=switch.number())


def _eight_bit(switch: Switch) -> RunConfig:
    codebook, _, block = switch.value.partition(":")
    block = str(WHOLE) if block == "tensor" else block
    codebooks = get_args(get_type_hints(OptimConfig)["codebook"])
    if codebook and codebook not in codebooks:
        raise ConfigError(f"8-bit={switch.value!r}: no codebook {codebook!r}; try one of {', '.join(codebooks)}")
    size = replace(switch, name="8-bit=codebook:", value=block).count() if block else switch.config.optim.block
    return switch.optim(bits=8, codebook=codebook or switch.config.optim.codebook, block=size)


def _warmup(switch: Switch) -> RunConfig:
    steps = round(switch.number(0.25, below=1) * switch.config.steps)
    return switch.schedule(lr=replace(switch.config.schedule.lr, warmup=steps, warmup_unit="steps"))


def _seqlen_warmup(switch: Switch) -> RunConfig:
    config, context = switch.config, switch.config.model.context
    value, _, kind = switch.value.partition(":")
    kind = replace(switch, name="seqlen-warmup=0.3:", value=kind).choice("linear", PACINGS)
    share = replace(switch, value=value).number(0.3, above=0, below=1)
    if context <= 8:
        raise ConfigError(f"seqlen-warmup grows from 8 tokens, but rows have {context}; set model.context")
    steps = max(round(share * config.steps), 1)
    lengths: dict[str, Any] = {"start": 8, "multiple": 8, "steps": steps, "kind": kind}
    if kind == "discrete":  # each length twice the last, for as many steps
        doubled = tuple(8 * 2**i for i in range(context.bit_length()) if 8 * 2**i < context)
        until = tuple(max(steps * i // len(doubled), i) for i in range(1, len(doubled) + 1))
        lengths |= {"lengths": (*doubled, context), "until": until, "steps": until[-1]}
    return _with_lengths(config, **lengths)


def _length(switch: Switch) -> RunConfig:
    """The first of two stages, as long as the run. Evaluations, learning-rate warmup and decay follow the tokens."""
    config, length, context = switch.config, switch.count(), switch.config.model.context
    if length >= context:
        raise ConfigError(f"length={length} is not below the full length {context}; try length={max(context // 4, 1)}")
    steps = -(-_tokens_of(config) // (config.batch * length))
    after = _with_lengths(config, start=length, steps=steps, kind="two-stage")
    more = after.steps / config.steps
    lr = after.schedule.lr
    if lr.warmup_unit == "steps":
        lr = replace(lr, warmup=round(lr.warmup * more))
    optim = replace(after.optim, weight_decay=after.optim.weight_decay / more)
    schedule = replace(after.schedule, lr=lr)
    return replace(after, eval_every=max(round(config.eval_every * more), 1), schedule=schedule, optim=optim)


def _with_lengths(config: RunConfig, **lengths: Any) -> RunConfig:
    """With another schedule of lengths, for as many tokens."""
    tokens, schedule = _tokens_of(config), config.schedule
    seqlen = replace(schedule.seqlen, **{"lengths": (), "until": (), **lengths})
    schedule = replace(schedule, seqlen=seqlen, lr=_decay_by_tokens(config))
    longer = seqlen.ending_at(config.model.context).count_steps(config.batch, tokens)
    return replace(config, schedule=schedule, tokens=tokens, steps=longer)


def _tokens_of(config: RunConfig) -> int:
    return config.tokens or config.seqlen_warmup.count_tokens(config.batch, config.steps)


def _decay_by_steps(switch: Switch) -> RunConfig:
    """The decay ends where it would without a warmup of lengths or batch sizes."""
    config = switch.flag().config
    steps = -(-_tokens_of(config) // (config.batch * config.model.context))
    return switch.schedule(lr=replace(config.schedule.lr, decay=steps, decay_unit="steps"))


def _batch_warmup(switch: Switch) -> RunConfig:
    config = switch.config
    share, total = switch.number(0.3, above=0, below=1), config.steps * config.batch
    start = config.batch // 8
    if not start or config.batch % 8:
        raise ConfigError(
            f"batch-warmup starts with batch / 8, which batch={config.batch} does not allow; try batch=16"
        )
    warm = replace(config.schedule.batch, start=start, increment=start, samples=max(round(share * total), 1))
    sizes = warm.ending_at(config.batch)
    steps = samples = 0
    while samples < total:
        samples += sizes.at(samples)
        steps += 1
    tokens = _tokens_of(config)
    return replace(switch.schedule(batch=warm, lr=_decay_by_tokens(config)), tokens=tokens, steps=steps)


def _decay_by_tokens(config: RunConfig) -> Any:
    """The learning rate, decayed by tokens: by steps it would fall too early, after too few tokens."""
    return replace(config.schedule.lr, decay=0, decay_unit="tokens")


def _batch(switch: Switch) -> RunConfig:
    config, batch = switch.config, switch.count()
    steps = max(round(config.steps * config.batch / batch), 1)
    evals = max(round(config.eval_batches * config.batch / batch), 1)
    return replace(with_steps(config, steps), batch=batch, eval_batches=evals)


def _linear(kind: str) -> Callable[[Switch], RunConfig]:
    return lambda switch: switch.flag().model(linear=kind)


SWITCHES: dict[str, tuple[str, Callable[[Switch], RunConfig]]] = {
    # the model
    "qk-norm": (
        "normalise queries and keys: =shared (one gain for all heads), per-head or whole",
        lambda s: s.model(qk_norm=s.choice("shared", ("shared", "per-head", "whole"))),
    ),
    "z-loss": ("loss on output logits that drift: =1e-4", lambda s: s.model(z_loss=s.number(1e-4, above=0))),
    "kappa": ("=x: rescale queries and keys to this size", lambda s: s.model(kappa=s.number(above=0))),
    "no-layers": ("the embedding and the output alone", lambda s: s.flag().model(depth=0)),
    "attention": (
        "=squared-relu: attention without a softmax",
        lambda s: s.model(attention=s.choice("squared-relu", ("softmax", "squared-relu"))),
    ),
    "attention-scale": (
        "=linear: divide attention logits by the head width, not by its root",
        lambda s: s.model(attention_scale=s.choice("linear", ("sqrt", "linear"))),
    ),
    "layer-scale": ("a learned gain on each residual branch: =0", lambda s: s.model(layer_scale=s.number(0.0))),
    "stable-embedding": (
        "layer norm after the embedding, and Xavier initialisation; =norm or =xavier: one of them",
        lambda s: s.model(embedding=s.choice("stable", ("stable", "norm", "xavier"))),
    ),
    "mup": ("muParam: =simple, intermediate or full; base: the study's smallest width, or mup=simple:16", _mup),
    "linear": ("=KIND of linear layers: llm-int8, ...", lambda s: s.model(linear=s.choice("switchback", LINEARS))),
    "switchback": ("int8 linear layers whose weight gradient is not quantized", _linear("switchback")),
    "switchback-m": ("the same, with int8 inputs saved for the backward pass", _linear("switchback-m")),
    "switchback-q": ("the same, with a scale per row of the weight", _linear("switchback-q")),
    "llm-int8": ("int8 linear layers, all three products quantized", _linear("llm-int8")),
    "fp8-switchback": ("float8 linear layers whose weight gradient is not quantized", _linear("fp8-switchback")),
    "fp8-tensorwise": ("float8 linear layers, one scale per tensor; large models diverge", _linear("fp8-tensorwise")),
    # the optimizer; the default of both decays equals the current decay at the learning rate of the recipe
    "independent-decay": ("decay by weight_decay * lr / peak: =x", lambda s: _decay(s, independent=True)),
    "coupled-decay": ("decay by weight_decay * lr, as PyTorch: =x", lambda s: _decay(s, independent=False)),
    "weight-decay": ("=x, or =3x for three times the current one", _weight_decay),
    "eps": ("=x: Adam's eps, added to the root of the second moment", lambda s: s.optim(eps=s.number(above=0))),
    "beta1": (
        "=x: decay rate of the first moment",
        lambda s: s.optim(betas=(s.number(above=0, below=1), s.config.optim.betas[1])),
    ),
    "beta2": (
        "=x: decay rate of the second moment",
        lambda s: s.optim(betas=(s.config.optim.betas[0], s.number(above=0, below=1))),
    ),
    "beta2-power": (
        "=x: StableAdamW with beta2 = 1 - step^-x in place of a constant",
        lambda s: s.optim(name="stable-adamw", beta2_power=s.number(above=0)),
    ),
    "rms-scaled": ("AdamW, the step of each tensor relative to its weights", lambda s: s.flag().optim(rms_scaled=True)),
    "stable-adamw": ("smaller steps if the second moment is stale", lambda s: s.flag().optim(name="stable-adamw")),
    "adagrad": ("AdaGrad, whose second moment is a sum", lambda s: s.flag().optim(name="adagrad")),
    "adafactor": (
        "Adafactor with momentum, a second moment of rows and columns",
        lambda s: s.flag().optim(name="adafactor", bits=32, embedding_bits=32),
    ),
    "8-bit": ("8-bit optimizer state: =codebook[:block], such as dynamic:256 or dynamic:tensor", _eight_bit),
    "8-bit-embedding": (
        "8-bit optimizer state, of embeddings too",
        lambda s: s.flag().optim(bits=8, embedding_bits=8),
    ),
    "clip": ("=x: clip the norm of all gradients", lambda s: s.optim(clip_norm=s.number(1.0, above=0))),
    "no-clip": ("no gradient clipping", lambda s: s.flag().optim(clip_norm=None)),
    # the schedule
    "warmup": ("=0.25: share of the steps in which the learning rate rises", _warmup),
    "seqlen-warmup": (
        "=0.3: share of the steps in which sequences grow from 8 tokens; =0.3:KIND such as root; same tokens",
        _seqlen_warmup,
    ),
    "length": ("=N: rows of this length in the whole training; same tokens, evaluated at full length", _length),
    "batch-warmup": ("=0.3: share of the samples in which the batch grows from batch / 8", _batch_warmup),
    "decay-by-steps": ("decay by steps after seqlen-warmup or batch-warmup, which decay by tokens", _decay_by_steps),
    "steps": ("=N: another number of steps; schedules and decay are scaled", lambda s: with_steps(s.config, s.count())),
    "batch": ("=N: another batch size on the same data, in fewer or more steps", _batch),
    "bfloat16": ("multiply in 16 bits (autocast)", lambda s: replace(s.flag().config, autocast="bfloat16")),
}


def steadied(base: RunConfig) -> tuple[str, ...]:
    """The interventions that the papers recommend and the subject lacks: qk-norm and z-loss, otherwise the optimizer's
    and the schedule's."""
    for recommended in (("qk-norm", "z-loss"), ("stable-adamw", "warmup=0.25")):
        lacking = tuple(switch for switch in recommended if _changes(base, switch))
        if lacking:
            return lacking
    return ()


def _changes(base: RunConfig, switch: str) -> bool:
    if isinstance(base, GPTRun) and switch == "qk-norm" and base.model.qk_norm != "off":
        return False  # it has another kind of qk-norm
    try:
        return apply(base, switch) != base
    except ConfigError:
        return False
