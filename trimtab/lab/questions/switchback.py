"""Which linear layers are as stable as float? Wortsman et al. 2023a, sections 2 and 3.

There, float8 with one scale per tensor diverges at a billion weights, SwitchBack does not, and residual branches that
start at zero (layer-scale) prevent the divergence. At this size all may train; then the losses differ little.
"""

from trimtab.lab.questions.question import STEADIED, Checks, Evidence, Question, at_most, judge

# Small quantized layers take about twice as long as the estimate for float ones.
ARMS = {
    "float": (),
    "switchback": ("switchback",),
    "llm-int8": ("llm-int8",),
    "fp8-switchback": ("fp8-switchback",),
    "fp8-tensorwise": ("fp8-tensorwise",),
    "fp8-tensorwise, layer-scale": ("fp8-tensorwise", "layer-scale=0"),
}


def check(found: Evidence) -> Checks:
    for arm in ("switchback", "fp8-switchback"):
        yield judge(f"{arm}: best loss at most 1% above float", found.best("float", arm), at_most(1.01))
        yield judge(f"{arm}: sensitivity at most 25% higher", found.sensitivity("float", arm), at_most(1.25))
    yield judge("switchback is not worse than llm-int8", found.best("llm-int8", "switchback"), at_most(1.005))
    claim = "float8 with a scale per row is not worse than with one per tensor"
    yield judge(claim, found.best("fp8-tensorwise", "fp8-switchback"), at_most(1.005))


QUESTION = Question("switchback", __doc__, ARMS, check, lrs=(1e-3, 3e-3, 1e-2, 3e-2, 1e-1), always=STEADIED, paper="P1")
