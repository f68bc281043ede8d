"""Learning rate: linear warm-up, then decay to an absolute floor, each measured in steps or in tokens.

    warm-up        lr = peak * t / W
    cosine         lr = floor + (peak - floor) * (1 + cos πr) / 2          r = (t - W) / (D - W), from 0 to 1
    linear         lr = floor + (peak - floor) * (1 - r)
    inverse-sqrt   lr = peak * √(W / t), at least floor
    constant       lr = peak

t counts steps (the current one; the first is 1) or tokens (consumed before it). With sequence length warmup, steps
have different numbers of tokens: decay by tokens then, because decay by steps comes too early, and warm up by steps.
If the two units differ, W in the unit of the decay is known only when the warm-up ends. The loop keeps it and saves it
in its checkpoint:

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
    decay: int = 0  # end of the decay, counted from the start of the run; 0: the end of the run, see `ending`
    decay_unit: Unit = "steps"
    floor: float = 0.0  # absolute, not relative to the peak; a peak below it is kept

    def __post_init__(self) -> None:
        check_choice(self, "kind", Kind)
        check_choice(self, "warmup_unit", Unit)
        check_choice(self, "decay_unit", Unit)
        check_whole(self, 0, "warmup", "decay")
        check_number(self, "floor", least=0.0)
        if self.kind == "inverse-sqrt" and self.warmup == 0:
            raise ValueError("kind='inverse-sqrt' needs a warm-up, got warmup=0; try warmup=1000")
        if self.ends and 0 < self.decay <= self.warmup and self.warmup_unit == self.decay_unit:
            raise ValueError(f"decay={self.decay} ends before warmup={self.warmup}; try decay={10 * self.warmup}")

    @property
    def ends(self) -> bool:
        """Whether this kind uses `decay`: it reaches its floor there."""
        return self.kind in ("cosine", "linear")

    def ending(self, *, steps: int | None = None, tokens: int | None = None) -> "LearningRate":
        """A copy with `decay` set to the length of the run, if it was 0."""
        if not self.ends or self.decay:
            return self
        length = steps if self.decay_unit == "steps" else tokens
        if length is None:
            raise ValueError(
                f"the learning rate decays by {self.decay_unit}, and the length of the run in {self.decay_unit} was "
                f"not given; try ending({self.decay_unit}=...)"
            )
        return replace(self, decay=length)

    def warmed(self, step: int, tokens: int) -> bool:
        """Whether the warm-up is over after `step` steps and `tokens` tokens."""
        return (step if self.warmup_unit == "steps" else tokens) >= self.warmup

    def at(
        self, peak: float, step: int, tokens: int, warmup_tokens: int | None = None, warmup_steps: int | None = None
    ) -> float:
        """The learning rate of step `step`, before which `tokens` tokens were consumed.

        A warm-up by tokens starts at exactly 0, one by steps at peak / W.

        Args:
            warmup_tokens: tokens consumed when the warm-up ended; needed for warm-up by steps and decay by tokens.
            warmup_steps: steps taken when the warm-up ended; needed for warm-up by tokens and decay by steps.
        """
        check_clock("step", step)
        check_clock("tokens", tokens)
        if self.ends and not self.decay:
            raise ValueError(f"decay=0 needs the length of the run; try ending({self.decay_unit}=...).at(...)")
        now = step if self.warmup_unit == "steps" else tokens
        # The last step belongs to a warm-up by steps: its number of tokens is not counted yet.
        if self.warmup and now <= self.warmup:
            return peak * (now / self.warmup)
        if self.kind == "constant":
            return peak
        now, start = step if self.decay_unit == "steps" else tokens, self._start(warmup_tokens, warmup_steps)
        floor = min(self.floor, peak)
        if self.kind == "inverse-sqrt":
            return max(floor, peak * math.sqrt(start / max(now, start)))
        # If the warm-up ended after `decay`, the rate is at its floor.
        r = min(max((now - start) / (self.decay - start), 0.0), 1.0) if self.decay > start else 1.0
        height = (1 + math.cos(math.pi * r)) / 2 if self.kind == "cosine" else 1 - r
        # Clamped: the sum may round to slightly above the peak or below the floor.
        return min(max(floor + (peak - floor) * height, floor), peak)

    def _start(self, warmup_tokens: int | None, warmup_steps: int | None) -> int:
        """W in the unit of the decay."""
        if self.warmup == 0 or self.warmup_unit == self.decay_unit:
            return self.warmup
        start = warmup_tokens if self.decay_unit == "tokens" else warmup_steps
        if start is None:
            raise ValueError(
                f"warm-up by {self.warmup_unit} and decay by {self.decay_unit} need warmup_{self.decay_unit}, the "
                f"{self.decay_unit} when the warm-up ended; store it when warmed(step, tokens) becomes true, and save "
                "it in the checkpoint"
            )
        return start
