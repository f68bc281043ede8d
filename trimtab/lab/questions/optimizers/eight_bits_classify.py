"""Does a classifier train as well with 8-bit optimizer state? Dettmers et al. 2022, Table 1 (GLUE: 88.7 and 88.6).

GLUE needs a pretrained model. Here a Transformer encoder learns from which of 20 modules of the standard library 64
bytes come (trimtab/lab/classification.py); the loss is that of the held-out fifth of each module, and guessing has
ln 20 = 3.0. As in the paper's finetuning there is no stable embedding. Arms and rules are those of `eight-bits-clip`.
"""

from trimtab.lab.questions.optimizers.eight_bits_clip import ARMS, SIZE, check
from trimtab.lab.questions.question import Question

QUESTION = Question(
    "eight-bits-classify",
    __doc__,
    ARMS,
    check,
    sizes=(SIZE,),
    lrs=(1e-3, 3e-3),
    steps=800,
    paper="P2",
    subject="trimtab.lab.classification:build",
    fields={"batch": 32, "eval_batches": 32},
    measured=5.0,
)
