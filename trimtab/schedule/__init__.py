"""Schedules: step, samples or tokens in, a number out: learning rate, sequence length, batch size.

Every schedule is a pure function of these counters, so only the counters are saved in a checkpoint. No torch: batches
are cut by their own `[]`.
"""

from trimtab.schedule.batch_size import BatchWarmup, check_one_warmup
from trimtab.schedule.cut import cut
from trimtab.schedule.deepspeed import read_deepspeed
from trimtab.schedule.draw import draw
from trimtab.schedule.learning_rate import LearningRate
from trimtab.schedule.plan import Moment, Plan, plan
from trimtab.schedule.seqlen import CustomSeqLen, Lengths, SeqLenWarmup

__all__ = [
    "BatchWarmup",
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
