"""Does a CLIP with int8 linear layers train as well as with float ones? Wortsman et al. 2023a, sections 2.2 and 2.3.

The paper, ViT-Huge on LAION: SwitchBack is within 0.1 points of bfloat16 in zero-shot accuracy, LLM.int8 5.9 below.
Here a CLIP of 57k parameters on drawn shapes: it names pictures of four concepts that it never saw, such as "green
diamond", from prompts with every size and place. There are 40 such pictures, so one is 2.5 points of a run and half a
point of the mean over seeds. The learning rates are the best two of three that were tried with seed 100 in float;
at 0.003 the losses of that seed were 0.371 with LLM.int8 and 0.376 with SwitchBack, seen before the rules were written.

After the runs: seeds of float differ by far more than the limits, so these claims, held or not, say little about int8.
The GPT of `switchback` has less noise.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

from trimtab.analysis.answers import Figure, Table
from trimtab.lab.questions.low_precision.switchback import ARMS, VARIANTS
from trimtab.lab.questions.low_precision.traces import loss_panels
from trimtab.lab.questions.question import Checks, Evidence, Question, S, Values, judge
from trimtab.train.zero_shot import ZeroShot

LRS = (1e-3, 3e-3)
POINTS = 0.05  # accuracy that may be lost: about the standard deviation between seeds
LOST = 0.01  # share of the improvement by training


def check(found: Evidence) -> Checks:
    for arm in VARIANTS:
        claim = f"{arm}: zero-shot accuracy at most 5 points below float"
        yield judge(claim, accuracy(found, "float", arm), lambda a, b: b >= a - POINTS)
    first = max((run.first for run in found.runs("float", S)), default=0.0)
    for arm in VARIANTS:
        claim = f"{arm}: loss above float by at most 1% of what training gained"
        yield judge(claim, found.best("float", arm, size=S), lambda a, b: b - a <= LOST * (first - a))
    claim = "llm-int8: zero-shot accuracy more than 5 points below float, and below every variant of SwitchBack"
    names = ("llm-int8", "float", *VARIANTS)
    yield judge(claim, accuracy(found, *names), lambda worst, a, *others: worst < a - POINTS and worst < min(others))


def accuracy(found: Evidence, *arms: str) -> Values:
    """Mean over seeds at the arm's best learning rate."""
    return {arm: fmean(one.top1 for one in runs) if (runs := at_best(found, arm)) else None for arm in arms}


def at_best(found: Evidence, arm: str, size: str = S) -> Sequence[ZeroShot]:
    lr = found.best_lr(arm, size)
    return found.zero_shot(arm, size, lr) if lr else ()


def tables(found: Evidence) -> Iterable[Table]:
    yield accuracy_table(found, ARMS)


def accuracy_table(found: Evidence, arms: Iterable[str], size: str = S) -> Table:
    rows = []
    for arm in arms:
        if runs := at_best(found, arm, size):
            tops = [run.top1 for run in runs]
            spread = f"{min(tops):.3g} to {max(tops):.3g}"
            curve = found.curve(arm, size)
            loss = curve.best_loss if curve else None
            rows.append((arm, fmean(tops), spread, fmean(run.single for run in runs), runs[0].chance, loss))
    columns = ("arm", "zero-shot accuracy", "seeds", "with one prompt", "chance", "loss")
    return Table("Zero-shot accuracy at the best learning rate, mean over seeds", columns, rows)


def figures(found: Evidence) -> Iterable[Figure]:
    yield Figure(
        name="losses",
        title="Training loss, mean and range over seeds",
        x="step",
        y="training loss",
        panels=loss_panels(found, ARMS, size=S, lrs=LRS),
        log_y=True,
    )


QUESTION = Question(
    "clip-int8",
    __doc__,
    ARMS,
    check,
    sizes=(S,),
    lrs=LRS,
    seeds=5,
    steps=500,
    paper="P1",
    subject="clip-lab",
    figures=figures,
    tables=tables,
)
