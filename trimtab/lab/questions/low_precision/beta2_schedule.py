"""Is a schedule of beta2 better than a constant? Wortsman et al. 2023a, appendix.

The paper, CLIP ViT-Huge with update clipping: beta2 = 1 - step^-power, as in Adafactor, with powers from 0.45 to 0.65,
is no better than a constant. A schedule follows the gradients early in a run and averages over more steps later.

Here StableAdamW in the GPT of `stale-moment`, whose gradients are 16 times larger in 40 of every 200 steps, so it
matters how quickly the second moment follows. Powers of 0.45, 0.65 and 0.8 end at beta2 0.944, 0.984 and 0.994.
"""

from collections.abc import Iterable
from dataclasses import replace

from trimtab.analysis.answers import Table
from trimtab.lab.questions.low_precision import stale_moment
from trimtab.lab.questions.low_precision.stale_moment import LRS, SIZE, changed_loss
from trimtab.lab.questions.question import Checks, Evidence, Values, judge, mean

CONSTANTS = {f"beta2 {beta:g}": (f"beta2={beta:g}", "stable-adamw") for beta in (0.9, 0.95, 0.99, 0.999)}
SCHEDULES = {f"power {power:g}": (f"beta2-power={power:g}",) for power in (0.45, 0.5, 0.65, 0.8)}
ARMS = CONSTANTS | SCHEDULES
MARGIN = 0.01  # more than this is better


def check(found: Evidence) -> Checks:
    ends = found.best(*ARMS, size=SIZE)
    changed = {arm: changed_loss(found, arm) for arm in ARMS}
    for what, losses in (("validation loss", ends), ("training loss where gradients are larger", changed)):
        claim = f"no schedule has a {what} more than 1% below that of the best constant"
        yield judge(claim, _best(losses), lambda constant, schedule: schedule >= (1 - MARGIN) * constant)
    constants = {arm: ends[arm] for arm in CONSTANTS}
    claim = "control: beta2 matters here, the worst constant is more than 1% above the best"
    yield judge(claim, constants, lambda *losses: max(losses) > (1 + MARGIN) * min(losses))


def _best(losses: Values) -> Values:
    """The lowest of each kind, with its name; all losses, if one is not known."""
    if None in losses.values():
        return losses
    known = {arm: loss for arm, loss in losses.items() if loss is not None}
    return {arm: known[arm] for kind in (CONSTANTS, SCHEDULES) for arm in [min(kind, key=known.__getitem__)]}


def tables(found: Evidence) -> Iterable[Table]:
    rows = [
        (arm, f"{lr:g}", changed_loss(found, arm, [lr]), mean(run.score for run in found.runs(arm, SIZE, lr)))
        for arm in ARMS
        for lr in LRS
    ]
    columns = ("arm", "learning rate", "training loss where gradients are larger", "validation loss")
    yield Table("Means over seeds", columns, rows)


QUESTION = replace(
    stale_moment.QUESTION, name="beta2-schedule", doc=__doc__, arms=ARMS, check=check, figures=None, tables=tables
)
