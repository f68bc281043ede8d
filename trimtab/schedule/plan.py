"""A run foretold: every clock and every schedule, without a model.

    future = plan(rate=rate, peak=6e-4, batch=4096, context=1024, tokens=157_286_400_000, seqlen=warmup)
    print(draw(future))

Steps, samples and tokens are three clocks, and with a warm-up of length or batch they run at different speeds. The walk
below is the one that a training loop does; the loop adds seconds, the fourth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.schedule.batch_size import BatchWarmup, check_one_warmup
from trimtab.schedule.cut import kept
from trimtab.schedule.learning_rate import LearningRate
from trimtab.schedule.seqlen import Lengths


class Moment(NamedTuple):
    """One step: where it starts on each clock, and what it is given."""

    step: int  # the one being taken; the first is 1
    samples: int  # consumed before it
    tokens: int  # consumed before it
    length: int
    batch: int
    lr: float


@dataclass(frozen=True)
class Plan:
    moments: tuple[Moment, ...]  # evenly spaced, the first and the last step among them
    steps: int
    samples: int
    tokens: int
    context: int
    warmup_tokens: int | None  # consumed when the learning rate's warm-up ended
    rate: LearningRate  # with its end filled in

    @property
    def cut_off(self) -> float:
        """The share of the tokens read that is never trained on."""
        return 1 - self.tokens / (self.samples * self.context)


class _Step(NamedTuple):
    step: int
    samples: int
    tokens: int
    length: int
    batch: int
    used: int  # tokens of this step


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
    """Foretell a run that stops after `steps` steps or `tokens` tokens, whichever comes first.

    Args:
        context: tokens of a row before it is cut.
        force: allow sequence length warmup and batch-size warm-up together.
        points: how many moments to keep, at most.
    """
    if steps is None and tokens is None:
        raise ValueError("a run without an end cannot be foretold; try steps=1000 or tokens=1_000_000")
    for name, value in (("steps", steps), ("tokens", tokens), ("context", context), ("points", points)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is too small; try {name}=1000")
    check_one_warmup(seqlen, batch, force=force)
    walk = _Walk(batch=batch, context=context, steps=steps, tokens=tokens, seqlen=seqlen)
    last = walk.end()
    ends = {"steps": last.step, "samples": last.samples + last.batch, "tokens": last.tokens + last.used}
    rate = rate.ending(steps=ends["steps"], tokens=ends["tokens"])
    every = -(-last.step // points)
    moments, warmup_tokens = _rated(walk, rate, peak, every, last.step)
    return Plan(moments=moments, context=context, warmup_tokens=warmup_tokens, rate=rate, **ends)


@dataclass(frozen=True)
class _Walk:
    batch: int | BatchWarmup
    context: int
    steps: int | None
    tokens: int | None
    seqlen: Lengths | None

    def __iter__(self) -> Iterator[_Step]:
        step = samples = tokens = 0
        while (self.steps is None or step < self.steps) and (self.tokens is None or tokens < self.tokens):
            step += 1
            batch = self.batch.at(samples) if isinstance(self.batch, BatchWarmup) else self.batch
            length = used = self.context
            if self.seqlen is not None:
                length = min(self.seqlen.at(step), self.context)
                used = kept(self.context, length, self.seqlen.cut_mode)
            yield _Step(step, samples, tokens, length, batch, batch * used)
            samples += batch
            tokens += batch * used

    def end(self) -> _Step:
        for step in self:
            last = step
        return last


def _rated(
    walk: _Walk, rate: LearningRate, peak: float, every: int, last: int
) -> tuple[tuple[Moment, ...], int | None]:
    moments = []
    warm_tokens, warm_steps = (0, 0) if rate.warmed(0, 0) else (None, None)
    for step, samples, tokens, length, batch, used in walk:
        if (step - 1) % every == 0 or step == last:
            lr = rate.at(peak, step, tokens, warm_tokens, warm_steps)
            moments.append(Moment(step, samples, tokens, length, batch, lr))
        if warm_tokens is None and rate.warmed(step, tokens + used):
            warm_tokens, warm_steps = tokens + used, step
    return tuple(moments), warm_tokens
