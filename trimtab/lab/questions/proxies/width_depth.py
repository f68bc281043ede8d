"""Does depth raise the sensitivity faster than width? Figures 7, E.2 and E.3 of Wortsman et al. 2023b.

Both begin near 10 thousand parameters and end above 100 thousand. In the paper depth does, and growing both together
gives the best loss. Faster means by a quarter at least, and the best means by 1 %. The grid begins at 0.01: below,
small models are too slow in short runs, which is no instability.

After the runs: the ranges over the seeds overlap, so the difference of the slopes is not certain; on another processor
the second claim held. The edge of stability says the opposite: 1x32 fails from a lower learning rate on than 9x32.
"""

from collections.abc import Iterator
from math import log10

import numpy as np

from trimtab.analysis.answers import Figure
from trimtab.lab.questions.proxies.figures import sensitivity_figure
from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, Values, judge

WIDTHS, DEPTHS, JOINT = ("3x16", "3x32", "3x64"), ("1x32", "3x32", "9x32"), "4x48"
SIZES = (*WIDTHS, "1x32", "9x32", JOINT)
ARM = "steadied"


def check(found: Evidence) -> Checks:
    ladders = {"width": WIDTHS, "depth": DEPTHS}
    above = "the part of the sensitivity above the best learning rate"
    for part, words in (("sensitivity", "sensitivity"), ("unstable", above)):
        slopes = {along: _slope(found, sizes, part) for along, sizes in ladders.items()}
        claim = f"{words} grows faster with the depth than with the width"
        yield judge(
            claim, slopes, lambda width, depth: depth > max(1.25 * width, 0), note="nats per decade of parameters"
        )
    claim = f"{JOINT} has a lower loss than models of as many parameters that grow in one direction only"
    yield judge(claim, _losses(found), lambda joint, depth, width: joint < 0.99 * min(depth, width))


def _slope(found: Evidence, sizes: tuple[str, ...], part: str) -> float | None:
    curves = [curve for size in sizes if (curve := found.curve(ARM, size)) is not None and curve.params]
    if len(curves) < len(sizes):
        return None
    x = [log10(curve.params or 1) for curve in curves]
    return float(np.polyfit(x, [getattr(curve, part) for curve in curves], 1)[0])


def _losses(found: Evidence) -> Values:
    """At the best learning rate. 9x32 has exactly as many parameters as 4x48; along the width, between two sizes."""
    joint, deep, narrow, wide = (found.curve(ARM, size) for size in (JOINT, DEPTHS[-1], *WIDTHS[1:]))
    width = None
    if joint and narrow and wide:
        at, *ends = (log10(curve.params or 1) for curve in (joint, narrow, wide))
        width = float(np.interp(at, ends, [narrow.best_loss, wide.best_loss]))
    losses = {size: curve.best_loss if curve else None for size, curve in ((JOINT, joint), (DEPTHS[-1], deep))}
    return losses | {"width": width}


def figures(found: Evidence) -> Iterator[Figure]:
    for name, sizes in (("width", WIDTHS), ("depth", DEPTHS)):
        figure = sensitivity_figure(found, [ARM], sizes)
        title = f"Sensitivity to the learning rate along the {name}"
        yield Figure(**{**vars(figure), "name": f"sensitivity-{name}", "title": title})


QUESTION = Question(
    "width-depth",
    __doc__,
    {ARM: STEADIED},
    check,
    sizes=SIZES,
    lrs=(0.01, 0.03, 0.1, 0.3, 1.0),
    figures=figures,
)
