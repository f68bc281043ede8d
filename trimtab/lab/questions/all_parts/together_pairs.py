"""Which two of SwitchBack, 8-bit StableAdamW, qk-norm, z-loss and sequence length warmup conflict? No paper has all of
them, so none has tried the pairs.

The model, its training and the lower learning rate are those of `together`, which has each part alone and all but one:
a third part could hide a conflict of two there. At its higher one, pairs without qk-norm fail anyway. A pair conflicts
if its loss is more than 2 % above that of its better part alone, or if it takes more than 10 % longer than its slower
part alone.
"""

from collections.abc import Iterable
from itertools import combinations
from statistics import median

from trimtab.analysis.answers import Table
from trimtab.lab.questions.all_parts.together import FIELDS, LIMIT, LR, PARTS, PLAIN, SIZE, STEPS, losses
from trimtab.lab.questions.question import Checks, Evidence, Question, Values, judge

PAIRS = {f"{a} + {b}": (a, b) for a, b in combinations(PARTS, 2)}
ARMS = {
    PLAIN: (),
    **{part: (switch,) for part, switch in PARTS.items()},
    **{pair: tuple(PARTS[part] for part in parts) for pair, parts in PAIRS.items()},
}
SLOWER = 1.1
WORST = 3  # pairs that a check names


def check(found: Evidence) -> Checks:
    excess = {pair: _loss(found, pair) for pair in PAIRS}
    claim = "no pair has a loss more than 2% above that of its better part alone"
    yield judge(claim, _highest(excess), lambda *x: max(x) <= LIMIT, note="the highest ratios")
    times = {pair: _time(found, pair) for pair in PAIRS}
    claim = "no pair takes more than 10% longer than its slower part alone"
    yield judge(claim, _highest(times), lambda *x: max(x) <= SLOWER, note="the highest ratios")


def _highest(ratios: Values) -> Values:
    """The worst pairs; all of them, if one is not known."""
    if None in ratios.values():
        return ratios
    return dict(sorted(ratios.items(), key=lambda item: -(item[1] or 0))[:WORST])


def _loss(found: Evidence, pair: str) -> float | None:
    """Over that of the better part alone."""
    together, *alone = losses(found, (pair, *PAIRS[pair]), LR).values()
    return None if together is None or None in alone else together / min(x for x in alone if x is not None)


def _time(found: Evidence, pair: str) -> float | None:
    """Over that of the slower part alone."""
    together, *alone = (_seconds(found, arm) for arm in (pair, *PAIRS[pair]))
    return None if together is None or None in alone else together / max(x for x in alone if x is not None)


def _seconds(found: Evidence, arm: str) -> float | None:
    runs = found.runs(arm, SIZE) if found.curve(arm, SIZE) else []
    return median(run.seconds for run in runs) if runs else None


def tables(found: Evidence) -> Iterable[Table]:
    rows = []
    for pair in PAIRS:
        rows.append((pair, *losses(found, (pair, *PAIRS[pair]), LR).values(), _loss(found, pair), _time(found, pair)))
    columns = ("", "loss", "first alone", "second alone", "over the better alone", "seconds, over the slower alone")
    yield Table("Every pair", columns, rows)


QUESTION = Question(
    "together-pairs",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=(LR,),
    steps=STEPS,
    paper="all",
    fields=FIELDS | {"eval_every": STEPS // 2, "eval_batches": 8},
    tables=tables,
    curves=False,
)
