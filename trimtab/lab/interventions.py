"""Interventions: named switches, each a short function from a config to a config.

    apply(config, "qk-norm")           apply(config, "z-loss=1e-4")           apply(config, "8-bit=dynamic:256")

A switch says what it changes and changes nothing else, so that two arms of a study differ by their switches alone.
One that has no meaning for the subject is refused: an arm that is silently the other arm would be worse than none.
Switches are applied in the order given; shares of the run (warm-up) are shares of its steps at that moment.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from trimtab.lab.subjects import did_you_mean, with_steps, with_values
from trimtab.train.config import (
    ConfigError,
    GPTConfig,
    GPTRun,
    ModuleRun,
    OptimConfig,
    RunConfig,
    kind_of,
)

# Where decay that follows the learning rate and decay that does not are the same (specs of the paper: 0.1 and 1e-4).
SAME_DECAY_AT = 1e-3


@dataclass(frozen=True)
class Asked:
    """One switch as somebody wrote it."""

    config: RunConfig
    name: str
    value: str  # empty if none was given
    base_width: int | None

    def number(self, default: float | None = None, *, above: float | None = None, below: float = math.inf) -> float:
        """The value as a number above one bound and below another; without the first, at least 0."""
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
            raise ConfigError(f"{self.name}={value!r} is not known; try one of {', '.join(choices)}")
        return value

    def count(self) -> int:
        if not self.value.isdecimal() or not int(self.value):
            raise ConfigError(f"{self.name}={self.value!r} is not a whole number from 1; try {self.name}=1000")
        return int(self.value)

    def nothing(self) -> None:
        if self.value:
            raise ConfigError(f"{self.name} takes no value, got {self.value!r}; try {self.name}")

    def model(self, **changes: Any) -> RunConfig:
        """The model with fields changed, if it has them."""
        model: Any = self.config.model  # type: ignore[attr-defined]
        if isinstance(self.config, ModuleRun):
            raise ConfigError(
                f"{self.name} changes a model of ours, and {model.build} is yours; give your function an option for "
                "it, and sizes or studies that set it"
            )
        missing = [name for name in changes if not hasattr(model, name)]
        if missing:
            raise ConfigError(f"{self.name} does not apply to a {kind_of(self.config)}: its model has no {missing[0]}")
        return replace(self.config, model=replace(model, **changes))  # type: ignore[call-arg]

    def optim(self, **changes: Any) -> RunConfig:
        return replace(self.config, optim=replace(self.config.optim, **changes))

    def schedule(self, **changes: Any) -> RunConfig:
        return replace(self.config, schedule=replace(self.config.schedule, **changes))


Act = Callable[[Asked], RunConfig]
SWITCHES: dict[str, tuple[str, Act]] = {}


def apply(config: RunConfig, text: str, *, base_width: int | None = None) -> RunConfig:
    """The config with one switch turned. `base_width` is where muParam starts: the smallest width of the study."""
    name, equals, value = text.strip().partition("=")
    if name not in SWITCHES:
        raise ConfigError(f"there is no switch {name!r}{did_you_mean(name, SWITCHES)} There are {', '.join(SWITCHES)}")
    if equals and not value:
        raise ConfigError(f"{text!r} ends after the equals sign; try {name} alone, or a value")
    try:
        return SWITCHES[name][1](Asked(config, name, value, base_width))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{text}: {error}") from None


def list_switches() -> list[tuple[str, str]]:
    """Rows of (name, what it does)."""
    return [(name, text) for name, (text, _) in SWITCHES.items()]


def _switch(name: str, text: str) -> Callable[[Act], Act]:
    def register(act: Act) -> Act:
        SWITCHES[name] = text, act
        return act

    return register


# --- The model


@_switch("qk-norm", "normalise queries and keys: =shared (one gain for all heads), per-head or whole")
def _qk_norm(asked: Asked) -> RunConfig:
    return asked.model(qk_norm=asked.choice("shared", ("shared", "per-head", "whole")))


@_switch("z-loss", "keep the output logits from drifting: =1e-4, its weight")
def _z_loss(asked: Asked) -> RunConfig:
    return asked.model(z_loss=asked.number(1e-4, above=0))


@_switch("kappa", "=x: give queries and keys this size, whatever they have learned")
def _kappa(asked: Asked) -> RunConfig:
    return asked.model(kappa=asked.number(above=0))


@_switch("attention", "=squared-relu: attention without a softmax")
def _attention(asked: Asked) -> RunConfig:
    return asked.model(attention=asked.choice("squared-relu", ("softmax", "squared-relu")))


@_switch("layer-scale", "a learned gain on each branch: =0, its first value")
def _layer_scale(asked: Asked) -> RunConfig:
    return asked.model(layer_scale=asked.number(0.0))


@_switch("stable-embedding", "normalise what leaves the embedding, whose state keeps 32 bits")
def _stable_embedding(asked: Asked) -> RunConfig:
    asked.nothing()
    return asked.model(embedding="stable")


@_switch("mup", "muParam: =simple, intermediate or full; its base is the study's smallest width, or mup=simple:16")
def _mup(asked: Asked) -> RunConfig:
    kind, _, width = (asked.value or "simple").partition(":")
    if kind not in ("simple", "intermediate", "full"):
        raise ConfigError(f"mup={asked.value!r} is not known; try simple, intermediate or full, or simple:16")
    if width and not (width.isdecimal() and int(width)):
        raise ConfigError(f"mup={asked.value!r}: {width!r} is not a width; try mup={kind}:16")
    base = int(width) if width else asked.base_width
    if base is None:
        raise ConfigError(f"mup needs the width that it starts from; try mup={kind}:16")
    return asked.model(mup=kind, mup_base_width=base)


@_switch("linear", "=KIND: how linear layers multiply: switchback, llm-int8, fp8-tensorwise, ...")
def _linear(asked: Asked) -> RunConfig:
    return asked.model(linear=asked.choice("switchback", get_args(get_type_hints(GPTConfig)["linear"])))


def _linear_kind(kind: str, text: str) -> None:
    @_switch(kind, text)
    def act(asked: Asked) -> RunConfig:
        asked.nothing()
        return asked.model(linear=kind)


_linear_kind("switchback", "int8 linears whose weight gradient is not quantized")
_linear_kind("switchback-m", "the same, keeping int8 inputs for the backward pass")
_linear_kind("switchback-q", "the same, with a scale per row of the weight")
_linear_kind("llm-int8", "int8 linears, all three products")
_linear_kind("fp8-switchback", "float8 linears whose weight gradient is not quantized")
_linear_kind("fp8-tensorwise", "float8 linears with one scale per tensor: what diverges in large models")


# --- The optimizer


@_switch("independent-decay", "decay by weight_decay * lr / peak: =x, or the same as before at a peak of 1e-3")
def _independent_decay(asked: Asked) -> RunConfig:
    optim = asked.config.optim
    same = optim.weight_decay * (1 if optim.independent_decay else SAME_DECAY_AT)
    return asked.optim(independent_decay=True, weight_decay=asked.number(same))


@_switch("coupled-decay", "decay by weight_decay * lr, as PyTorch does: =x, or the same as before at a peak of 1e-3")
def _coupled_decay(asked: Asked) -> RunConfig:
    optim = asked.config.optim
    same = optim.weight_decay / (SAME_DECAY_AT if optim.independent_decay else 1)
    return asked.optim(independent_decay=False, weight_decay=asked.number(same))


@_switch("weight-decay", "=x, or =3x for three times what it is")
def _weight_decay(asked: Asked) -> RunConfig:
    if asked.value.endswith("x"):
        times = replace(asked, value=asked.value[:-1]).number()
        return asked.optim(weight_decay=times * asked.config.optim.weight_decay)
    return asked.optim(weight_decay=asked.number())


@_switch("eps", "=x: what Adam adds to the root of the second moment")
def _eps(asked: Asked) -> RunConfig:
    return asked.optim(eps=asked.number(above=0))


@_switch("beta2", "=x: how long the second moment remembers")
def _beta2(asked: Asked) -> RunConfig:
    return asked.optim(betas=(asked.config.optim.betas[0], asked.number(above=0, below=1)))


@_switch("stable-adamw", "shorten steps whose second moment is out of date")
def _stable_adamw(asked: Asked) -> RunConfig:
    asked.nothing()
    return asked.optim(name="stable-adamw")


@_switch("8-bit", "optimizer state in 8 bits: =codebook[:block], such as dynamic:256; tensors under 4096 keep 32")
def _eight_bit(asked: Asked) -> RunConfig:
    codebook, _, block = asked.value.partition(":")
    codebooks = get_args(get_type_hints(OptimConfig)["codebook"])
    if codebook and codebook not in codebooks:
        raise ConfigError(f"8-bit={asked.value!r}: no codebook {codebook!r}; try one of {', '.join(codebooks)}")
    size = replace(asked, name="8-bit=codebook:", value=block).count() if block else asked.config.optim.block
    return asked.optim(bits=8, codebook=codebook or asked.config.optim.codebook, block=size)


@_switch("clip", "=x: shorten gradients that are longer in all")
def _clip(asked: Asked) -> RunConfig:
    return asked.optim(clip_norm=asked.number(1.0, above=0))


@_switch("no-clip", "take gradients as long as they are")
def _no_clip(asked: Asked) -> RunConfig:
    asked.nothing()
    return asked.optim(clip_norm=None)


# --- The schedule


@_switch("warmup", "=0.25: share of the steps in which the learning rate rises")
def _warmup(asked: Asked) -> RunConfig:
    share = asked.number(0.25, below=1)
    steps = round(share * asked.config.steps)
    return asked.schedule(lr=replace(asked.config.schedule.lr, warmup=steps, warmup_unit="steps"))


@_switch("seqlen-warmup", "=0.3: share of the steps in which sequences grow from 8; as many tokens, in more steps")
def _seqlen_warmup(asked: Asked) -> RunConfig:
    config, seqlen = asked.config, asked.config.schedule.seqlen
    share = asked.number(0.3, above=0, below=1)
    if seqlen.end <= 8:
        raise ConfigError(f"seqlen-warmup grows from 8 tokens, and rows have {seqlen.end}; set schedule.seqlen.end")
    tokens = config.tokens or seqlen.count_tokens(config.batch, config.steps)
    warm = replace(seqlen, start=8, multiple=8, steps=max(round(share * config.steps), 1), kind="linear")
    # By steps the learning rate would fall too early, when few tokens have been seen.
    lr = replace(config.schedule.lr, decay=0, decay_unit="tokens")
    longer = replace(asked.schedule(seqlen=warm, lr=lr), tokens=tokens, steps=warm.count_steps(config.batch, tokens))
    return longer


@_switch("batch-warmup", "=0.3: share of the samples in which the batch grows from an eighth; as many samples")
def _batch_warmup(asked: Asked) -> RunConfig:
    config = asked.config
    share, total = asked.number(0.3, above=0, below=1), config.steps * config.batch
    start = config.batch // 8
    if not start or config.batch % 8:
        raise ConfigError(f"batch-warmup starts with an eighth, and batch={config.batch} has none; try batch=16")
    warm = replace(config.schedule.batch, start=start, increment=start, samples=max(round(share * total), 1))
    lr = replace(config.schedule.lr, decay=0, decay_unit="tokens")
    steps = samples = 0
    while samples < total:
        samples += warm.at(samples)
        steps += 1
    tokens = config.tokens or config.schedule.seqlen.count_tokens(config.batch, config.steps)
    return replace(asked.schedule(batch=warm, lr=lr), tokens=tokens, steps=steps)


@_switch("steps", "=N: a run of another length, with every clock and the decay scaled alike")
def _steps(asked: Asked) -> RunConfig:
    return with_steps(asked.config, asked.count())


@_switch("batch", "=N: another batch, on the same data in fewer or more steps")
def _batch(asked: Asked) -> RunConfig:
    config, batch = asked.config, asked.count()
    steps = max(round(config.steps * config.batch / batch), 1)
    evals = max(round(config.eval_batches * config.batch / batch), 1)
    return with_values(with_steps(config, steps), {"batch": batch, "eval_batches": evals})


@_switch("bfloat16", "multiply in 16 bits")
def _bfloat16(asked: Asked) -> RunConfig:
    asked.nothing()
    return replace(asked.config, autocast="bfloat16")


def steadied(base: RunConfig) -> tuple[str, ...]:
    """What the papers recommend and this subject does not have yet: qk-norm and z-loss, or for others what is left."""
    for recommended in (("qk-norm", "z-loss"), ("stable-adamw", "warmup=0.25")):
        helps = tuple(switch for switch in recommended if _changes(base, switch))
        if helps:
            return helps
    return ()


def _changes(base: RunConfig, switch: str) -> bool:
    if isinstance(base, GPTRun) and switch == "qk-norm" and base.model.qk_norm != "off":
        return False  # it has another kind of it
    try:
        return apply(base, switch) != base
    except ConfigError:
        return False
