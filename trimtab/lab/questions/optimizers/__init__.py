"""P2: 8-bit optimizer state. Dettmers et al. 2022."""

from trimtab.analysis.answers import OutOfReach
from trimtab.lab.questions.optimizers import (
    ablation,
    adagrad,
    eight_bits,
    eight_bits_classify,
    eight_bits_clip,
    eight_bits_long,
    eight_bits_sensitivity,
    embedding_parts,
    quantization_error,
    state_memory,
)

QUESTIONS = tuple(
    module.QUESTION
    for module in (
        eight_bits,
        ablation,
        embedding_parts,
        eight_bits_clip,
        eight_bits_classify,
        eight_bits_long,
        eight_bits_sensitivity,
        adagrad,
        quantization_error,
        state_memory,
    )
)
OUT_OF_REACH = (
    OutOfReach(
        "P2",
        "8-bit Adam and Momentum match 32 bits on GLUE, WMT, ImageNet and MoCo (Table 1)",
        "pretrained models, downloads, 15 hours to 30 days of V100s",
        "those trainings with `trimtab.optim.AdamW(bits=8)`; `eight-bits-classify` and `eight-bits-clip` are small",
    ),
    OutOfReach(
        "P2",
        "8-bit Adam trains 1.5B parameters to the same perplexity; without blocks 1.3B fails (Tables 1 and 3)",
        "308 GPU-days per run",
        "`gpt2-1.5b` with --optim.bits 8 and 32 on GPUs; `ablation` has the same arms for 147 thousand parameters",
    ),
    OutOfReach(
        "P2",
        "trainings are faster than with 32-bit state, and an update takes a third of the time of PyTorch's",
        "no GPU",
        "`python -m bench.gpu` on one; `python -m bench.optim` compares updates on a CPU",
    ),
    OutOfReach(
        "P2",
        "the memory of a whole training shrinks by up to 8.5 GB (Table 1)",
        "no GPU",
        "`python -m bench.memory` measures peaks in host memory up to 1.5B parameters; `state-memory` counts the state",
    ),
)
