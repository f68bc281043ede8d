"""Time and memory of a study, estimated before it runs; a recipe that is too large is scaled down or refused.

    seconds      of a run on two cores, from its config; None for a user-defined model
    fit          while a study takes longer than its limit, or more memory than the machine has, batch or context is
                 halved: the one that is further above its minimum. If that is not enough, the study is refused with
                 the largest family of sizes that fits

The times were measured on one machine. They decide what is run, so they do not depend on the load: the same command
always gives the same study.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trimtab.lab.sizes import LADDERS, ladder
from trimtab.lab.subjects import with_shape
from trimtab.report.numbers import duration
from trimtab.train.config import CLIPRun, ConfigError, GPTRun, RunConfig
from trimtab.train.memory import device_memory, estimate

if TYPE_CHECKING:
    from trimtab.lab.study import Study

MINUTES = 90.0  # that a study may take
MIN_BATCH, MIN_CONTEXT = 16, 64  # those of gpt-lab
# Milliseconds of a training step on two cores, for 1024 tokens: of one block, linear in the width while calls and
# elementwise operations dominate, then quadratic; of its attention; of a million logits; of an embedding's optimizer.
REFERENCE_TOKENS = 1024
BLOCK_MS, BLOCK_MS_PER_WIDTH, BLOCK_MS_PER_SQUARE = 1.0, 3 / 32, 1 / 2500
ATTENTION_MS = 6.5e-5  # per width and context
LOGIT_MS, LOGIT_MS_PER_WIDTH = 1.0, 0.03
EMBEDDING_MS = 5e-6  # per parameter and step
FORWARD = 1 / 3  # share of the forward pass in a training step


def seconds(config: RunConfig) -> float | None:
    """Duration of a run on two cores; None for a user-defined model."""
    if not isinstance(config, GPTRun | CLIPRun):
        return None
    full_steps = min(config.steps, (config.tokens or math.inf) / (config.batch * config.model.context))
    evaluations = (config.steps // config.eval_every + 1) * config.eval_batches * FORWARD
    return (full_steps + evaluations) * _step_ms(config) / 1000


def _step_ms(config: GPTRun | CLIPRun) -> float:
    rows, length, blocks = config.batch, config.model.context, config.model.depth
    if isinstance(config, GPTRun):
        gpt = config.model
        head_ms = rows * length * gpt.vocab / 1e6 * (LOGIT_MS + LOGIT_MS_PER_WIDTH * gpt.width)
        return rows * blocks * _block_ms(gpt.width, length) + head_ms
    clip = config.model
    patches = 1 + round(clip.patches * (1 - clip.patch_dropout))
    towers_ms = blocks * _block_ms(clip.width, patches) + clip.text_depth * _block_ms(clip.text_width, length)
    return rows * towers_ms + EMBEDDING_MS * clip.vocab * clip.text_width


def _block_ms(width: int, length: int) -> float:
    """One block, for one row."""
    dense = max(BLOCK_MS + BLOCK_MS_PER_WIDTH * width, BLOCK_MS_PER_SQUARE * width**2)
    return (dense + ATTENTION_MS * width * length) * length / REFERENCE_TOKENS


# --- What fits


def fit(study: "Study", minutes: float = MINUTES, *, slots: int = 1, scale: bool = True) -> "Study":
    """The study, scaled down if it has to be and may be; its question then ends with what was scaled.

    `slots` is the number of runs at the same time. Raises ConfigError if the study does not fit.
    """
    smaller = study
    while scale and _excess(smaller, minutes, slots) and (base := _halved(smaller.base)) is not None:
        smaller = replace(smaller, base=base)
    if excess := _excess(smaller, minutes, slots):
        raise ConfigError(f"{study.subject}: {excess}; try {_remedy(smaller, minutes, slots)}")
    if smaller is study:
        return study
    changes = [f"{name} {old} -> {new}" for name, old, new in _shapes(study.base, smaller.base) if old != new]
    taken = duration(60 * (study.minutes or 0))
    note = f"Scaled down to fit: {', '.join(changes)}; as it is, {study.subject} would take about {taken}."
    return replace(smaller, question=f"{study.question} {note}")


def _excess(study: "Study", minutes: float, slots: int) -> str:
    """What does not fit, in words; empty if everything does."""
    shape = ", ".join(f"{name} {new}" for name, _, new in _shapes(study.base, study.base))
    if study.minutes is not None and study.minutes > minutes:
        return (
            f"{len(study.cells())} runs with {shape} take about {duration(60 * study.minutes)} on two cores, and the "
            f"limit is {minutes:g} min"
        )
    has = device_memory(torch.device("cpu"))
    needed = {cell.size: slots * memory.total for cell in study.cells() if (memory := estimate(cell.config))}
    largest = max(needed, key=needed.__getitem__, default="")
    if has is None or not needed or needed[largest] <= has:
        return ""
    return (
        f"{slots} runs of {largest} at the same time with {shape} need at least {needed[largest] / 1e9:.3g} GB, and "
        f"this machine has {has / 1e9:.3g} GB"
    )


def _remedy(study: "Study", minutes: float, slots: int) -> str:
    needs = f"--minutes {math.ceil(study.minutes)}" if study.minutes and study.minutes > minutes else "--workers 1"
    for count in range(len(LADDERS["joint"]), 0, -1):
        family = replace(study, sizes=ladder("joint", count))
        if not _excess(family, minutes, slots):
            return f"--sizes joint:{count} ({duration(60 * (family.minutes or 0))}), or {needs}"
    return f"fewer --steps, --seeds or --lrs, or {needs}"


def _halved(config: RunConfig) -> RunConfig | None:
    """Half the batch or half the context; None if both would be below their minimum."""
    room = {"batch": config.batch / MIN_BATCH, "context": config.model.context / MIN_CONTEXT}
    name = max(room, key=room.__getitem__)
    if room[name] < 2:
        return None
    shape = {"batch": config.batch, "context": config.model.context}
    return with_shape(config, **{**shape, name: shape[name] // 2})


def _shapes(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, int, int]]:
    yield "batch", old.batch, new.batch
    yield "context", old.model.context, new.model.context
