"""Does AdaGrad train as well with 8-bit state? Dettmers et al. 2022, appendix: perplexity about 19.4 with 32 bits and
19.7 with 8 (the table itself was not at hand), above the 16.7 of Adam.

AdaGrad adds up squared gradients and never forgets. The later the step, the smaller is what it adds, until it is less
than half of the distance between two codes: codes that round to nearest then stop growing. Arms and text are those of
`eight-bits`, at the learning rates of AdaGrad.

After a first run: the best learning rate of AdaGrad was 0.1, then the end of the grid, which now ends at 0.3. Longer
runs were not tried.
"""

import math
from collections.abc import Iterable

from trimtab.analysis.answers import Table
from trimtab.lab.questions.optimizers.eight_bits import LATER, OURS, PUBLISHED
from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, Values, at_most, judge

EXACT = "AdaGrad, 32 bits"
ARMS = {
    "AdamW, 32 bits": (),
    EXACT: ("adagrad",),
    "published": ("adagrad", PUBLISHED),
    "published, blocks of 256": ("adagrad", LATER),
    "8 bits": ("adagrad", OURS),
}
LOST = 1.02  # of the perplexity; 19.7 / 19.4 = 1.015


def check(found: Evidence) -> Checks:
    perplexity = _perplexity(found)
    for arm in ("published", "published, blocks of 256", "8 bits"):
        claim = f"{arm}: perplexity per byte at most 2% above that of AdaGrad with 32 bits"
        yield judge(claim, {name: perplexity[name] for name in (EXACT, arm)}, at_most(LOST))
    claim = "AdaGrad has a higher perplexity than AdamW"
    yield judge(claim, {name: perplexity[name] for name in ("AdamW, 32 bits", EXACT)}, lambda adam, ada: ada > adam)


def _perplexity(found: Evidence) -> Values:
    """At the best learning rate of each."""
    return {arm: None if loss is None else math.exp(loss) for arm, loss in found.best(*ARMS).items()}


def tables(found: Evidence) -> Iterable[Table]:
    rows = [(arm, found.best_lr(arm), perplexity) for arm, perplexity in _perplexity(found).items()]
    yield Table("At the best learning rate, means over seeds", ("arm", "learning rate", "perplexity per byte"), rows)


QUESTION = Question(
    "adagrad",
    __doc__,
    ARMS,
    check,
    lrs=(1e-2, 3e-2, 1e-1, 3e-1),
    steps=400,
    always=STEADIED,
    paper="P2",
    tables=tables,
)
