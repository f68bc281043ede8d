"""Does a CLIP train as well with 8-bit optimizer state? Dettmers et al. 2022 for vision (ResNets, Table 1), with the
model of Wortsman et al. 2023a.

The paper: 77.2 and 77.1 on ImageNet, 67.4 and 67.3 for MoCo, with momentum. A CLIP with AdamW has both a Transformer
over patches and a text tower with an embedding. At this width the matrices have at least 4096 values, so they have 8
bits.

After the runs: the claims are about the best learning rate. At the other one all 8-bit arms are worse than 32 bits, and
seeds differ too much to say why.
"""

from trimtab.lab.questions.optimizers.eight_bits import LATER, OURS, PUBLISHED, no_worse
from trimtab.lab.questions.question import Checks, Evidence, Question

SIZE = "2x64"
ARMS = {"32 bits": (), "published": (PUBLISHED,), "published, blocks of 256": (LATER,), "8 bits": (OURS,)}


def check(found: Evidence) -> Checks:
    for arm in list(ARMS)[1:]:
        yield no_worse(found, arm, size=SIZE)


QUESTION = Question(
    "eight-bits-clip",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=(1e-3, 3e-3),
    steps=400,
    paper="P2",
    subject="clip-lab",
)
