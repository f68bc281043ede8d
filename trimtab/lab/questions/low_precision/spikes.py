"""Do loss spikes grow with beta2, batch size and learning rate? Wortsman et al. 2023a, section 3.2.

The paper, CLIP without gradient clipping: yes, all three. Here a CLIP on drawn shapes; most batches are half of all
pairs, because the noise of small batches hides spikes (docs/results/spikes.md). The learning rate is constant after a
short warmup, because these runs are too short for a decay and a stable phase. Arms of the batch have equal steps, as in
the paper. A spike counts if it at least doubles the usual loss before it; smaller ones are in the table. Tried before
with seed 100: with a cosine decay almost no run had a spike, so the decay was left out.
"""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from trimtab.analysis.answers import Figure, Line, Panel, Table
from trimtab.analysis.one_run import loss_ratios, losses_of
from trimtab.analysis.spike_counts import RULES, large_spikes
from trimtab.analysis.spikes import loss_spikes
from trimtab.lab.questions.question import Checks, Evidence, Question, S, judge
from trimtab.runs.reader import Run

STEPS, BATCH = 600, 220  # half of the pairs
LRS = (3e-3, 1e-2)
# RMS_t of every step. Layers are not measured, which would take longer than the training.
UNSTEADY: Mapping[str, Any] = {
    "batch": BATCH,
    "model.patch": 16,  # few patches: half of the time
    "schedule.lr.kind": "constant",
    "schedule.lr.warmup": 20,
    "watch.every": 1,
    "watch.deep_every": STEPS,
    "watch.record_every": 1,
}
BETAS = ("beta2 0.9", "beta2 0.99", "beta2 0.999")
BATCHES = {55: "batch 55", 110: "batch 110", BATCH: "beta2 0.99"}
ARMS: dict[str, tuple[str, ...]] = {
    **{name: (name.replace(" ", "="),) for name in BETAS},
    # "batch" keeps the samples of the run, "steps" its length.
    **{name: ("beta2=0.99", f"batch={size}", f"steps={STEPS}") for size, name in BATCHES.items() if size != BATCH},
}


def check(found: Evidence) -> Checks:
    note = "large spikes per run"
    counts = {arm: spikes_per_run(found, arm) for arm in (BETAS[-1], BETAS[0])}
    yield judge("beta2 0.999 has more large spikes than 0.9", counts, more, note=note)
    batches = {BATCHES[size]: spikes_per_run(found, BATCHES[size]) for size in (BATCH, 55)}
    yield judge("batch 220 has more than batch 55", batches, more, note=note)
    rates = {f"{lr:g}": _mean_of([spikes_per_run(found, arm, lr) for arm in BETAS]) for lr in reversed(LRS)}
    yield judge("the higher learning rate has more", rates, more, note=f"{note}, of the three values of beta2")


def more(a: float, b: float) -> bool:
    """By at least half a spike per run: a single spike in all runs says nothing."""
    return a >= b + 0.5


def spikes_per_run(found: Evidence, arm: str, lr: float | None = None) -> float | None:
    """Of all learning rates, or of one; None if a learning rate has no runs."""
    rates = LRS if lr is None else (lr,)
    return _mean_of([_mean_of([len(large_spikes(run, RULES)) for run in found.logs(arm, S, one)]) for one in rates])


def _mean_of(values: Iterable[float | None]) -> float | None:
    numbers = list(values)
    known = [value for value in numbers if value is not None]
    return fmean(known) if known and len(known) == len(numbers) else None


def tables(found: Evidence) -> Iterable[Table]:
    rows = []
    for lr in LRS:
        for arm in ARMS:
            if runs := found.logs(arm, S, lr):
                rows.append((f"{lr:g}", arm, len(runs), *describe(runs)))
    columns = ("learning rate", "arm", "runs", "large spikes per run", "loss spikes per run", "highest loss ratio")
    yield Table("Loss spikes, means over seeds", columns, rows)


def describe(runs: Iterable[Run]) -> tuple[float, float, float]:
    """Means of: large spikes, all loss spikes, highest loss over the best before."""
    told = [(losses_of(run), len(large_spikes(run, RULES))) for run in runs]
    return (
        fmean(large for _, large in told),
        fmean(len(loss_spikes(*series, RULES)) for series, _ in told),
        fmean(loss_ratios(series[1]).highest for series, _ in told),
    )


def figures(found: Evidence) -> Iterable[Figure]:
    panels = [
        Panel(arm, [Line(f"learning rate {lr:g}", *_series(runs[0])) for lr in LRS if (runs := found.logs(arm, S, lr))])
        for arm in BETAS
    ]
    yield Figure(
        name="losses", title="Training loss of one seed", x="step", y="training loss", panels=panels, log_y=True
    )


def _series(run: Run) -> tuple[list[int], list[float]]:
    steps, losses = losses_of(run)
    return steps.tolist(), losses.tolist()


QUESTION = Question(
    "spikes",
    __doc__,
    ARMS,
    check,
    sizes=(S,),
    lrs=LRS,
    seeds=4,
    steps=STEPS,
    paper="P1",
    subject="clip-lab",
    fields=UNSTEADY,
    figures=figures,
    tables=tables,
)
