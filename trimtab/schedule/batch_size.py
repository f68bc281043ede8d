"""Batch-size warm-up: the batch grows in equal increments.

    n = (end - start) / increment          batch = start + increment * floor(n * consumed / samples),  at most end

`consumed` counts samples, as in GPT-3's training. This is the baseline that sequence length warmup is compared with.
Both reduce the tokens per step, so using both is refused unless forced.
"""

from dataclasses import dataclass
from typing import Any

from trimtab.schedule.checks import check_clock, check_whole


@dataclass(frozen=True, kw_only=True)
class BatchWarmup:
    start: int
    increment: int
    samples: int  # length of the warm-up in samples
    end: int

    def __post_init__(self) -> None:
        check_whole(self, 1, "start", "increment", "samples", "end")
        if self.start > self.end:
            raise ValueError(f"start={self.start} is above end={self.end}; try start={self.end}")
        rest = (self.end - self.start) % self.increment
        if rest:
            raise ValueError(
                f"increments of {self.increment} lead from start={self.start} to {self.end - rest} and then past "
                f"end={self.end}; try end={self.end - rest}"
            )

    def at(self, samples: int) -> int:
        """The batch of the next step, after `samples` samples have been consumed."""
        check_clock("samples", samples)
        increments = (self.end - self.start) // self.increment
        return min(self.start + self.increment * (increments * samples // self.samples), self.end)

    def table(self, steps: int) -> list[tuple[int, int]]:
        """Rows of (from step, batch) for steps 1 to `steps`."""
        rows: list[tuple[int, int]] = []
        samples = 0
        for step in range(1, steps + 1):
            batch = self.at(samples)
            if not rows or rows[-1][1] != batch:
                rows.append((step, batch))
            if batch == self.end:
                break
            samples += batch
        return rows


def check_one_warmup(seqlen: Any, batch: Any, *, force: bool = False) -> None:
    """Refuse sequence length warmup together with batch-size warm-up: both reduce the tokens per step."""
    if not force and all(hasattr(x, "end") and getattr(x, "start", 0) < x.end for x in (seqlen, batch)):
        raise ValueError(
            "sequence length warmup and batch-size warm-up both reduce the tokens per step; try the full batch from "
            "the first step, or force it"
        )
