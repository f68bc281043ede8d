"""Simulate the schedules of a config without a model: learning rate, length and batch size over steps and tokens."""

import warnings
from typing import Any, NamedTuple

from trimtab.schedule import Plan, draw, plan
from trimtab.train.config import RunConfig


class Drawing(NamedTuple):
    text: str
    svg: str


def simulate(config: RunConfig) -> Plan:
    return plan(
        rate=config.schedule.lr,
        peak=config.optim.lr,
        batch=config.batch_warmup,
        context=config.model.context,
        steps=config.steps,
        tokens=config.tokens,
        seqlen=config.seqlen_warmup,
        force=config.schedule.force,
    )


def draw_plan(config: RunConfig) -> Drawing:
    result = simulate(config)
    return Drawing("\n\n".join([draw(result, "table"), draw(result, "text")]), draw(result, "svg"))


def __getattr__(name: str) -> Any:
    if name == "foretell":
        warnings.warn("foretell is now called simulate", DeprecationWarning, stacklevel=2)
        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
