"""What a config will do, before it does it: learning rate, length and batch over steps and tokens."""

from typing import NamedTuple

from trimtab.schedule import Plan, draw, plan
from trimtab.train.config import RunConfig


class Picture(NamedTuple):
    text: str
    svg: str


def foretell(config: RunConfig) -> Plan:
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


def draw_plan(config: RunConfig) -> Picture:
    future = foretell(config)
    return Picture("\n\n".join([draw(future, "table"), draw(future, "text")]), draw(future, "svg"))
