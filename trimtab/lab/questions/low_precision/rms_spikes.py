"""Do RMS spikes precede loss spikes? Wortsman et al. 2023a, section 3.4 and appendix.

The paper, CLIP ViT-Huge: 28 of 30 loss spikes begin 1 to 8 steps after a spike of RMS_t in the patch embedding, and 1%
would by chance. Here a small CLIP with batches of half of all pairs. Earlier runs (docs/results/spikes.md, another loop
and other data order) said: not before the loss begins to rise, but before the peak of spikes that at least double the
loss; those p-values were exploration. The claims after the first test that finding with the rules as they were fixed
there, on these runs. The loss rises before its peak too, so the last claim asks which of the two raises an alarm first.

In the paper an MLP layer in the middle of the network shows no such relation. That claim was added after a first answer
to the others, and before its own numbers were read.

After the runs: spikes of the patch embedding do precede the onset more often than by chance, unlike in the earlier
runs, but only 16 of 36 times. That a middle MLP layer shows no relation holds for the onset only; before the peak it
has as many spikes as the patch embedding. Four of five RMS spikes are not followed by a large spike of the loss. The
two alarms of the last claim are not equal: RMS_t needs one high value of any tensor, and the loss two of ten steps. p
takes spikes as independent.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from statistics import median

import numpy as np

from trimtab.analysis.answers import Check, Figure, Line, Panel, Table
from trimtab.analysis.one_run import ANY, losses_of, rms_of
from trimtab.analysis.spike_counts import Count, count, large_spikes, race
from trimtab.lab.questions.low_precision.spikes import STEPS, UNSTEADY
from trimtab.lab.questions.question import Checks, Evidence, Question, S, judge
from trimtab.runs.reader import Floats, Ints, Run

PATCHES = "visual.conv1.weight"  # the patch embedding
MIDDLE = "visual.transformer.blocks.*.mlp.up.weight"  # of a block half way
ARMS = {"beta2 0.99": ("beta2=0.99",), "beta2 0.999": ("beta2=0.999",)}
LRS = (5e-3, 1e-2)
P = 0.01  # of chance preceding as many
QUARTER = 0.25  # of all tensors, in one step
FEWEST = 10  # spikes, for a share to mean anything


def check(found: Evidence) -> Checks:
    runs = all_runs(found)
    claim = "at least half of the loss spikes begin 1 to 8 steps after an RMS spike of the patch embedding"
    yield preceded(claim, count(runs, PATCHES, "onset") if runs else None, 0.5)
    claim = "RMS spikes of a middle MLP layer precede loss spikes no more often than by chance"
    yield related(claim, count(runs, middle(runs[0]), "onset") if runs else None, lambda hits, spikes, _, p: p >= P)
    claim = "at least three quarters of the large spikes have an RMS spike of a tensor before their peak"
    yield preceded(claim, count(runs, None, "peak") if runs else None, 0.75)
    claim = "at least half of the large spikes have an RMS spike of a quarter of all tensors at once"
    together = count(runs, None, "peak", share=QUARTER) if runs else None
    yield preceded(claim, together, 0.5)
    anyone = count(runs, None, "peak") if runs else None
    alarms = {"any tensor": false_share(anyone), "a quarter at once": false_share(together)}
    yield judge("a quarter at once has a smaller share of false alarms", alarms, lambda a, b: b < a)
    ahead = race(runs).ahead if runs else []
    first = sum(x is not None and x > 0 for x in ahead)
    values = {"RMS_t first": float(first), "large spikes": float(len(ahead))} if len(ahead) >= FEWEST else {}
    yield judge("RMS_t raises an alarm before the loss does in at least half", values, lambda a, b: a >= b / 2)


def middle(run: Run) -> str:
    """The MLP matrix of the block half way through the image tower."""
    names = sorted(name for name in rms_of(run)[1] if fnmatchcase(name, MIDDLE))
    return names[len(names) // 2]


def all_runs(found: Evidence) -> list[Run]:
    """Of both arms and learning rates; none if some are missing."""
    parts = [found.logs(arm, S, lr) for arm in ARMS for lr in LRS]
    return [run for part in parts for run in part] if all(parts) else []


def preceded(claim: str, counted: Count | None, share: float) -> Check:
    """So large a share is preceded, and chance would hardly precede as many."""
    return related(claim, counted, lambda hits, spikes, _, p: hits >= share * spikes and p < P)


def related(claim: str, counted: Count | None, rule: Callable[[float, float, float, float], bool]) -> Check:
    """The rule gets the spikes that are preceded, all spikes, the share by chance and p."""
    if counted is None or counted.loss_spikes < FEWEST:
        return Check(claim, None, f"fewer than {FEWEST} loss spikes in the finished runs")
    values = {
        "preceded": float(counted.preceded),
        "spikes": float(counted.loss_spikes),
        "share by chance": counted.chance,
        "p": counted.p,
    }
    return judge(claim, values, rule)


def false_share(counted: Count | None) -> float | None:
    return counted.false_alarms / counted.rms_spikes if counted and counted.rms_spikes else None


def tables(found: Evidence) -> Iterable[Table]:
    runs = all_runs(found)
    if not runs:
        return
    one = middle(runs[0])
    causes = ((PATCHES, PATCHES, 0.0), (one, one, 0.0), (ANY, None, 0.0), ("a quarter at once", None, QUARTER))
    rows = [
        row(f"{moment}, {name}", count(runs, tensor, moment, share=share))
        for moment in ("onset", "peak")
        for name, tensor, share in causes
    ]
    columns = ("loss spikes: RMS_t of", "loss spikes", "RMS spikes", "preceded", "by chance", "p", "median lead")
    yield Table(f"{len(runs)} runs", (*columns, "false alarms", "same step", "after"), rows)


def row(name: str, c: Count) -> tuple[str | float | None, ...]:
    lead = median(c.leads) if c.leads else None
    p = c.p if c.loss_spikes else None
    return (
        *(name, c.loss_spikes, c.rms_spikes, c.preceded, f"{c.chance:.1%}", p, lead),
        *(c.false_alarms, c.same_step, c.after),
    )


def figures(found: Evidence) -> Iterable[Figure]:
    """The largest spike of all runs, close up."""
    spikes = [(height(run, peak), run, onset, peak) for run in all_runs(found) for onset, peak in large_spikes(run)]
    if not spikes:
        return
    _, run, onset, peak = max(spikes, key=lambda spike: spike[0])
    around = (onset - 20, peak + 20)
    steps, losses = losses_of(run)
    watched, by_tensor = rms_of(run)
    largest = np.max(np.nan_to_num(list(by_tensor.values())), axis=0)
    lines = [
        line("loss", steps, losses, around),
        line("RMS_t, patch embedding", watched, by_tensor[PATCHES], around),
        line("RMS_t, largest", watched, largest, around),
    ]
    yield Figure(
        name="spike",
        title=f"The highest spike: it begins at step {onset} and is highest at {peak}",
        x="step",
        y="loss, RMS_t",
        panels=[Panel("", lines)],
        log_y=True,
    )


def height(run: Run, peak: int) -> float:
    steps, losses = losses_of(run)
    value = float(losses[np.searchsorted(steps, peak)])
    return value if np.isfinite(value) else np.inf


def line(name: str, steps: Ints, values: Floats, around: tuple[int, int]) -> Line:
    near = (steps >= around[0]) & (steps <= around[1])
    return Line(name, steps[near].tolist(), values[near].tolist())


QUESTION = Question(
    "rms-spikes",
    __doc__,
    ARMS,
    check,
    sizes=(S,),
    lrs=LRS,
    seeds=5,
    steps=STEPS,
    paper="P1",
    subject="clip-lab",
    fields=UNSTEADY,
    figures=figures,
    tables=tables,
)
