"""Is 8-bit optimizer state as stable as 32-bit state? Dettmers et al. 2022, with the sensitivity of Wortsman et al.
2023b. Tensors of fewer than 4096 values keep 32 bits, so the model has larger matrices.
"""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, M, Question, at_most, judge

ARMS = {
    "32 bits": (),
    "8 bits": ("8-bit",),
    "8 bits, dynamic table": ("8-bit=dynamic:256",),
    "8 bits, stable embedding": ("8-bit", "stable-embedding"),
}


def check(found: Evidence) -> Checks:
    for arm in list(ARMS)[1:]:
        claim = f"{arm}, at {M}: sensitivity at most 25% higher"
        yield judge(claim, found.sensitivity("32 bits", arm), at_most(1.25))
        yield judge(f"{arm}, at {M}: best loss at most 1% higher", found.best("32 bits", arm), at_most(1.01))


QUESTION = Question("eight-bits", __doc__, ARMS, check, always=STEADIED, paper="P2")
