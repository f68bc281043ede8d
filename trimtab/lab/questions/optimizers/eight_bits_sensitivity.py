"""Does 8-bit optimizer state need other hyper-parameters than 32-bit state? Dettmers et al. 2022, Figure 3.

The paper: if the learning rate, beta1, beta2 or eps is varied, one at a time, the gap between 8 and 32 bits stays near
zero, so no hyper-parameter has to be tuned again. Its baseline has beta1 0.9, beta2 0.995 and eps 1e-7, as here; it has
two seeds and a model of 209M parameters. Here every setting is run at all learning rates.
"""

from collections.abc import Iterator
from statistics import fmean

from trimtab.analysis.answers import Figure, Line, Panel
from trimtab.lab.questions.optimizers.eight_bits import OURS, PUBLISHED
from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, judge

SIZE, LRS, LR = "2x64", (3e-3, 1e-2, 3e-2), 1e-2  # LR: where the others are varied
METHODS = {"32 bits": (), "published": (PUBLISHED,), "8 bits": (OURS,)}
BASELINE = {"beta1": 0.9, "beta2": 0.995, "eps": 1e-7}
VARIED = {"beta1": (0.8, 0.95), "beta2": (0.98, 0.999), "eps": (1e-8, 1e-6)}
SETTINGS = {"baseline": (), **{f"{name} {x:g}": (f"{name}={x:g}",) for name, values in VARIED.items() for x in values}}
ARMS = {
    f"{method}, {setting}": (*switches, *changes)
    for method, switches in METHODS.items()
    for setting, changes in SETTINGS.items()
}


def check(found: Evidence) -> Checks:
    for method in ("published", "8 bits"):
        gaps = _gaps(found, method)
        average = {"mean gap": fmean(max(gap, 0.0) for gap in gaps) if gaps else None}
        yield judge(
            f"{method}: on average the loss is at most 1% higher, where lower losses count as equal",
            average,
            lambda x: x <= 0.01,
            note="a share",
        )
        claim = f"{method}: at every setting and learning rate the loss is at most 2% higher"
        largest = {"largest gap": max(gaps, default=None), "smallest gap": min(gaps, default=None)}
        yield judge(claim, largest, lambda most, least: most <= 0.02, note="shares")


def _gaps(found: Evidence, method: str) -> list[float]:
    """Relative differences from 32 bits, of all settings and learning rates; empty if a run is missing."""
    gaps = []
    for setting in SETTINGS:
        base, other = (found.curve(f"{name}, {setting}", SIZE) for name in ("32 bits", method))
        if base is None or other is None:
            return []
        gaps += [b / a - 1 for a, b in zip(base.loss, other.loss, strict=True)]
    return gaps


def figures(found: Evidence) -> Iterator[Figure]:
    names = {"lr": "learning rate", "beta1": "beta1", "beta2": "beta2", "eps": "eps"}
    for name, label in names.items():
        lines = [_line(found, method, name) for method in METHODS]
        yield Figure(
            name=name,
            title=f"Validation loss against {label}, the others as in the baseline",
            x=label,
            y="validation loss",
            panels=[Panel(SIZE, lines)],
            log_x=name in ("lr", "eps"),
        )


def _line(found: Evidence, method: str, name: str) -> Line:
    """Mean and range over the seeds, by the values of one hyper-parameter."""
    if name == "lr":
        places = [(lr, "baseline", lr) for lr in LRS]
    else:
        low, high = VARIED[name]
        places = [(low, f"{name} {low:g}", LR), (BASELINE[name], "baseline", LR), (high, f"{name} {high:g}", LR)]
    x, y, least, most = [], [], [], []
    for value, setting, lr in places:
        curve = found.curve(f"{method}, {setting}", SIZE)
        if curve is not None and lr in curve.lrs:
            at = curve.lrs.index(lr)
            x.append(value)
            y.append(curve.loss[at])
            least.append(curve.low[at])
            most.append(curve.high[at])
    return Line(method, x, y, least, most)


QUESTION = Question(
    "eight-bits-sensitivity",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=LRS,
    steps=200,
    always=(*STEADIED, *(f"{name}={x:g}" for name, x in BASELINE.items())),
    paper="P2",
    figures=figures,
    curves=False,
)
