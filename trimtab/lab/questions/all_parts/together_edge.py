"""Do the parts together move the edge of stability? Plain AdamW in float32 against SwitchBack, 8-bit StableAdamW,
qk-norm, z-loss and sequence length warmup at once; Wortsman et al. 2023b measure it by learning-rate sensitivity.

Here 2x128 on the same tokens over two and a half decades of learning rates. The edge is where the loss crosses the
limit of the lab, 0.1 nats above the best or two standard errors, between two rates of the grid. Since `together` found
that qk-norm alone does most at high learning rates, it is an arm of its own. Sequence length warmup takes more steps
for the same tokens; "all but sequence length warmup" in `together` is the comparison at equal steps.
"""

from trimtab.lab.questions.all_parts.together import ALL, ARMS, FIELDS, PLAIN, SIZE, STEPS
from trimtab.lab.questions.question import Checks, Evidence, Question, Values, falls, judge

QK_NORM = "qk-norm"
LRS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def check(found: Evidence) -> Checks:
    yield judge("all together are less sensitive to the learning rate", found.sensitivity(PLAIN, ALL, size=SIZE), falls)
    edges: Values = {arm: _edge(found, arm) for arm in (PLAIN, ALL)}
    claim = f"the edge of stability of all together is at a higher learning rate ({LRS[-1]:g}: at the end of the grid)"
    yield judge(claim, edges, lambda plain, together: together > plain)
    alone: Values = {arm: _edge(found, arm) for arm in (QK_NORM, ALL)}
    claim = "the edge of stability of all together is also higher than that of qk-norm alone"
    yield judge(claim, alone, lambda norm, together: together > norm)
    claim = "all together are less sensitive than qk-norm alone"
    yield judge(claim, found.sensitivity(QK_NORM, ALL, size=SIZE), falls)
    claim = "the best loss of all together is at most that of plain AdamW, and of qk-norm alone"
    best = found.best(PLAIN, QK_NORM, ALL, size=SIZE)
    yield judge(claim, best, lambda plain, norm, together: together <= min(plain, norm))


def _edge(found: Evidence, arm: str) -> float | None:
    curve = found.curve(arm, SIZE)
    if curve is None:
        return None
    if not curve.learned:
        return LRS[0]
    return LRS[-1] if curve.edge is None else curve.edge


QUESTION = Question(
    "together-edge",
    __doc__,
    {arm: ARMS[arm] for arm in (PLAIN, ALL, QK_NORM)},
    check,
    sizes=(SIZE,),
    lrs=LRS,
    steps=STEPS,
    paper="all",
    fields=FIELDS | {"eval_every": STEPS // 2, "eval_batches": 8},
)
