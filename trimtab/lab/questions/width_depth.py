"""Which way of growing makes a model more sensitive: wider or deeper? Figure 7 of Wortsman et al. 2023b."""

from trimtab.analysis.findings import Findings
from trimtab.lab.questions.asking import STEADIED, Check, Seen, ask, judge, known
from trimtab.lab.sizes import LADDERS
from trimtab.lab.study import Study

NAME = "width-depth"
SIZES = (*LADDERS["width"], *(size for size in LADDERS["depth"] if size not in LADDERS["width"]))


def study() -> Study:
    """About 19 minutes on two cores."""
    question = "Does depth raise the sensitivity faster than width?"
    return ask(NAME, question, arms={"steadied": STEADIED}, sizes=SIZES)


def answer(findings: Findings) -> list[Check]:
    seen = Seen(findings, NAME)
    slopes: dict[str, float | None] = {"width": None, "depth": None}
    for slope in findings.slopes:
        whole = {*LADDERS.get(slope.along, ("?",))} <= {*slope.sizes}
        if slope.study == NAME and slope.along in slopes and whole:
            slopes[slope.along] = known(slope.value)
    for along in slopes:
        if any(seen.curve("steadied", size) is None for size in LADDERS[along]):
            slopes[along] = None
    claim = "sensitivity grows faster along depth than along width"
    return [judge(claim, slopes, lambda width, depth: depth > width, note="per decade of parameters")]
