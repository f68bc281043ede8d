"""Questions of the papers: one file each, with a study that can answer it and the rules that decide its claims.

    trimtab lab --study qk-norm                QUESTIONS["qk-norm"].study(), then .answer(findings)

A new question is a new file with a QUESTION, and its name in the list below.
"""

from trimtab.analysis.answers import Check, OutOfReach
from trimtab.hints import did_you_mean
from trimtab.lab.questions import (
    ablation,
    attention,
    batch,
    clip_int8,
    decay,
    decay_strength,
    dilemma,
    eight_bits,
    eight_bits_classify,
    eight_bits_clip,
    eight_bits_long,
    eight_bits_sensitivity,
    eps,
    float8,
    headline,
    int8_time,
    kappa,
    length,
    mup,
    pacing,
    prediction,
    qk_norm,
    qk_norm_kind,
    quantization_error,
    resume,
    rms_spikes,
    seqlen_warmup,
    spikes,
    stable_adamw,
    state_memory,
    steps,
    substitutes,
    switchback,
    together,
    together_edge,
    together_memory,
    tune_seqlen,
    warmup,
    weight_gradient,
    width_depth,
    z_loss,
)
from trimtab.lab.questions.question import Measurement, Question
from trimtab.train.config import ConfigError

_PROXIES = (
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
_EIGHT_BITS = (
    eight_bits,
    ablation,
    eight_bits_clip,
    eight_bits_classify,
    eight_bits_long,
    eight_bits_sensitivity,
    quantization_error,
    state_memory,
)
_SEQLEN = (dilemma, length, seqlen_warmup, pacing, tune_seqlen, headline, resume)
_TOGETHER = (together, together_edge, together_memory)
_LOW_PRECISION = (
    switchback,
    clip_int8,
    float8,
    weight_gradient,
    int8_time,
    spikes,
    rms_spikes,
    stable_adamw,
)
QUESTIONS: dict[str, Question | Measurement] = {
    module.QUESTION.name: module.QUESTION for module in (*_PROXIES, *_EIGHT_BITS, *_LOW_PRECISION, *_SEQLEN, *_TOGETHER)
}

# Claims that need scale, data or hardware that a laptop does not have.
OUT_OF_REACH = (
    OutOfReach(
        "P1",
        "int8 training saves 13 to 25 % of the time on A100 GPUs",
        "no GPU",
        "`python -m bench.gpu` on one",
    ),
    OutOfReach(
        "P1",
        "CLIP ViT-Huge: SwitchBack within 0.1 points of bfloat16, LLM.int8 5.9 below; the loss grows with the model",
        "a billion parameters and 330 million samples per run",
        "`trimtab train clip-vit-h14` with --model.linear float, switchback and llm-int8 on GPUs",
    ),
    OutOfReach(
        "P1",
        "float8 with one scale per tensor diverges at ViT-Large and -Huge; KQ-norm and clipping do not prevent it",
        "features of a thousand times their usual size, which only large models reach",
        "`trimtab train clip-vit-l14 --model.linear fp8-tensorwise`, with --model.layer-scale 0, --model.qk-norm whole",
    ),
    OutOfReach(
        "P1",
        "28 of 30 loss spikes of ViT-Huge follow an RMS spike, and spikes grow with the size of the model",
        "tens of thousands of steps at batch 16,384; `rms-spikes` asks the same of a small CLIP",
        "`trimtab train clip-vit-h14 --optim.name adamw --optim.betas 0.9 0.99 --watch.every 1`, then `trimtab analyze`",
    ),
    OutOfReach(
        "P1",
        "spikes make gradients overflow in 16 bits, and a loss scale per tensor helps",
        "training in float16, which CPUs do not accelerate; Trimtab trains in bfloat16, which needs no loss scale",
        "a float16 training on a GPU with a fixed and a dynamic loss scale",
    ),
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
        "the drift takes 100 thousand steps; it was 3 nats in 8,000 steps of batch 1, and `z-loss` tries two designs",
        "a run of that length with 32 thousand tokens in the vocabulary",
    ),
    OutOfReach(
        "P3",
        "the attention factor 1 / head width is better in small models and worse in large ones (Figure E.6)",
        "the sign changes above the sizes that run here; `substitutes` measures the difference at one size",
        "the sizes of the paper, up to 1.2B parameters",
    ),
)


def find_question(name: str) -> Question | Measurement:
    found = QUESTIONS.get(name.replace("_", "-"))
    if found is None:
        hint = did_you_mean(name, QUESTIONS)
        raise ConfigError(f"there is no question {name!r}.{hint} The questions are {', '.join(QUESTIONS)}")
    return found


def list_questions() -> list[tuple[str, str, float]]:
    """Rows of (name, question, minutes on two cores)."""
    return [(name, one.text, round(one.minutes, 1)) for name, one in QUESTIONS.items()]


__all__ = ["OUT_OF_REACH", "QUESTIONS", "Check", "Measurement", "Question", "find_question", "list_questions"]
