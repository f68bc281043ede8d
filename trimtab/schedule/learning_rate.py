"""Learning rate: a linear warm-up, then a fall to an absolute floor, each by the clock that suits it.

    warm-up        lr = peak * t / W
    cosine         lr = floor + (peak - floor) * (1 + cos πr) / 2          r = (t - W) / (D - W), from 0 to 1
    linear         lr = floor + (peak - floor) * (1 - r)
    inverse-sqrt   lr = peak * √(W / t), at least floor
    constant       lr = peak

t counts steps (the one being taken; the first is 1) or tokens (consumed before it). Where steps differ in tokens, as
in sequence length warmup, the fall has to go by tokens: by steps it comes too early, when few tokens have been seen.
The warm-up should still go by steps. Where the two clocks differ, W on the second one is known only when the warm-up
ends; the loop keeps it, and saves it with its checkpoint:

    lr = rate.at(peak, step, tokens, warmup_tokens)
    ...                                                    # take the step
    tokens += batch * length
    if warmup_tokens is None and rate.warmed(step, tokens):
        warmup_tokens = tokens

Li et al. 2022 (The Stability-Efficiency Dilemma), appendix A.2.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from trimtab.schedule.checks import check_choice, check_clock, check_number, check_whole

Kind = Literal["cosine", "linear", "constant", "inverse-sqrt"]
Unit = Literal["steps", "tokens"]


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    kind: Kind = "cosine"
    warmup: int = 0  # 0: none
    warmup_unit: Unit = "steps"
    decay: int = 0  # where the floor is reached, counted from the start of the run; 0: at its end, see `ending`
    decay_unit: Unit = "steps"
    floor: float = 0.0  # absolute, not a part of the peak; a lower peak stays where it is

    def __post_init__(self) -> None:
        check_choice(self, "kind", Kind)
        check_choice(self, "warmup_unit", Unit)
        check_choice(self, "decay_unit", Unit)
        check_whole(self, 0, "warmup", "decay")
        check_number(self, "floor", least=0.0)
        if self.kind == "inverse-sqrt" and self.warmup == 0:
            raise ValueError("kind='inverse-sqrt' falls in multiples of its warm-up and got warmup=0; try warmup=1000")
        if self.ends and 0 < self.decay <= self.warmup and self.warmup_unit == self.decay_unit:
            raise ValueError(
                f"decay={self.decay} {self.decay_unit} would be over before warmup={self.warmup} is; "
                f"try decay={10 * self.warmup}"
            )

    @property
    def ends(self) -> bool:
        """Whether this kind reaches its floor at `decay`; the others have no use for it."""
        return self.kind in ("cosine", "linear")

    def ending(self, *, steps: int | None = None, tokens: int | None = None) -> "LearningRate":
        """The same, with `decay` filled in by the length of the run if it was left 0."""
        if not self.ends or self.decay:
            return self
        length = steps if self.decay_unit == "steps" else tokens
        if length is None:
            raise ValueError(
                f"the learning rate falls by {self.decay_unit}, and the length of the run in {self.decay_unit} was not "
                f"given; try ending({self.decay_unit}=...)"
            )
        return replace(self, decay=length)

    def warmed(self, step: int, tokens: int) -> bool:
        """Whether the warm-up is over once `step` steps have been taken and `tokens` tokens consumed."""
        return (step if self.warmup_unit == "steps" else tokens) >= self.warmup

    def at(
        self,
        peak: float,
        step: int,
        tokens: int,
        warmup_tokens: int | None = None,
        warmup_steps: int | None = None,
    ) -> float:
        """The learning rate of step `step`, before which `tokens` tokens were consumed.

        A warm-up by tokens starts from exactly 0, one by steps from peak / W.

        Args:
            warmup_tokens: tokens consumed when the warm-up ended; needed after a warm-up by steps, to fall by tokens.
            warmup_steps: steps taken when the warm-up ended; needed after a warm-up by tokens, to fall by steps.
        """
        check_clock("step", step)
        check_clock("tokens", tokens)
        if self.ends and not self.decay:
            raise ValueError(
                f"decay=0 leaves the end to the length of the run; try ending({self.decay_unit}=...).at(...)"
            )
        now = step if self.warmup_unit == "steps" else tokens
        # The last step of a warm-up by steps is still part of it: nobody knows yet how many tokens it took.
        if self.warmup and now <= self.warmup:
            return peak * (now / self.warmup)
        if self.kind == "constant":
            return peak
        return self._fall(
            peak, step if self.decay_unit == "steps" else tokens, self._start(warmup_tokens, warmup_steps)
        )

    def _fall(self, peak: float, now: int, start: int) -> float:
        floor = min(self.floor, peak)
        if self.kind == "inverse-sqrt":
            return max(floor, peak * math.sqrt(start / max(now, start)))
        # A warm-up that lasted past the end leaves nothing to fall through.
        r = min(max((now - start) / (self.decay - start), 0.0), 1.0) if self.decay > start else 1.0
        height = (1 + math.cos(math.pi * r)) / 2 if self.kind == "cosine" else 1 - r
        # The sum may round to a little above the peak or below the floor.
        return min(max(floor + (peak - floor) * height, floor), peak)

    def _start(self, warmup_tokens: int | None, warmup_steps: int | None) -> int:
        """W on the clock of the fall."""
        if self.warmup == 0 or self.warmup_unit == self.decay_unit:
            return self.warmup
        start = warmup_tokens if self.decay_unit == "tokens" else warmup_steps
        if start is None:
            raise ValueError(
                f"a warm-up by {self.warmup_unit} and a fall by {self.decay_unit} need warmup_{self.decay_unit}, the "
                f"{self.decay_unit} when the warm-up ended; keep them once warmed(step, tokens) is true, and save them "
                "with the checkpoint"
            )
        return start
