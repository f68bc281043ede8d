"""P4: sequence length warmup. Li et al. 2022."""

from trimtab.analysis.answers import OutOfReach
from trimtab.lab.questions.lengths import (
    dilemma,
    headline,
    length,
    pacing,
    resume,
    seqlen_warmup,
    tune_seqlen,
)

QUESTIONS = tuple(
    module.QUESTION
    for module in (
        dilemma,
        length,
        seqlen_warmup,
        pacing,
        tune_seqlen,
        headline,
        resume,
    )
)
OUT_OF_REACH = (
    OutOfReach(
        "P4",
        "GPT-2 117M and 1.5B are stable at 8 times the batch, 4 times the learning rate: 2.2 times fewer tokens",
        "157 billion tokens",
        "`trimtab train gpt2-117m`, `gpt2-1.5b` on a cluster, with and without schedule.seqlen",
    ),
    OutOfReach(
        "P4",
        "GPT-3 125M trains at 40 times the learning rate with 10 times less data",
        "30 billion tokens, and 300 billion for the baseline",
        "`trimtab train gpt3-125m --optim.lr 2.4e-2 --tokens 30000000000` on a cluster",
    ),
    OutOfReach(
        "P4",
        "it keeps 99 % of the average zero-shot accuracy on 11 tasks",
        "models of this size answer these tasks by chance; `headline` has the last word of passages",
        "`trimtab eval RUN --tasks hellaswag lambada_openai piqa ...` on such a run",
    ),
    OutOfReach(
        "P4",
        "lengths that adapt to the loss are no better than linear ones",
        "here the length is a function of the step alone, so that a resumed run has the same lengths",
        "`SeqLenWarmup.custom` in a loop of one's own, with a function that knows the losses",
    ),
)
