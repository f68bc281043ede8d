"""RMS spikes and loss spikes, and which RMS spike predicts which loss spike (Wortsman et al. 2023, appendix).

    RMS spike    a step with RMS_t >= 2.3
    loss spike   loss >= running mean + 3.2 running standard deviations, at least twice within 10 steps
    one event    spikes of a kind that follow each other within 10 steps, dated at the first
    predicted    a loss spike 1 to 8 steps after an RMS spike
    chance       share of the steps that lie 1 to 8 after an RMS spike: the expected share of predicted loss spikes

Pure functions over arrays. Steps are numbers, not indices: a log may have gaps. A loss that is not finite is a
deviation and never enters the running mean; an RMS_t that is NaN is not a spike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from trimtab.analysis.thresholds import IGNORED_STEPS, LEAD, LOSS_DEVIATIONS, LOSS_WINDOW, RMS_SPIKE, SPIKE_GAP
from trimtab.runs.reader import Floats, Ints

_ROWS = 4096  # windows averaged at once: bounds the memory for a long log


@dataclass(frozen=True, kw_only=True)
class SpikeRules:
    """The paper's constants. `window` is not among them; give results for several."""

    rms: float = RMS_SPIKE
    deviations: float = LOSS_DEVIATIONS
    window: int = LOSS_WINDOW  # losses in the running mean
    ignore: int = IGNORED_STEPS  # first steps
    gap: int = SPIKE_GAP  # spikes this close are one event
    deviating: int = 2  # steps of `gap`, to be a loss spike
    lead: tuple[int, int] = LEAD  # steps from an RMS spike to the loss spike it predicts

    def __post_init__(self) -> None:
        if self.window < 2 or self.gap < 1 or self.deviating < 1:
            raise ValueError(f"window must be at least 2, gap and deviating at least 1, got {self}")
        if not 0 <= self.lead[0] <= self.lead[1]:
            raise ValueError(f"lead must be (earliest, latest) with 0 <= earliest <= latest, got {self.lead}")

    def fitted(self, steps: int) -> "SpikeRules":
        """For a run too short for the paper's 1000 and 100: ignore at most 1/20 of it, window at most 1/10.

        The window has at least 20 losses. In a window of 3.2² or fewer, one spike raises the standard deviation so
        much that a second spike of the same height is not detected.
        """
        return replace(self, ignore=min(self.ignore, steps // 20), window=min(self.window, max(steps // 10, 20)))


PAPER = SpikeRules()


def running_range(losses: ArrayLike, window: int) -> tuple[Floats, Floats]:
    """Mean and deviation of the up to `window` finite losses before each; NaN until half a window is there."""
    values = np.asarray(losses, dtype=np.float64)
    finite = np.isfinite(values)
    with np.errstate(over="ignore", invalid="ignore"):  # squares of very large losses
        mean, deviation = _rolling(values[finite], window)
    before = np.cumsum(finite) - finite  # finite losses before each
    return mean[before], deviation[before]


def deviates(losses: ArrayLike, rules: SpikeRules = PAPER) -> NDArray[np.bool_]:
    """Where the loss is further above its running mean than the rules allow."""
    values = np.asarray(losses, dtype=np.float64)
    mean, deviation = running_range(values, rules.window)
    with np.errstate(over="ignore", invalid="ignore"):
        # Equal losses have no deviation but that of rounding.
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
    """Step and height of the highest loss of a spike, searched over at least `gap` steps; NaN is the highest."""
    numbers, values = np.asarray(steps, dtype=np.int64), np.asarray(losses, dtype=np.float64)
    near = np.flatnonzero((numbers >= span[0]) & (numbers <= max(span[1], span[0] + rules.gap - 1)))
    top = near[np.where(np.isfinite(values[near]), values[near], np.inf).argmax()]
    return int(numbers[top]), float(values[top])


def rms_spikes(steps: ArrayLike, rms: ArrayLike, rules: SpikeRules = PAPER) -> list[int]:
    """The steps at which RMS spikes begin."""
    return merge(exceeds(steps, rms, rules), rules.gap)


def exceeds(steps: ArrayLike, rms: ArrayLike, rules: SpikeRules = PAPER) -> Ints:
    """Every step with an RMS_t above the threshold, infinite ones included."""
    numbers = np.asarray(steps, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        return numbers[(np.asarray(rms, dtype=np.float64) >= rules.rms) & (numbers > rules.ignore)]


def merge(steps: ArrayLike, gap: int) -> list[int]:
    """The first of each series of steps that follow each other within `gap`."""
    return [first for first, _ in merge_spans(steps, gap)]


def merge_spans(steps: ArrayLike, gap: int) -> list[tuple[int, int]]:
    """First and last of each series of steps that follow each other within `gap`."""
    numbers = np.unique(np.asarray(steps, dtype=np.int64))
    breaks = np.flatnonzero(np.diff(numbers) > gap) + 1
    return [(int(part[0]), int(part[-1])) for part in np.split(numbers, breaks) if len(part)]


def explain_spikes(late: Sequence[int], early: Sequence[int], rules: SpikeRules = PAPER) -> list[int | None]:
    """For each loss spike the earliest RMS spike that predicts it; None if there is none."""
    leads = ([other for other in early if rules.lead[0] <= step - other <= rules.lead[1]] for step in late)
    return [min(causes, default=None) for causes in leads]


def chance_rate(early: ArrayLike, steps: ArrayLike, rules: SpikeRules = PAPER) -> float:
    """Share of the steps after the ignored ones that lie in the lead of an RMS spike; NaN if there are no steps."""
    numbers = np.unique(np.asarray(steps, dtype=np.int64))
    eligible = numbers[numbers > rules.ignore]
    if not len(eligible):
        return float("nan")
    covered = {int(step) + lead for step in np.asarray(early) for lead in range(rules.lead[0], rules.lead[1] + 1)}
    return float(np.isin(eligible, np.array(sorted(covered), dtype=np.int64)).mean())


def _rolling(values: Floats, window: int) -> tuple[Floats, Floats]:
    """Entry i covers the `window` values before index i; there is one entry more than values."""
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
