"""The subject of a study: a recipe by name, or the user's own model and data as `package.file:function`.

open_subject("gpt-lab")                        a recipe
open_subject("my_project.small:build")         a function that returns a model and its data (train/module.py)
"""

from dataclasses import replace

from trimtab.hints import did_you_mean
from trimtab.recipes import RECIPES
from trimtab.train.config import ConfigError, Run, RunConfig
from trimtab.train.module import module_run


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


def with_steps(config: Run, steps: int) -> Run:
    """The same run in more or fewer steps: every count of steps is scaled, and weight decay times steps stays constant.

    The paper's small runs do the same: a short run needs more decay per step.
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
    return replace(
        config,
        steps=steps,
        tokens=None if config.tokens is None else part(config.tokens),
        eval_every=part(config.eval_every),
        optim=replace(config.optim, weight_decay=config.optim.weight_decay / share),
        schedule=replace(schedule, lr=lr, seqlen=seqlen, batch=batch),
        watch=replace(config.watch, every=part(config.watch.every)),
    )
