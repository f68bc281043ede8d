"""Named runs: short functions that return a RunConfig. `trimtab recipes` lists them.

The tiny and small ones train on a laptop and download nothing. The big ones carry the papers' hyper-parameters and want
GPUs, and data of their own: `--data.corpus`.
"""

from collections.abc import Callable
from dataclasses import replace

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
    WatchConfig,
)


def gpt_tiny() -> GPTRun:
    """Four layers of 128 over the bytes of Python's standard library; about a minute on two cores."""
    return _gpt(
        GPTConfig(depth=4, width=128, heads=8, vocab=257, context=128, qk_norm="shared", z_loss=1e-4),
        OptimConfig(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
        steps=400,
        batch=16,
        warmup=40,
        start=32,
        eval_every=100,
        checkpoint_every=200,
    )


def gpt_small() -> GPTRun:
    """Eight layers of 512, SwitchBack and 8-bit StableAdamW, over the standard library; hours on two cores."""
    model = GPTConfig(
        depth=8, width=512, heads=8, vocab=257, context=256, qk_norm="shared", z_loss=1e-4, linear="switchback"
    )
    optim = OptimConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return _gpt(model, optim, steps=3000, batch=32, warmup=200, start=64)


def gpt_lab() -> GPTRun:
    """Three layers of 64 over bytes, with nothing to steady it: what `trimtab lab` trains at many sizes and rates."""
    steps, batch = 400, 16
    return GPTRun(
        model=GPTConfig(depth=3, width=64, heads=4, vocab=257, context=64),
        # Decay times steps is what it is in the paper, 1e-4 in 100 thousand steps.
        optim=OptimConfig(name="adamw", lr=1e-2, bits=32, weight_decay=10 / steps, independent_decay=True),
        schedule=ScheduleConfig(lr=LearningRate(kind="cosine", warmup=steps // 20, floor=1e-5)),
        steps=steps,
        batch=batch,
        eval_every=steps // 2,
        eval_batches=32,
        checkpoint_every=100,
        keep=1,
        watch=WatchConfig(every=steps // 25, deep_every=1, record_every=1),
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
    model = _as_gpt2(depth=12, width=768, heads=12, context=2048)
    lr = LearningRate(
        kind="cosine", warmup=375_000_000, warmup_unit="tokens", decay=260_000_000_000, decay_unit="tokens", floor=6e-5
    )
    run = _gpt(
        model,
        OptimConfig(name="adamw", lr=2.4e-3, betas=(0.9, 0.95), weight_decay=0.1),
        steps=300_000,
        batch=2048,
        warmup=0,
        start=72,
        warmup_steps=27_638,
        tokens=300_000_000_000,
    )
    return replace(run, schedule=replace(run.schedule, lr=lr), data=DataConfig(tokenizer="bpe:50257"), micro_batch=8)


def clip_tiny() -> CLIPRun:
    """A CLIP of 32-pixel emoji and their names, in bytes; a minute and a half on two cores. Needs 'trimtab[clip]'."""
    optim = OptimConfig(lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    run = _clip("tiny", optim, steps=150, batch=128, warmup=50)
    # 1,700 pairs are few: half of the patches, and no more steps than help to name what was not trained on.
    model = replace(run.model, patch_dropout=0.5)
    data = DataConfig(corpus="emoji")
    return replace(run, model=model, data=data, eval_every=25, eval_batches=1, checkpoint_every=50)


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
    "clip-vit-b32": clip_vit_b32,
    "clip-vit-l14": clip_vit_l14,
    "clip-vit-h14": clip_vit_h14,
}


def _gpt(
    model: GPTConfig,
    optim: OptimConfig,
    *,
    steps: int,
    batch: int,
    warmup: int,
    start: int,
    warmup_steps: int | None = None,
    tokens: int | None = None,
    eval_every: int = 250,
    checkpoint_every: int = 500,
) -> GPTRun:
    """Cosine by tokens to a fifteenth of the peak, lengths from `start` over a third of the run."""
    lr = LearningRate(kind="cosine", warmup=warmup, decay_unit="tokens", floor=optim.lr / 15)
    schedule = ScheduleConfig(lr=lr, seqlen=SeqLenConfig(start=start, steps=warmup_steps or steps // 3))
    return GPTRun(
        model=model,
        optim=optim,
        schedule=schedule,
        steps=steps,
        tokens=tokens,
        batch=batch,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
    )


def _as_gpt2(*, depth: int, width: int, heads: int, context: int) -> GPTConfig:
    return GPTConfig(
        depth=depth,
        width=width,
        heads=heads,
        vocab=50_257,
        context=context,
        positions="learned",
        tied=True,
        bias=True,
        norm_eps=1e-5,
    )


def _gpt2(*, depth: int, width: int, heads: int, start: int, warmup_steps: int) -> GPTRun:
    model = _as_gpt2(depth=depth, width=width, heads=heads, context=1024)
    run = _gpt(
        model,
        OptimConfig(name="adamw", lr=6e-4, betas=(0.9, 0.95), weight_decay=0.01),
        steps=75_000,
        batch=4096,
        warmup=3000,
        start=start,
        warmup_steps=warmup_steps,
        tokens=157_286_400_000,
    )
    lr = replace(run.schedule.lr, floor=1e-5)
    return replace(run, schedule=replace(run.schedule, lr=lr), data=DataConfig(tokenizer="bpe:50257"), micro_batch=8)


def _clip(size: str, optim: OptimConfig, *, steps: int, batch: int, warmup: int) -> CLIPRun:
    model = CLIP_SIZES[size]
    schedule = ScheduleConfig(lr=LearningRate(kind="cosine", warmup=warmup))
    return CLIPRun(model=model, optim=optim, schedule=schedule, steps=steps, batch=batch)


def _paper_clip(size: str) -> CLIPRun:
    optim = OptimConfig(lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2, clip_norm=None)
    run = _clip(size, optim, steps=20_000, batch=16_384, warmup=5000)
    model = replace(run.model, patch_dropout=0.5, linear="switchback", checkpointing=True)
    return replace(run, model=model, data=DataConfig(corpus="emoji"), autocast="bfloat16", micro_batch=None)
