"""A β₂ that forgets quickly at first and slowly later: β₂(t) = 1 - t^-λ.

At step 1 it is 0, so the second moment is the first gradient's square and needs no other debiasing. The optimizers have
the same schedule built in as `beta2_power`; this one is for other optimizers, and for drawing.

Shazeer & Stern 2018, section 7.2; Wortsman et al. 2023 compare λ = 0.45, 0.5, 0.65 with a constant β₂.
"""

from dataclasses import dataclass

from trimtab.schedule.checks import check_clock, check_number


@dataclass(frozen=True, kw_only=True)
class Beta2:
    power: float = 0.5  # λ

    def __post_init__(self) -> None:
        check_number(self, "power", above=0)

    def at(self, step: int) -> float:
        """β₂ of the given step; the first step is 1."""
        check_clock("step", step, least=1)
        return 1 - step**-self.power
