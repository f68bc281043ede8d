"""Does a GPT with int8 linear layers train as well as with float ones? Wortsman et al. 2023a, section 2.

The paper, in CLIP: SwitchBack, whose weight gradient stays in 16 bits, matches bfloat16; LLM.int8, which quantizes the
weight gradient too, loses accuracy, the more the larger the model is. Its variants save memory (-M) or give the weight
one scale per row (-Q). Here the same in a small GPT on bytes, where inner dimensions are at most 1024 tokens; the
question clip-int8 is about CLIP. This is the second design, wider and deeper: in the first (docs/log.md) the arms
differed by as much as seeds do. Before that, single runs with seed 100 had 1.967 with float, 1.976 with SwitchBack.
"""

from collections.abc import Iterable

from trimtab.analysis.answers import Figure
from trimtab.lab.questions.low_precision.traces import loss_panels
from trimtab.lab.questions.question import STEADIED, Checks, Evidence, L, Question, at_most, judge, mean

VARIANTS = ("switchback", "switchback-m", "switchback-q")
LRS = (1e-2, 3e-2)
ARMS = {"float": (), **{kind: (kind,) for kind in (*VARIANTS, "llm-int8")}}


def check(found: Evidence) -> Checks:
    for arm in VARIANTS:
        yield judge(f"{arm}: best loss at most 1% above float", found.best("float", arm, size=L), at_most(1.01))
    for lr in LRS:
        losses = {arm: mean(run.score for run in found.runs(arm, L, lr)) for arm in ("float", *VARIANTS)}
        claim = f"at {lr:g}, too, no variant is more than 1% above float"
        yield judge(claim, losses, lambda a, *others: max(others) <= 1.01 * a)
    claim = "llm-int8 loses more than 1%, and more than every variant of SwitchBack"
    names = ("llm-int8", "float", *VARIANTS)
    yield judge(claim, found.best(*names, size=L), lambda worst, a, *others: worst > 1.01 * a and worst > max(others))


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
)
