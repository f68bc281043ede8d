"""What counts as a spike, and when one spike announces another (Wortsman et al. 2023, appendix).

    RMS spike    an iteration with RMS_t >= 2.3
    loss spike   loss >= running mean + 3.2 running deviations, at least twice inside 10 iterations
    one event    spikes of a kind that follow each other within 10 iterations, dated at the first
    explained    a loss spike 1 ... 8 iterations after an RMS spike
    chance       share of the iterations that lie 1 ... 8 after an RMS spike: what a blind guess would explain

Pure functions over arrays, for logs of finished runs. Steps are numbers, not places: a log may have gaps. A loss that
is not finite deviates by any measure and never enters the running mean; an RMS_t that is not a number is no spike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_ROWS = 4096  # windows averaged at once, so that a long log needs no memory in proportion to its window


@dataclass(frozen=True, kw_only=True)
class SpikeRules:
    """The paper's constants. `window` is not in it; results should be given for several."""

    rms: float = 2.3
    deviations: float = 3.2
    window: int = 100  # losses in the running mean
    ignore: int = 1000  # first iterations
    gap: int = 10  # spikes this close are one
    deviating: int = 2  # of `gap` iterations, to be a loss spike
    lead: tuple[int, int] = (1, 8)  # iterations from an RMS spike to the loss spike it explains

    def __post_init__(self) -> None:
        if self.window < 2 or self.gap < 1 or self.deviating < 1:
            raise ValueError(f"window must be at least 2, gap and deviating at least 1, got {self}")
        if not 0 <= self.lead[0] <= self.lead[1]:
            raise ValueError(f"lead must be (earliest, latest) with 0 <= earliest <= latest, got {self.lead}")

    def fitted(self, steps: int) -> "SpikeRules":
        """For a run too short for the paper's 1000 and 100: at most a twentieth ignored, a tenth in the window.

        Never fewer than 20: once a spike is in a window of 3.2² or less, a second one as high deviates no more.
        """
        return replace(self, ignore=min(self.ignore, steps // 20), window=min(self.window, max(steps // 10, 20)))


PAPER = SpikeRules()


def running_range(losses: ArrayLike, window: int) -> tuple[Floats, Floats]:
    """Mean and deviation of the up to `window` finite losses before each; NaN until there is half a window of them."""
    values = np.asarray(losses, dtype=np.float64)
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore", invalid="ignore"):  # squares of absurd losses
        mean, deviation = _rolling(finite, window)
    before = np.cumsum(np.isfinite(values)) - np.isfinite(values)  # finite losses before each
    return mean[before], deviation[before]


def deviates(losses: ArrayLike, rules: SpikeRules = PAPER) -> Mask:
    """Where the loss is too far above its running mean to be noise."""
    values = np.asarray(losses, dtype=np.float64)
    mean, deviation = running_range(values, rules.window)
    with np.errstate(over="ignore", invalid="ignore"):
        # Losses that are all alike have no deviation but that of rounding.
        above = (values >= mean + rules.deviations * deviation) & (values - mean > 1e-9 * np.abs(mean))
    return above | ~np.isfinite(values)


def loss_spikes(steps: ArrayLike, losses: ArrayLike, rules: SpikeRules = PAPER) -> list[int]:
    """The steps at which loss spikes begin."""
    return [first for first, _ in loss_spans(steps, losses, rules)]


def loss_spans(steps: ArrayLike, losses: ArrayLike, rules: SpikeRules = PAPER) -> list[tuple[int, int]]:
    """First and last deviating step of every loss spike."""
    numbers = np.asarray(steps, dtype=np.int64)
    found = numbers[deviates(losses, rules) & (numbers > rules.ignore)]
    confirmed, last = np.zeros(len(found), dtype=bool), rules.deviating - 1
    for i in range(len(found) - last):
        if found[i + last] - found[i] < rules.gap:
            confirmed[i : i + last + 1] = True
    return merge_spans(found[confirmed], rules.gap)


def find_peak(
    steps: ArrayLike, losses: ArrayLike, span: tuple[int, int], rules: SpikeRules = PAPER
) -> tuple[int, float]:
    """Step and height of the highest loss of a spike, looked for `gap` steps long at least; NaN is the highest."""
    numbers, values = np.asarray(steps, dtype=np.int64), np.asarray(losses, dtype=np.float64)
    near = np.flatnonzero((numbers >= span[0]) & (numbers <= max(span[1], span[0] + rules.gap - 1)))
    top = near[np.where(np.isfinite(values[near]), values[near], np.inf).argmax()]
    return int(numbers[top]), float(values[top])


def rms_spikes(steps: ArrayLike, rms: ArrayLike, rules: SpikeRules = PAPER) -> list[int]:
    """The steps at which RMS spikes begin."""
    return merge(exceeds(steps, rms, rules), rules.gap)


def exceeds(steps: ArrayLike, rms: ArrayLike, rules: SpikeRules = PAPER) -> Ints:
    """Every step with an RMS_t above the threshold, before any are taken together. An infinite one is."""
    numbers = np.asarray(steps, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        return numbers[(np.asarray(rms, dtype=np.float64) >= rules.rms) & (numbers > rules.ignore)]


def merge(steps: ArrayLike, gap: int) -> list[int]:
    """Steps that follow each other within `gap` become one, the first. A long series is one, however long."""
    return [first for first, _ in merge_spans(steps, gap)]


def merge_spans(steps: ArrayLike, gap: int) -> list[tuple[int, int]]:
    """The same, with the last of each."""
    numbers = np.unique(np.asarray(steps, dtype=np.int64))
    breaks = np.flatnonzero(np.diff(numbers) > gap) + 1
    return [(int(part[0]), int(part[-1])) for part in np.split(numbers, breaks) if len(part)]


def explain_spikes(late: Sequence[int], early: Sequence[int], rules: SpikeRules = PAPER) -> list[int | None]:
    """For each loss spike the RMS spike that announced it, the earliest in time; None if there is none."""
    found: list[int | None] = []
    for step in late:
        causes = [other for other in early if rules.lead[0] <= step - other <= rules.lead[1]]
        found.append(min(causes) if causes else None)
    return found


def chance_rate(early: ArrayLike, steps: ArrayLike, rules: SpikeRules = PAPER) -> float:
    """Share of the steps after the ignored ones that lie in the lead of an RMS spike; NaN if there are no steps."""
    numbers = np.unique(np.asarray(steps, dtype=np.int64))
    eligible = numbers[numbers > rules.ignore]
    if not len(eligible):
        return float("nan")
    covered = {int(step) + lead for step in np.asarray(early) for lead in range(rules.lead[0], rules.lead[1] + 1)}
    return float(np.isin(eligible, np.array(sorted(covered), dtype=np.int64)).mean())


def _rolling(values: Floats, window: int) -> tuple[Floats, Floats]:
    """Entry i covers the `window` values before place i; there is one entry more than values."""
    mean, deviation = np.full(len(values) + 1, np.nan), np.full(len(values) + 1, np.nan)
    for i in range(max(2, (window + 1) // 2), min(window, len(values) + 1)):
        mean[i], deviation[i] = values[:i].mean(), values[:i].std()
    if len(values) >= window:
        windows = sliding_window_view(values, window)
        for start in range(0, len(windows), _ROWS):
            some = windows[start : start + _ROWS]
            place = slice(window + start, window + start + len(some))
            mean[place], deviation[place] = some.mean(axis=1), some.std(axis=1)
    return mean, deviation
