"""What a config will do, before it does it: learning rate, length and batch over steps and tokens."""

from typing import NamedTuple

from trimtab.schedule import Plan, draw, plan
from trimtab.train.config import RunConfig


class Picture(NamedTuple):
    text: str
    svg: str


def foretell(config: RunConfig) -> Plan:
    schedule = config.schedule
    return plan(
        rate=schedule.lr,
        peak=config.optim.lr,
        batch=schedule.batch if schedule.batch.start < schedule.batch.end else config.batch,
        context=schedule.seqlen.end,
        steps=config.steps,
        tokens=config.tokens,
        seqlen=schedule.seqlen if schedule.seqlen.start < schedule.seqlen.end else None,
        force=schedule.force,
    )


def draw_plan(config: RunConfig) -> Picture:
    future = foretell(config)
    return Picture("\n\n".join([draw(future, "table"), draw(future, "text")]), draw(future, "svg"))
