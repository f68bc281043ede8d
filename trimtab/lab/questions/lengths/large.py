"""The design with large batches: where short sequences cost no noise.

Four layers of width 32 read 128 rows of 128 tokens per step, 2 million tokens in all; the warmup of the learning rate
is short, and that of the lengths, from 8 tokens, takes 60 % of the steps. Steps of short rows still have a thousand
tokens. In the first designs (unstable.py: 64 rows of 64) they had few, and their noise was larger than what they saved.
Otherwise the model and its training are the same.
"""

from trimtab.lab.questions.lengths import unstable

SIZE, STEPS = "4x32", 120
FIELDS = unstable.FIELDS | {"model.context": 128, "batch": 128, "eval_batches": 2, "watch.every": 4}
ALWAYS = ("warmup=0.05",)
WARMUP = "seqlen-warmup=0.6"
BATCH_WARMUP = "batch-warmup=0.32"  # as many tokens per step
