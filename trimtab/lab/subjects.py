"""The subject of a study: a recipe by name, or the user's own model and data as `package.file:function`.

open_subject("gpt-lab")                        a recipe
open_subject("my_project.small:build")         a function that returns a model and its data (train/module.py)
study_base("gpt-tiny", 400)                    the same in so many steps, observed as a study needs it
"""

import math
from dataclasses import replace

from trimtab.hints import did_you_mean
from trimtab.recipes import RECIPES
from trimtab.train.config import ConfigError, Run, RunConfig
from trimtab.train.module import module_run
from trimtab.train.plan import simulate

LOOKS = 50  # measurements of a run: three of them, or more, are in the 3 to 8 % that forecasts use
EVALUATIONS = 8  # of a run, at most; with a recipe's share of a long run a short one would be evaluated at every step
# The decay of gpt-lab. A grid goes to 33 times the peak, and where lr * weight_decay is above 1, weights change sign.
PEAK_DECAY = 0.025


def open_subject(text: str) -> RunConfig:
    """The config of a subject."""
    if ":" in text:
        return module_run(text)
    if text not in RECIPES:
        raise ConfigError(
            f"unknown recipe {text!r}.{did_you_mean(text, RECIPES)} `trimtab recipes` lists them; your own model is "
            "package.file:function"
        )
    return RECIPES[text]()


def study_base(subject: str, steps: int) -> RunConfig:
    """A subject in so many steps, with signals of its layers often enough for every part of the run that is analysed,
    and with a few evaluations. Both follow from the number of steps, whatever the recipe has."""
    config = open_subject(subject)
    config = with_steps(replace(config, steps=simulate(config).steps), steps)  # the run may end by tokens, before
    watch = replace(config.watch, every=max(steps // LOOKS, 1), deep_every=1, record_every=1)
    return replace(config, watch=watch, eval_every=max(config.eval_every, steps // EVALUATIONS))


def with_steps(config: Run, steps: int) -> Run:
    """The same run in more or fewer steps: every count of steps is scaled, and weight decay times steps stays constant.

    The paper's small runs do the same: a short run needs more decay per step. Decay that is multiplied by the learning
    rate is at most PEAK_DECAY per step at the peak, or what it was.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps} is too small; try steps=100")
    if steps == config.steps:
        return config
    share = steps / config.steps

    def part(x: int) -> int:
        return max(round(x * share), 1) if x else 0

    schedule = config.schedule
    until = tuple(part(x) for x in schedule.seqlen.until)
    seqlen = replace(schedule.seqlen, steps=until[-1] if until else part(schedule.seqlen.steps), until=until)
    lr = replace(schedule.lr, warmup=part(schedule.lr.warmup), decay=part(schedule.lr.decay))
    batch = replace(schedule.batch, samples=part(schedule.batch.samples))
    optim = config.optim
    most = math.inf if optim.independent_decay else max(PEAK_DECAY / optim.lr, optim.weight_decay)
    return replace(
        config,
        steps=steps,
        tokens=None if config.tokens is None else part(config.tokens),
        eval_every=part(config.eval_every),
        optim=replace(optim, weight_decay=min(optim.weight_decay / share, most)),
        schedule=replace(schedule, lr=lr, seqlen=seqlen, batch=batch),
        watch=replace(config.watch, every=part(config.watch.every)),
    )


def with_shape(config: Run, *, batch: int, context: int) -> Run:
    """The same run with a smaller batch or shorter rows, in as many steps. Lengths and counts of samples and tokens are
    scaled with them."""
    rows, length = batch / config.batch, context / config.model.context

    def part(x: int, share: float, multiple: int = 1) -> int:
        return max(round(x * share / multiple), 1) * multiple if x else 0

    schedule, tokens = config.schedule, rows * length
    seqlen, sizes, lr = schedule.seqlen, schedule.batch, schedule.lr
    start = None if seqlen.start is None else min(part(seqlen.start, length, seqlen.multiple), context)
    seqlen = replace(seqlen, start=start, lengths=tuple(part(x, length) for x in seqlen.lengths))
    first = None if sizes.start is None else part(sizes.start, rows)
    increment = math.gcd(part(sizes.increment, rows), batch - (first or batch))
    sizes = replace(sizes, start=first, increment=increment, samples=part(sizes.samples, rows))
    warmup = part(lr.warmup, tokens) if lr.warmup_unit == "tokens" else lr.warmup
    lr = replace(lr, warmup=warmup, decay=part(lr.decay, tokens) if lr.decay_unit == "tokens" else lr.decay)
    return replace(
        config,
        model=replace(config.model, context=context),
        schedule=replace(schedule, lr=lr, seqlen=seqlen, batch=sizes),
        tokens=None if config.tokens is None else part(config.tokens, tokens),
        batch=batch,
        micro_batch=None if config.micro_batch is None else math.gcd(config.micro_batch, batch),
    )
