"""P3: instabilities of large models, reproduced in small ones. Wortsman et al. 2023b."""

from trimtab.analysis.answers import OutOfReach
from trimtab.lab.questions.proxies import (
    attention,
    batch,
    decay,
    decay_strength,
    eps,
    kappa,
    mup,
    prediction,
    qk_norm,
    qk_norm_kind,
    steps,
    substitutes,
    warmup,
    width_depth,
    z_loss,
)

QUESTIONS = tuple(
    module.QUESTION
    for module in (
        qk_norm,
        z_loss,
        warmup,
        decay,
        decay_strength,
        width_depth,
        mup,
        substitutes,
        steps,
        qk_norm_kind,
        batch,
        attention,
        prediction,
        kappa,
        eps,
    )
)
OUT_OF_REACH = (
    OutOfReach(
        "P3",
        "a model of 1.2B parameters trains at learning rate 0.3 with qk-norm and z-loss (Figure 1)",
        "a run of 100 thousand steps of 131 thousand tokens",
        "the grid of `qk-norm` with `gpt2-1.5b` on GPUs",
    ),
    OutOfReach(
        "P3",
        "a model of 4.8B parameters fails at learning rate 0.01, as predicted from up to 1.2B (Figure 9)",
        "size; `prediction` tests the method on models of 6 to 786 thousand parameters",
        "that run; `trimtab predict` has the same fit",
    ),
    OutOfReach(
        "P3",
        "eps = 1e-8 is too large at 4.8B parameters and learning rate 0.3, and 1e-15 prevents it (Figures 12, 13)",
        "gradients of models of this size are a thousand times larger; `eps` moves eps up instead",
        "a run of that size; `trimtab predict` warns where gradients come near eps",
    ),
    OutOfReach(
        "P3",
        "every run with an attention logit above 10,000 diverges (Figure 9)",
        "models of bytes still predict from single bytes when attention has failed, so the loss stays finite",
        "larger models and vocabularies; `prediction` measures a critical logit of its own",
    ),
    OutOfReach(
        "P3",
        "log Z drifts far below zero late in training, which 16 bits do not survive (Figures 3, 4)",
        "the drift takes 100 thousand steps; `z-loss` tries two shorter designs",
        "a run of that length with 32 thousand tokens in the vocabulary",
    ),
    OutOfReach(
        "P3",
        "the attention factor 1 / head width is better in small models and worse in large ones (Figure E.6)",
        "the sign changes above the sizes that run here; `substitutes` measures the difference at one size",
        "the sizes of the paper, up to 1.2B parameters",
    ),
)
