"""Does depth raise the sensitivity faster than width? Figure 7 of Wortsman et al. 2023b."""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, Values, judge, known
from trimtab.lab.sizes import LADDERS

SIZES = (*LADDERS["width"], *(size for size in LADDERS["depth"] if size not in LADDERS["width"]))


def check(found: Evidence) -> Checks:
    slopes: Values = {"width": None, "depth": None}
    for slope in found.findings.slopes:
        ladder = LADDERS.get(slope.along, ())
        complete = {*ladder} <= {*slope.sizes} and all(found.curve("steadied", size) for size in ladder)
        if slope.study == found.study and slope.along in slopes and complete:
            slopes[slope.along] = known(slope.value)
    claim = "sensitivity grows faster with the depth than with the width"
    yield judge(claim, slopes, lambda width, depth: depth > width, note="per decade of parameters")


QUESTION = Question("width-depth", __doc__, {"steadied": STEADIED}, check, sizes=SIZES)
