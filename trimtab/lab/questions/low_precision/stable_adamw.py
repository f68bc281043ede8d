"""Does StableAdamW prevent spikes better than gradient clipping or a lower beta2? Wortsman et al. 2023a, section 3.

The paper, CLIP ViT-Huge at beta2 0.99: AdamW collapses; a lower beta2 and gradient clipping at 1 prevent spikes;
StableAdamW, whose step is shorter while the second moment is stale, has none and the best accuracy. Staleness is
RMS_t, highest in the patch embedding; the paper suspects that it follows a change of the learning signal.

Here a CLIP on drawn shapes, whose contrast is four times as large in 40 of every 200 steps (trimtab/lab/changing.py),
at two learning rates at which it trains. This is the second design: in the first (docs/log.md) the input did not
change, and at the higher learning rate only the run with clipping trained. Tried before, with seed 100 at 0.003: a late
loss of 0.05 with AdamW, 0.001 with clipping and 0.6 with StableAdamW. The question stale-moment has a GPT.
"""

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

import numpy as np

from trimtab.analysis.answers import Figure, Panel, Table
from trimtab.analysis.findings import Status
from trimtab.analysis.one_run import losses_of, rms_of
from trimtab.analysis.spike_counts import RULES, large_spikes
from trimtab.lab.questions.low_precision import rms_spikes
from trimtab.lab.questions.low_precision.rms_spikes import line
from trimtab.lab.questions.low_precision.spikes import STEPS, UNSTEADY, describe, more
from trimtab.lab.questions.question import Checks, Evidence, Question, S, falls, judge, mean
from trimtab.runs.reader import Floats, Ints, Run

Series = Callable[[Run], tuple[Ints, Floats]]

ARMS = {
    "AdamW": ("beta2=0.99",),
    "AdamW, clipping": ("beta2=0.99", "clip=1"),
    "AdamW, beta2 0.9": ("beta2=0.9",),
    "StableAdamW": ("beta2=0.99", "stable-adamw"),
}
PLAIN, CLIPPING, LOWER, STABLE = ARMS
LRS = (1e-3, 3e-3)
HIGH = LRS[-1]
PATCHES = f"clip.{rms_spikes.PATCHES}"  # the patch embedding
CHANGING: Mapping[str, Any] = {  # of any subject of trimtab.lab.changing
    **{name: value for name, value in UNSTEADY.items() if not name.startswith("model.")},
    "optim.clip_norm": None,
    "optim.eps": 1e-6,
}
TAIL = 100  # last steps whose loss is compared: a single one may be in a spike


def check(found: Evidence) -> Checks:
    spikes = {arm: spikes_at(found, arm) for arm in (PLAIN, STABLE)}
    note = f"large spikes per run, learning rate {HIGH:g}"
    yield judge("StableAdamW has fewer large spikes than AdamW", spikes, more, note=note)
    late = {arm: late_loss(found, arm) for arm in ARMS}
    note = f"training loss of the last {TAIL} steps, learning rate {HIGH:g}"
    for arm in (PLAIN, CLIPPING, LOWER):
        values = {name: late[name] for name in (arm, STABLE)}
        yield judge(f"the loss of StableAdamW is lower than that of {arm}", values, falls, note=note)
    claim = "the validation loss of StableAdamW is the lowest of all, each at its best learning rate"
    yield judge(claim, found.best(*ARMS, size=S), lambda *losses: losses[-1] == min(losses))
    stale = {arm: highest_rms(found, arm) for arm in (PLAIN, LOWER)}
    claim = "RMS_t of the patch embedding is above 2.3 with beta2 0.99 and lower with 0.9"
    yield judge(claim, stale, lambda a, b: a >= RULES.rms and b < a, note="highest after the first steps, mean of runs")


def spikes_at(found: Evidence, arm: str, lr: float = HIGH) -> float | None:
    return mean(float(len(large_spikes(run, RULES))) for run in found.logs(arm, S, lr))


def late_loss(found: Evidence, arm: str, lr: float = HIGH) -> float | None:
    """Median of the last steps, mean over seeds. A run that stopped has the loss before training."""
    runs, logs = found.runs(arm, S, lr), found.logs(arm, S, lr)
    late = [
        run.first if run.status == Status.STOPPED else float(np.median(losses_of(log)[1][-TAIL:]))
        for run, log in zip(runs, logs, strict=True)
    ]
    return fmean(late) if late else None


def highest_rms(found: Evidence, arm: str, lr: float = HIGH) -> float | None:
    return mean(_highest(run) for run in found.logs(arm, S, lr))


def _highest(run: Run) -> float:
    steps, by_tensor = rms_of(run)
    late = by_tensor[PATCHES][steps > RULES.ignore] if PATCHES in by_tensor else np.empty(0)
    return float(np.nanmax(late)) if len(late) else float("nan")


def tables(found: Evidence) -> Iterable[Table]:
    rows = []
    for lr in LRS:
        for arm in ARMS:
            if runs := found.logs(arm, S, lr):
                told = (*describe(runs), late_loss(found, arm, lr), highest_rms(found, arm, lr))
                rows.append((f"{lr:g}", arm, *told))
    columns = ("learning rate", "arm", "large spikes per run", "loss spikes per run", "highest loss ratio")
    yield Table("Spikes, means over seeds", (*columns, "late loss", "highest RMS_t, patch embedding"), rows)


def figures(found: Evidence) -> Iterable[Figure]:
    yield _figure(found, "losses", "Training loss of one seed", "training loss", losses_of)
    title = "RMS_t of the patch embedding, one seed"
    yield _figure(found, "rms", title, "RMS_t", lambda run: (rms_of(run)[0], rms_of(run)[1][PATCHES]))


def _figure(found: Evidence, name: str, title: str, y: str, series: Series) -> Figure:
    panels = []
    for lr in LRS:
        runs = {arm: logs[0] for arm in ARMS if (logs := found.logs(arm, S, lr))}
        panels.append(
            Panel(f"learning rate {lr:g}", [line(arm, *series(run), (0, STEPS)) for arm, run in runs.items()])
        )
    return Figure(name=name, title=title, x="step", y=y, panels=panels, log_y=True)


QUESTION = Question(
    "stable-adamw",
    __doc__,
    ARMS,
    check,
    sizes=(S,),
    lrs=LRS,
    seeds=4,
    steps=STEPS,
    paper="P1",
    subject="trimtab.lab.changing:clip",
    fields=CHANGING,
    figures=figures,
    tables=tables,
    measured=5.0,
    second=True,
)
