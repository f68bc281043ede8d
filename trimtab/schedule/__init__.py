"""Step or tokens in, a number out: learning rate, sequence length, batch size, β₂.

Everything here is a pure function of where the run is, so nothing needs saving but the clocks themselves: a resumed run
asks with the same step and gets the same answer. No torch: batches are cut by their own `[]`.
"""

from trimtab.schedule.batch_size import BatchWarmup, check_one_warmup
from trimtab.schedule.beta2 import Beta2
from trimtab.schedule.cut import cut
from trimtab.schedule.deepspeed import read_deepspeed
from trimtab.schedule.draw import draw
from trimtab.schedule.learning_rate import LearningRate
from trimtab.schedule.plan import Moment, Plan, plan
from trimtab.schedule.seqlen import CustomSeqLen, Lengths, SeqLenWarmup

__all__ = [
    "BatchWarmup",
    "Beta2",
    "CustomSeqLen",
    "LearningRate",
    "Lengths",
    "Moment",
    "Plan",
    "SeqLenWarmup",
    "check_one_warmup",
    "cut",
    "draw",
    "plan",
    "read_deepspeed",
]
