"""Simulate the schedules and counters of a run, without a model.

    simulated = plan(rate=rate, peak=6e-4, batch=4096, context=1024, tokens=157_286_400_000, seqlen=warmup)
    print(draw(simulated))

Steps, samples and tokens advance at different speeds if the length or the batch is warmed up. The counters here advance
as those of the training loop do.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.schedule.batch_size import BatchWarmup, check_one_warmup
from trimtab.schedule.cut import kept
from trimtab.schedule.learning_rate import LearningRate
from trimtab.schedule.seqlen import Lengths


class Moment(NamedTuple):
    """One step: the counters before it, and its settings."""

    step: int  # the first is 1
    samples: int  # consumed before it
    tokens: int  # consumed before it
    length: int
    batch: int
    lr: float


@dataclass(frozen=True)
class Plan:
    moments: tuple[Moment, ...]  # evenly spaced, including the first and the last step
    steps: int
    samples: int
    tokens: int
    context: int
    warmup_tokens: int | None  # consumed when the learning-rate warm-up ended
    rate: LearningRate  # with `decay` filled in

    @property
    def cut_off(self) -> float:
        """The share of the tokens read that is not trained on."""
        return 1 - self.tokens / (self.samples * self.context)


def plan(
    *,
    rate: LearningRate,
    peak: float,
    batch: int | BatchWarmup,
    context: int,
    steps: int | None = None,
    tokens: int | None = None,
    seqlen: Lengths | None = None,
    force: bool = False,
    points: int = 1000,
) -> Plan:
    """Simulate a run that stops after `steps` steps or `tokens` tokens, whichever comes first.

    Args:
        context: tokens of a row before it is cut.
        force: allow sequence length warmup and batch-size warm-up together.
        points: largest number of moments to return.
    """
    if steps is None and tokens is None:
        raise ValueError("the run has no end; try steps=1000 or tokens=1_000_000")
    for name, value in (("steps", steps), ("tokens", tokens), ("context", context), ("points", points)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is too small; try {name}=1000")
    check_one_warmup(seqlen, batch, force=force)
    ((last, used),) = deque(_walk(batch, context, steps, tokens, seqlen), maxlen=1)
    ends = {"steps": last.step, "samples": last.samples + last.batch, "tokens": last.tokens + used}
    rate = rate.ending(steps=ends["steps"], tokens=ends["tokens"])
    every = -(-last.step // points)
    moments = []
    warm_tokens, warm_steps = (0, 0) if rate.warmed(0, 0) else (None, None)
    for now, used in _walk(batch, context, steps, tokens, seqlen):
        if (now.step - 1) % every == 0 or now.step == last.step:
            moments.append(now._replace(lr=rate.at(peak, now.step, now.tokens, warm_tokens, warm_steps)))
        if warm_tokens is None and rate.warmed(now.step, now.tokens + used):
            warm_tokens, warm_steps = now.tokens + used, now.step
    return Plan(moments=tuple(moments), context=context, warmup_tokens=warm_tokens, rate=rate, **ends)


def _walk(
    batch: int | BatchWarmup, context: int, steps: int | None, tokens: int | None, seqlen: Lengths | None
) -> Iterator[tuple[Moment, int]]:
    """Every step without its learning rate, and the tokens that it consumes."""
    step = samples = consumed = 0
    while (steps is None or step < steps) and (tokens is None or consumed < tokens):
        step += 1
        rows = batch.at(samples) if isinstance(batch, BatchWarmup) else batch
        length = used = context
        if seqlen is not None:
            length = min(seqlen.at(step), context)
            used = kept(context, length, seqlen.cut_mode)
        yield Moment(step, samples, consumed, length, rows, math.nan), rows * used
        samples += rows
        consumed += rows * used
