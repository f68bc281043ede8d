"""Which parts of the stable embedding help? Dettmers et al. 2022, section 2.3 and appendix: layer norm, Xavier
initialisation and 32-bit state for the embedding.

The paper's reasons: word frequencies are uneven, so a few rows get large gradients; the norm keeps the variance of the
output near one, and Xavier initialisation has no extreme values. Its table of the single parts was not at hand, so the
claims are those of the text: each part helps, or does no harm. `ablation` has all parts together.

Here all eight combinations with the 8-bit state of the paper (dynamic table, one scale per 2048 values, second moments
that may become zero) and beta2 0.999. Perplexities are per byte, at the best of two learning rates.

After the runs: the layer norm alone has all of the gain. Xavier initialisation alone raises the perplexity by 5 %, more
than its seeds differ, and 32-bit state changes it by -1.2 to 1.4 %, less than seeds differ: that is 1 to 5 %, so the
limit of 1 % is too low. The tokens are bytes, of which few are as rare as rare words.
"""

import math
from collections.abc import Iterable
from itertools import product

from trimtab.analysis.answers import Table
from trimtab.lab.questions.optimizers.eight_bits import PUBLISHED
from trimtab.lab.questions.question import Checks, Evidence, M, Question, Values, falls, judge

PARTS = ("norm", "Xavier", "32-bit state")
NONE, ALL = "none", "all three"
EMBEDDINGS = {(): (), ("norm",): ("stable-embedding=norm",), ("Xavier",): ("stable-embedding=xavier",)}
RANGE = 1.01  # of the perplexity; set before the runs


def _name(parts: tuple[str, ...]) -> str:
    return {0: NONE, len(PARTS): ALL}.get(len(parts), ", ".join(parts))


def _switches(parts: tuple[str, ...]) -> tuple[str, ...]:
    embedding = EMBEDDINGS.get(tuple(part for part in parts if part != "32-bit state"), ("stable-embedding",))
    return (*embedding, *(() if "32-bit state" in parts else ("8-bit-embedding",)))


CHOSEN = [tuple(part for part, has in zip(PARTS, row, strict=True) if has) for row in product((0, 1), repeat=3)]
ARMS = {_name(parts): _switches(parts) for parts in CHOSEN}


def check(found: Evidence) -> Checks:
    perplexity = _perplexity(found)
    claim = "all three parts together lower the perplexity"
    yield judge(claim, {arm: perplexity[arm] for arm in (NONE, ALL)}, falls)
    for part in PARTS:
        claim = f"{part} alone does not raise the perplexity by more than 1%"
        yield judge(claim, {arm: perplexity[arm] for arm in (NONE, part)}, lambda a, b: b <= RANGE * a)
    for part in PARTS:
        others = _name(tuple(other for other in PARTS if other != part))
        claim = f"without {part} the perplexity is not more than 1% below that with all three"
        yield judge(claim, {arm: perplexity[arm] for arm in (ALL, others)}, lambda a, b: RANGE * b >= a)


def _perplexity(found: Evidence) -> Values:
    return {arm: None if loss is None else math.exp(loss) for arm, loss in found.best(*ARMS).items()}


def tables(found: Evidence) -> Iterable[Table]:
    perplexity = _perplexity(found)
    base = perplexity[NONE]
    rows = []
    for parts in CHOSEN:
        value = perplexity[_name(parts)]
        change = None if value is None or base is None else 100 * (value / base - 1)
        noise = found.noise(_name(parts))  # in nats: a relative range of the perplexity
        rows.append((*("yes" if part in parts else "no" for part in PARTS), value, change, 100 * math.expm1(noise)))
    columns = ("perplexity per byte", "change, %", "range over seeds, %")
    yield Table("Every combination", (*PARTS, *columns), rows)


QUESTION = Question(
    "embedding-parts",
    __doc__,
    ARMS,
    check,
    sizes=(M,),
    lrs=(1e-2, 3e-2),
    steps=200,
    always=("beta2=0.999", PUBLISHED),
    paper="P2",
    tables=tables,
    curves=False,
)
