"""Does a GPT with int8 linear layers train as well as with float ones? Wortsman et al. 2023a, section 2.

The paper, in CLIP: SwitchBack, whose weight gradient stays in 16 bits, matches bfloat16; LLM.int8, which quantizes the
weight gradient too, loses accuracy, the more the larger the model is. Its variants save memory (-M) or give the weight
one scale per row (-Q). Here the same in a small GPT on bytes, where inner dimensions are at most 1024 tokens; the
question clip-int8 is about CLIP. This is the second design, wider and deeper: in the first (docs/log.md) the arms
differed by as much as seeds do. Before that, single runs with seed 100 had 1.967 with float, 1.976 with SwitchBack.

The zero-shot task is the last word of a passage, the right one among four. Its claim was added while the runs of this
design were under way, before its numbers were read.

After the runs: the seeds of one arm differ by up to 2 %, more than the arms, so that SwitchBack cannot be told from
float here, and neither can LLM.int8, which has the lowest loss at the lower learning rate.
"""

from collections.abc import Iterable

from trimtab.analysis.answers import Figure, Table
from trimtab.lab.questions.low_precision.traces import loss_panels
from trimtab.lab.questions.question import STEADIED, Checks, Evidence, L, Question, at_most, judge, mean

VARIANTS = ("switchback", "switchback-m", "switchback-q")
LRS = (1e-2, 3e-2)
POINTS = 0.05  # of accuracy
ARMS = {"float": (), **{kind: (kind,) for kind in (*VARIANTS, "llm-int8")}}


def check(found: Evidence) -> Checks:
    for arm in VARIANTS:
        yield judge(f"{arm}: best loss at most 1% above float", found.best("float", arm, size=L), at_most(1.01))
    for lr in LRS:
        losses = {arm: mean(run.score for run in found.runs(arm, L, lr)) for arm in ("float", *VARIANTS)}
        claim = f"at {lr:g}, too, no variant is more than 1% above float"
        yield judge(claim, losses, lambda a, *others: max(others) <= 1.01 * a)
    right = {arm: accuracy(found, arm) for arm in ("float", *VARIANTS)}
    claim = "zero-shot, no variant is more than 5 points below float: the last word of a passage, one of four"
    yield judge(claim, right, lambda a, *others: min(others) >= a - POINTS)
    claim = "llm-int8 loses more than 1%, and more than every variant of SwitchBack"
    names = ("llm-int8", "float", *VARIANTS)
    yield judge(claim, found.best(*names, size=L), lambda worst, a, *others: worst > 1.01 * a and worst > max(others))


def accuracy(found: Evidence, arm: str) -> float | None:
    """Zero-shot, at the best learning rate, mean over the seeds."""
    best = found.best_lr(arm, L)
    return None if best is None else mean(words.choice for words in found.last_words(arm, L, best))


def tables(found: Evidence) -> Iterable[Table]:
    rows = [(arm, loss, accuracy(found, arm)) for arm, loss in found.best(*ARMS, size=L).items()]
    yield Table("At the best learning rate, means over seeds", ("arm", "validation loss", "last word of four"), rows)


def figures(found: Evidence) -> Iterable[Figure]:
    yield Figure(
        name="losses",
        title="Training loss, mean and range over seeds",
        x="step",
        y="training loss",
        panels=loss_panels(found, ARMS, size=L, lrs=(1e-2,)),
        log_y=True,
    )


QUESTION = Question(
    "switchback",
    __doc__,
    ARMS,
    check,
    sizes=(L,),
    lrs=LRS,
    steps=400,
    always=STEADIED,
    paper="P1",
    figures=figures,
    tables=tables,
    second=True,
)
