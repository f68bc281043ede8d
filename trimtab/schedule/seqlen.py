"""Sequence length warmup: train on short sequences first, then on longer ones.

    linear      length = s + (e - s) * t / T                  root    length = s + (e - s) * (t / T)^(1/degree)
    discrete    lengths[i] until step until[i]                two-stage    s until step T
    mixed       a random length at every step, until T

then rounded down to a multiple of q and clamped to [s, e]; t is the current step, the first is 1. Long sequences early
in training cause extreme values of Adam's second moment; without them, larger batches and learning rates are stable.

    warmup = SeqLenWarmup(start=64, end=1024, steps=15_000)
    loss = model(**warmup.cut(batch, step))

Li et al. 2022, "The Stability-Efficiency Dilemma", section 4. Rounding is as in DeepSpeed, plus a clamp to `start`.
arithmetic="deepspeed" also has its floating-point errors, to reproduce a run.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.schedule.checks import check_choice, check_clock, check_number, check_rising, check_whole
from trimtab.schedule.cut import Mode, cut, kept

Kind = Literal["linear", "root", "discrete", "two-stage", "mixed"]
Arithmetic = Literal["exact", "deepspeed"]


class Lengths:
    """A length for every step, and the token counts that follow."""

    end: int
    cut_mode: Mode

    def at(self, step: int) -> int:
        """The length of a step. A pure function: there is no state to save."""
        raise NotImplementedError

    def settled(self) -> int | None:
        """The first step from which the length stays at `end`; None if unknown."""
        return None

    def alike_until(self, step: int) -> int | None:
        """The last of the next steps known to have the length of `step`; None if the length does not change again."""
        return step

    def cut(self, batch: Any, step: int, *, extra: int = 0) -> Any:
        """Cut the batch of an optimizer step to its length; see `trimtab.schedule.cut`.

        All micro-batches of one step use the same step number. Evaluate at full length, without `cut`.
        """
        return cut(batch, self.at(step), mode=self.cut_mode, extra=extra)

    def table(self, steps: int) -> list[tuple[int, int]]:
        """Rows of (from step, length) for steps 1 to `steps`: one for each change."""
        rows: list[tuple[int, int]] = []
        last: int | None = 0
        while last is not None and last < steps:
            length = self.at(last + 1)
            if not rows or rows[-1][1] != length:
                rows.append((last + 1, length))
            last = self.alike_until(last + 1)
        return rows

    def tokens_at(self, step: int) -> int:
        """Tokens kept of each row of `end` tokens."""
        return kept(self.end, self.at(step), self.cut_mode)

    def dropped(self, row: int, step: int) -> int:
        """Tokens of a row that this step does not train on."""
        return row - kept(row, self.at(step), self.cut_mode)

    def count_tokens(self, batch: int, steps: int) -> int:
        """Tokens consumed by steps 1 to `steps` with `batch` rows of `end` tokens each."""
        check_clock("steps", steps, least=1)
        rows = self.table(steps)
        until = [step for step, _ in rows[1:]] + [steps + 1]
        return batch * sum(self.tokens_at(step) * (stop - step) for (step, _), stop in zip(rows, until, strict=True))

    def count_steps(self, batch: int, tokens: int) -> int:
        """The number of steps that consume at least `tokens` tokens."""
        step = consumed = 0
        while consumed < tokens:
            each, last = batch * self.tokens_at(step + 1), self.alike_until(step + 1)
            count = -((consumed - tokens) // each)
            if last is not None:
                count = min(count, last - step)
            step, consumed = step + count, consumed + count * each
        return step


@dataclass(frozen=True, kw_only=True)
class SeqLenWarmup(Lengths):
    start: int
    end: int  # the full length
    steps: int  # T: length of the warm-up
    multiple: int = 8  # q: lengths are rounded down to it
    kind: Kind = "linear"
    degree: float = 2.0  # of the root
    lengths: tuple[int, ...] = ()  # use only these lengths, from `start` to `end`; replaces `multiple`
    until: tuple[int, ...] = ()  # discrete: the last step of each length but the last
    seed: int = 0  # of mixed
    cut_mode: Mode = "truncate"  # "reshape" keeps the tokens as more rows, so the batch is larger
    # For linear and root. "deepspeed": in floats, an exact multiple can come out one below and is then rounded down.
    arithmetic: Arithmetic = "exact"

    def __post_init__(self) -> None:
        check_whole(self, 1, "start", "end", "steps", "multiple")
        check_whole(self, 0, "seed")
        check_choice(self, "kind", Kind)
        check_choice(self, "cut_mode", Mode)
        check_choice(self, "arithmetic", Arithmetic)
        check_number(self, "degree", above=0)
        if self.degree > 10:
            raise ValueError(f"degree={self.degree} is at nearly full length from the first step; try degree=2.0")
        if self.degree < 0.1:  # and (t / T)^(1/degree) would overflow
            raise ValueError(f"degree={self.degree} is at nearly the first length until the end; try degree=0.5")
        if self.start > self.end:
            raise ValueError(f"start={self.start} is above end={self.end}; try start={self.end}")
        if self.arithmetic == "deepspeed" and self.kind not in ("linear", "root"):
            raise ValueError(f"arithmetic='deepspeed' is for linear and root, got kind={self.kind!r}; try 'exact'")
        # JSON gives lists; a frozen config must be hashable.
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "until", tuple(self.until))
        _check_lengths(self)
        _check_until(self)

    @classmethod
    def discrete(cls, lengths: Sequence[int], until: Sequence[int], *, cut_mode: Mode = "truncate") -> "SeqLenWarmup":
        """`lengths[i]` up to and including step `until[i]`, then the last length. `lengths` has one entry more."""
        if not lengths or not until:
            raise ValueError(f"got lengths={lengths!r} and until={until!r}; try lengths=(64, 1024), until=(1000,)")
        listed = {"kind": "discrete", "lengths": tuple(lengths), "until": tuple(until), "cut_mode": cut_mode}
        return cls(start=lengths[0], end=lengths[-1], steps=until[-1], **listed)  # type: ignore[arg-type]

    @staticmethod
    def custom(function: Callable[[int], int], *, end: int, cut_mode: Mode = "truncate") -> "CustomSeqLen":
        """Lengths from a pure function of the step. They may also decrease."""
        return CustomSeqLen(function=function, end=end, cut_mode=cut_mode)

    def at(self, step: int) -> int:
        check_clock("step", step)
        if self.kind == "discrete":
            return self.lengths[bisect_left(self.until, step)]
        if self.kind == "two-stage":
            return self.start if step <= self.steps else self.end
        if self.kind == "mixed":
            return self._draw(step) if step <= self.steps else self.end
        return self._round(self._pace(step))

    def settled(self) -> int:
        if self.kind in ("discrete", "two-stage", "mixed"):
            return self.steps + 1
        # Rounding down can keep the length below `end` for some steps after `steps`.
        late = self.steps
        while self.at(late) < self.end:
            late *= 2
        return bisect_left(range(late), self.end, key=self.at)

    def alike_until(self, step: int) -> int | None:
        if self.kind in ("discrete", "two-stage", "mixed"):
            until = {"discrete": self.until, "two-stage": (self.steps,), "mixed": (step,)}[self.kind]
            return until[bisect_left(until, step)] if step <= self.steps else None
        length, last, reach = self.at(step), step, 1
        if length == self.end:
            return None
        # Lengths rise with the step: the next change is found in a logarithmic number of calls.
        while self.at(last + reach) == length:
            last, reach = last + reach, 2 * reach
        return last - 1 + bisect_right(range(last, last + reach), length, key=self.at)

    def buckets(self) -> tuple[int, ...]:
        """Every possible length, rising. A compiled model is compiled at most this many times."""
        if self.lengths:
            return self.lengths
        if self.kind == "two-stage":
            return tuple(sorted({self.start, self.end}))
        return tuple(sorted({self.start, *self._between(), self.end}))

    def _between(self) -> range:
        """The multiples between `start` and `end`."""
        return range(self.start - self.start % self.multiple + self.multiple, self.end, self.multiple)

    def _pace(self, step: int) -> int:
        if self.arithmetic == "deepspeed":
            # Operation by operation as in CurriculumScheduler: another order would round differently.
            power = 1.0 / (self.degree if self.kind == "root" else 1)
            root: float = (float(step) / self.steps) ** power
            return math.floor(root * (self.end - self.start) + self.start)
        if self.kind == "linear":
            # In integers: a float quotient can be just below an exact multiple.
            return self.start + (self.end - self.start) * step // self.steps
        root = (step / self.steps) ** (1 / self.degree)
        return math.floor(self.start + (self.end - self.start) * root + 1e-9)

    def _round(self, length: int) -> int:
        if self.lengths:
            return self.lengths[max(bisect_right(self.lengths, length) - 1, 0)]
        return min(max(length - length % self.multiple, self.start), self.end)

    def _draw(self, step: int) -> int:
        # One generator per step, so that a step does not depend on earlier ones. Python guarantees that seeding and
        # `random()` do not change between versions; it does not for `choice`.
        drawn = random.Random(f"{self.seed} {step}").random()
        if self.lengths:
            return self.lengths[int(drawn * len(self.lengths))]
        # As an entry of `buckets`, without making them all.
        between = self._between()
        place = int(drawn * (len(between) + (2 if self.start < self.end else 1)))
        return self.start if place == 0 else between[place - 1] if place <= len(between) else self.end


@dataclass(frozen=True, kw_only=True)
class CustomSeqLen(Lengths):
    """Lengths from a function of the step. Cannot be written to a config file."""

    function: Callable[[int], int]
    end: int
    cut_mode: Mode = "truncate"

    def __post_init__(self) -> None:
        check_whole(self, 1, "end")
        check_choice(self, "cut_mode", Mode)
        if not callable(self.function):
            raise ValueError(f"function={self.function!r} is not callable; try lambda step: min(8 * step, {self.end})")

    def at(self, step: int) -> int:
        check_clock("step", step)
        length = self.function(step)
        if not isinstance(length, int) or not 1 <= length <= self.end:
            raise ValueError(
                f"the function gave {length!r} for step {step}; lengths are whole numbers from 1 to end={self.end}"
            )
        return length


def _check_lengths(warmup: SeqLenWarmup) -> None:
    if not warmup.lengths:
        if warmup.kind == "discrete":
            raise ValueError("kind='discrete' has no lengths; try lengths=(64, 256, 1024) and until=(1000, 2000)")
        # start == end is a constant length, which is not rounded.
        if warmup.start < warmup.end and warmup.start % warmup.multiple:
            down = warmup.start - warmup.start % warmup.multiple
            raise ValueError(
                f"start={warmup.start} is not a multiple of {warmup.multiple}, to which lengths are rounded; "
                f"try start={down or warmup.multiple} or multiple={math.gcd(warmup.start, warmup.multiple)}"
            )
        return
    if warmup.kind == "two-stage":
        raise ValueError(f"kind='two-stage' has no other lengths, got lengths={warmup.lengths}; try kind='discrete'")
    check_rising("lengths", warmup.lengths)
    for name, value in (("start", warmup.lengths[0]), ("end", warmup.lengths[-1])):
        if getattr(warmup, name) != value:
            raise ValueError(f"lengths={warmup.lengths} but {name}={getattr(warmup, name)}; try {name}={value}")


def _check_until(warmup: SeqLenWarmup) -> None:
    if warmup.kind != "discrete":
        if warmup.until:
            raise ValueError(f"until={warmup.until} belongs to kind='discrete', got kind={warmup.kind!r}; try until=()")
        return
    check_rising("until", warmup.until)
    if len(warmup.lengths) != len(warmup.until) + 1:
        raise ValueError(
            f"{len(warmup.lengths)} lengths need {len(warmup.lengths) - 1} entries of until, got until={warmup.until}; "
            "the last length has no last step"
        )
    last = warmup.until[-1] if warmup.until else warmup.steps
    if warmup.steps != last:
        raise ValueError(f"until={warmup.until} and steps={warmup.steps} disagree; try steps={last}")
