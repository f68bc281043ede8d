"""Recipes: functions that return a RunConfig. `trimtab recipes` lists them.

The tiny and small ones train on a laptop and download nothing. The large ones have the hyper-parameters of the papers,
32-bit optimizer state included (`--optim.bits 8` is ours); they need GPUs and your own data (`--data.corpus`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trimtab.nn import CLIP_SIZES, GPTConfig
from trimtab.schedule import LearningRate
from trimtab.train.config import (
    CLIPRun,
    DataConfig,
    GPTRun,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SeqLenConfig,
    with_model,
)


def gpt_tiny() -> GPTRun:
    """Four layers of 128 over the bytes of Python's standard library; about a minute on two cores."""
    return _gpt(
        GPTConfig(depth=4, width=128, heads=8, vocab=257, context=128, qk_norm="shared", z_loss=1e-4),
        OptimConfig(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
        warmup=40,
        start=32,
        steps=400,
        batch=16,
        checkpoint_every=200,
    )


def gpt_small() -> GPTRun:
    """Eight layers of 512, SwitchBack and 8-bit StableAdamW, over the standard library; hours on two cores."""
    model = GPTConfig(
        depth=8, width=512, heads=8, vocab=257, context=256, qk_norm="shared", z_loss=1e-4, linear="switchback"
    )
    optim = OptimConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return _gpt(model, optim, warmup=200, start=64, steps=3000, batch=32, eval_every=250)


def gpt_lab() -> GPTRun:
    """Three layers of 64 over bytes, without interventions: the model of `trimtab lab`."""
    steps = 500
    return GPTRun(
        model=GPTConfig(depth=3, width=64, heads=4, vocab=257, context=64),
        # The best learning rate after 500 steps (`trimtab reproduce qk-norm`). Decay times steps is as in the paper,
        # 1e-4 in 100 thousand steps.
        optim=OptimConfig(name="adamw", lr=3e-2, bits=32, weight_decay=10 / steps, independent_decay=True),
        schedule=ScheduleConfig(lr=LearningRate(kind="cosine", warmup=steps // 20, floor=1e-5)),
        steps=steps,
        batch=16,
        eval_every=steps // 2,
        eval_batches=32,
        checkpoint_every=steps // 2,
        keep=1,
        threads=1,
    )


def gpt2_117m() -> GPTRun:
    """GPT-2 117M with 8x batch and 4x learning rate, made stable by sequence length warmup (Li et al. 2022)."""
    return _gpt2(depth=12, width=768, heads=12, start=8, warmup_steps=20_000)


def gpt2_1_5b() -> GPTRun:
    """GPT-2 1.5B with 8x batch and 4x learning rate, made stable by sequence length warmup (Li et al. 2022)."""
    return _gpt2(depth=48, width=1600, heads=25, start=64, warmup_steps=45_000)


def gpt3_125m() -> GPTRun:
    """GPT-3 125M with 8x batch, sequence length warmup from 72, 300 billion tokens (Li et al. 2022)."""
    lr = LearningRate(
        kind="cosine", warmup=375_000_000, warmup_unit="tokens", decay=260_000_000_000, decay_unit="tokens", floor=6e-5
    )
    return GPTRun(
        model=_gpt2_model(depth=12, width=768, heads=12, context=2048),
        optim=OptimConfig(name="adamw", lr=2.4e-3, betas=(0.9, 0.95), weight_decay=0.1, bits=32),
        schedule=ScheduleConfig(lr=lr, seqlen=SeqLenConfig(start=72, steps=27_638)),
        steps=300_000,
        tokens=300_000_000_000,
        batch=2048,
        micro_batch=8,
        eval_every=250,
        data=DataConfig(tokenizer="bpe:50257"),
    )


def clip_tiny() -> CLIPRun:
    """A CLIP of 32-pixel emoji and their names, in bytes; a minute and a half on two cores. Needs 'trimtab[clip]'."""
    optim = OptimConfig(lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    # There are few pairs: half of the patches are dropped, and more steps would overfit.
    run = _clip("tiny", optim, warmup=50, steps=150, batch=128, eval_every=25, eval_batches=1, checkpoint_every=50)
    return with_model(run, patch_dropout=0.5)


def clip_lab() -> CLIPRun:
    """Two image blocks and one text block of width 32, on drawn shapes: the CLIP of studies, about 10 seconds."""
    image = replace(CLIP_SIZES["tiny"], depth=2, width=32, heads=2, patch=8, embed=32)
    model = replace(image, text_depth=1, text_width=32, text_heads=2, context=48)  # the longest caption has 43 bytes
    steps = 400
    return CLIPRun(
        model=model,
        # As the paper, with 32-bit state. Gradient clipping would hide what the studies compare.
        optim=OptimConfig(
            name="adamw", lr=3e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2, bits=32, clip_norm=None
        ),
        schedule=ScheduleConfig(lr=LearningRate(kind="cosine", warmup=steps // 10)),
        data=DataConfig(corpus="shapes"),
        steps=steps,
        batch=64,
        eval_every=steps // 4,
        eval_batches=1,
        checkpoint_every=steps,
        keep=1,
        threads=1,
    )


def clip_vit_b32() -> CLIPRun:
    """CLIP ViT-B/32 with StableAdamW and SwitchBack (Wortsman et al. 2023)."""
    return _paper_clip("ViT-B/32")


def clip_vit_l14() -> CLIPRun:
    """CLIP ViT-L/14 with StableAdamW and SwitchBack (Wortsman et al. 2023)."""
    return _paper_clip("ViT-L/14")


def clip_vit_h14() -> CLIPRun:
    """CLIP ViT-H/14 with StableAdamW and SwitchBack (Wortsman et al. 2023)."""
    return _paper_clip("ViT-H/14")


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "gpt-tiny": gpt_tiny,
    "gpt-small": gpt_small,
    "gpt-lab": gpt_lab,
    "gpt2-117m": gpt2_117m,
    "gpt2-1.5b": gpt2_1_5b,
    "gpt3-125m": gpt3_125m,
    "clip-tiny": clip_tiny,
    "clip-lab": clip_lab,
    "clip-vit-b32": clip_vit_b32,
    "clip-vit-l14": clip_vit_l14,
    "clip-vit-h14": clip_vit_h14,
}


def _gpt(model: GPTConfig, optim: OptimConfig, *, warmup: int, start: int, steps: int, **fields: Any) -> GPTRun:
    """Cosine decay by tokens to 1/15 of the peak; lengths from `start` over a third of the run."""
    lr = LearningRate(kind="cosine", warmup=warmup, decay_unit="tokens", floor=optim.lr / 15)
    schedule = ScheduleConfig(lr=lr, seqlen=SeqLenConfig(start=start, steps=steps // 3))
    return GPTRun(model=model, optim=optim, schedule=schedule, steps=steps, **fields)


def _gpt2_model(**sizes: Any) -> GPTConfig:
    return GPTConfig(**sizes, vocab=50_257, positions="learned", tied=True, bias=True, norm_eps=1e-5)


def _gpt2(*, depth: int, width: int, heads: int, start: int, warmup_steps: int) -> GPTRun:
    lr = LearningRate(kind="cosine", warmup=3000, decay_unit="tokens", floor=1e-5)
    return GPTRun(
        model=_gpt2_model(depth=depth, width=width, heads=heads, context=1024),
        optim=OptimConfig(name="adamw", lr=6e-4, betas=(0.9, 0.95), weight_decay=0.01, bits=32),
        schedule=ScheduleConfig(lr=lr, seqlen=SeqLenConfig(start=start, steps=warmup_steps)),
        steps=75_000,
        tokens=157_286_400_000,
        batch=4096,
        micro_batch=8,
        eval_every=250,
        data=DataConfig(tokenizer="bpe:50257"),
    )


def _clip(size: str, optim: OptimConfig, *, warmup: int, **fields: Any) -> CLIPRun:
    schedule = ScheduleConfig(lr=LearningRate(kind="cosine", warmup=warmup))
    return CLIPRun(model=CLIP_SIZES[size], optim=optim, schedule=schedule, data=DataConfig(corpus="emoji"), **fields)


def _paper_clip(size: str) -> CLIPRun:
    optim = OptimConfig(lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2, clip_norm=None, bits=32)
    run = _clip(size, optim, warmup=5000, steps=20_000, batch=16_384, autocast="bfloat16")
    return with_model(run, patch_dropout=0.5, linear="switchback", checkpointing=True)
