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
from trimtab.schedule.checks import LARGEST, check_not_huge
from trimtab.schedule.cut import kept
from trimtab.schedule.learning_rate import LearningRate, Unit
from trimtab.schedule.seqlen import Lengths

MAX_CHANGES = 10**6  # of length and batch size; a simulation of more would take minutes


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
    if isinstance(batch, int):
        batch = BatchWarmup(start=batch, increment=1, samples=1, end=batch)
    for name, value in (("steps", steps), ("tokens", tokens), ("context", context), ("points", points)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is too small; try {name}=1000")
        check_not_huge(name, value or 1, 1000)
    check_one_warmup(seqlen, batch, force=force)
    (last,) = deque(_walk(batch, context, steps, tokens, seqlen), maxlen=1)
    end = last.after(last.steps)
    total = end.step - 1
    if end.tokens > LARGEST:
        raise ValueError(f"{total} steps consume {end.tokens} tokens, more than any run can count; try tokens={10**12}")
    rate = rate.ending(steps=total, tokens=end.tokens)
    every = -(-total // points)
    moments = []
    warm_tokens, warm_steps = (0, 0) if rate.warmed(0, 0) else (None, None)
    for part in _walk(batch, context, steps, tokens, seqlen):
        until = part.after(part.steps)
        if warm_tokens is None and rate.warmed(until.step - 1, until.tokens):
            warm = part.after(part.steps_to(rate.warmup, rate.warmup_unit))
            warm_tokens, warm_steps = warm.tokens, warm.step - 1
        shown = [*range((1 - part.first.step) % every, part.steps, every)]
        if until.step > total and (total - 1) % every:
            shown.append(part.steps - 1)
        for now in map(part.after, shown):
            moments.append(now._replace(lr=rate.at(peak, now.step, now.tokens, warm_tokens, warm_steps)))
    ends = {"steps": total, "samples": end.samples, "tokens": end.tokens}
    return Plan(moments=tuple(moments), context=context, warmup_tokens=warm_tokens, rate=rate, **ends)


class _Part(NamedTuple):
    """Steps in a row with the same length and batch size."""

    first: Moment  # without its learning rate
    steps: int
    used: int  # tokens that each step consumes

    def after(self, steps: int) -> Moment:
        """The step that follows so many of these steps."""
        step, samples, tokens, length, batch, lr = self.first
        return Moment(step + steps, samples + steps * batch, tokens + steps * self.used, length, batch, lr)

    def steps_to(self, end: int, unit: Unit) -> int:
        """How many of these steps reach this total of steps or tokens."""
        return end - (self.first.step - 1) if unit == "steps" else -((self.first.tokens - end) // self.used)


def _walk(
    batch: BatchWarmup, context: int, steps: int | None, tokens: int | None, seqlen: Lengths | None
) -> Iterator[_Part]:
    """The whole run. Its cost depends on the number of changes, not of steps."""
    now, changes = Moment(1, 0, 0, 0, 0, math.nan), 0
    while (steps is None or now.step <= steps) and (tokens is None or now.tokens < tokens):
        ends = [steps]  # the last step before each change, if there is one
        length = used = context
        if seqlen is not None:
            length = min(seqlen.at(now.step), context)
            used = kept(context, length, seqlen.cut_mode)
            ends.append(seqlen.alike_until(now.step))
        rows = batch.at(now.samples)
        changes += (length, rows) != (now.length, now.batch)
        if changes > MAX_CHANGES:
            raise ValueError(
                f"length or batch size change more than {MAX_CHANGES:,} times; try a larger multiple of the lengths, "
                "a larger increment of the batch size, or fewer steps"
            )
        part = _Part(now._replace(length=length, batch=rows), 1, rows * used)
        counts = [batch.steps_alike(now.samples), None if tokens is None else part.steps_to(tokens, "tokens")]
        counts += [None if end is None else end - now.step + 1 for end in ends]
        part = part._replace(steps=min(count for count in counts if count is not None))
        yield part
        now = part.after(part.steps)
