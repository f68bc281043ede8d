"""P1: int8 and float8 training, and loss spikes. Wortsman et al. 2023a."""

from trimtab.analysis.answers import OutOfReach
from trimtab.lab.questions.low_precision import (
    beta2_schedule,
    clip_int8,
    float8,
    int8_time,
    rms_spikes,
    spikes,
    stable_adamw,
    stale_moment,
    switchback,
    weight_gradient,
)

QUESTIONS = tuple(
    module.QUESTION
    for module in (
        switchback,
        clip_int8,
        float8,
        weight_gradient,
        int8_time,
        spikes,
        rms_spikes,
        stable_adamw,
        stale_moment,
        beta2_schedule,
    )
)
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
        "features of such a size are reached at high learning rates, but layer norm bounds the inputs of half of "
        "the linear layers to the root of the width, which is 36 at ViT-Huge's and 8 in `float8`",
        "`trimtab train clip-vit-l14 --model.linear fp8-tensorwise`, with --model.layer-scale 0, --model.qk-norm whole",
    ),
    OutOfReach(
        "P1",
        "28 of 30 loss spikes of ViT-Huge follow an RMS spike, and spikes grow with the size of the model",
        "tens of thousands of steps at batch 16,384; `rms-spikes` asks the same of a small CLIP",
        "`trimtab train clip-vit-h14 --optim.name adamw --optim.betas 0.9 0.99`, then `trimtab analyze`",
    ),
    OutOfReach(
        "P1",
        "spikes make gradients overflow in 16 bits, and a loss scale per tensor helps",
        "training in float16, which CPUs do not accelerate; Trimtab trains in bfloat16, which needs no loss scale",
        "a float16 training on a GPU with a fixed and a dynamic loss scale",
    ),
)
