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

    def steps_alike(self, samples: int) -> int | None:
        """The number of steps until the batch is larger than that of the next step; None if it stays."""
        batch, increments = self.at(samples), (self.end - self.start) // self.increment
        if batch == self.end:
            return None
        count = (batch - self.start) // self.increment + 1
        # The first number of samples at which `at` has made `count` increments, divided by the batch, both rounded up.
        return -((samples - -(-count * self.samples // increments)) // batch)

    def table(self, steps: int) -> list[tuple[int, int]]:
        """Rows of (from step, batch) for steps 1 to `steps`."""
        rows: list[tuple[int, int]] = []
        step, samples = 1, 0
        while step <= steps:
            batch, alike = self.at(samples), self.steps_alike(samples)
            rows.append((step, batch))
            if alike is None:
                break
            step, samples = step + alike, samples + alike * batch
        return rows


def check_one_warmup(seqlen: Any, batch: Any, *, force: bool = False) -> None:
    """Refuse sequence length warmup together with batch-size warm-up: both reduce the tokens per step."""
    if not force and all(hasattr(x, "end") and getattr(x, "start", 0) < x.end for x in (seqlen, batch)):
        raise ValueError(
            "sequence length warmup and batch-size warm-up both reduce the tokens per step; try the full batch from "
            "the first step, or force it"
        )
