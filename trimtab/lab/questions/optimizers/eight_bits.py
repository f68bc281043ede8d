"""Is 8-bit optimizer state as stable as 32-bit state? Dettmers et al. 2022, Table 1 (language models), with the
sensitivity of Wortsman et al. 2023b.

The paper: 8-bit Adam has the perplexity of 32-bit Adam (9.0 and 9.0; 10.62 and 10.62; 3.48 and 3.49), and Adafactor
with momentum about the same. Its settings are the arms "published": the dynamic table, one scale per 2048 values,
second moments that may become zero, and in language models the stable embedding. "8 bits" is Trimtab's default. Tensors
of fewer than 4096 values keep 32 bits, so a smaller model would have hardly any 8-bit state. A matrix has two to eight
blocks of 2048 values here, and hundreds in the paper.
"""

from trimtab.analysis.answers import Check
from trimtab.lab.questions.question import STEADIED, Checks, Evidence, M, Question, at_most, judge

OURS = "8-bit"
PUBLISHED = "8-bit=dynamic-flush:2048"
LATER = "8-bit=dynamic-flush:256"  # the block of bitsandbytes since version 0.44

ARMS = {
    "32 bits": (),
    "8 bits": (OURS,),
    "published": (PUBLISHED,),
    "32 bits, stable embedding": ("stable-embedding",),
    "published, stable embedding": (PUBLISHED, "stable-embedding"),
    "Adafactor": ("adafactor",),
}
PAIRS = (
    ("32 bits, stable embedding", "published, stable embedding"),
    ("32 bits", "8 bits"),
    ("32 bits", "published"),
)


def check(found: Evidence) -> Checks:
    for base, arm in PAIRS:
        yield judge(f"{arm}, at {M}: best loss at most 1% higher", found.best(base, arm), at_most(1.01))
        claim = f"{arm}, at {M}: sensitivity at most 25% higher"
        yield judge(claim, found.sensitivity(base, arm), at_most(1.25))
    claim = f"Adafactor with momentum, at {M}: best loss at most 1% higher"
    yield judge(claim, found.best("32 bits", "Adafactor"), at_most(1.01))


def no_worse(found: Evidence, arm: str, *, base: str = "32 bits", size: str = M) -> Check:
    """For losses that vary more between seeds than 1%; more than 5% is worse in any case."""
    values = found.best(base, arm, size=size)
    values["range over seeds"] = found.noise(base, size) if found.curve(base, size) else None
    claim = f"{arm}, at {size}: best loss at most 1% higher, or within the range over the seeds of {base}"
    return judge(claim, values, lambda a, b, noise: b <= max(1.01 * a, min(a + noise, 1.05 * a)))


QUESTION = Question(
    "eight-bits", __doc__, ARMS, check, lrs=(1e-2, 3e-2, 1e-1, 3e-1), steps=400, always=STEADIED, paper="P2"
)
