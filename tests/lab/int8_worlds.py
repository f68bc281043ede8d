"""Worlds for the questions of Wortsman et al. 2023a: logs with spikes where they are wanted, and accuracies."""

from pathlib import Path

import numpy as np

from trimtab.lab.changing import is_changed
from trimtab.lab.questions.low_precision import stable_adamw as changing_clip
from trimtab.lab.questions.low_precision.rms_spikes import PATCHES
from trimtab.lab.study import Cell
from trimtab.runs.reader import Run
from trimtab.train.zero_shot import ZeroShot

TENSORS = (PATCHES, changing_clip.PATCHES, *(f"blocks.{i}.weight" for i in range(7)))
MIDDLE = "visual.transformer.blocks.1.mlp.up.weight"
STALE = 5.0  # an RMS_t that is a spike


def log(*, spikes=0, ahead=3, level=1.0, false=0, most=STALE, features=1.0, height=3.0) -> Run:
    """600 steps at a loss of `level`. Each spike begins one step after the last and is highest two steps later; RMS_t
    of all tensors but the middle one is high `ahead` steps before it begins, and of one at other steps (`false`)."""
    losses = level * (1 + 0.01 * np.random.default_rng(0).standard_normal(600))
    stale = set()
    for onset in range(100, 100 + 60 * spikes, 60):
        losses[onset - 1 : onset + 3] = level * np.array([1.4, 1.9, height, 2.0])
        stale.add(onset - ahead)
    other = {130 + 60 * i for i in range(false)}
    run = Run(Path())
    for step, loss in enumerate(losses, start=1):
        run.log.add(step, [("loss", loss)])
        rms = dict.fromkeys(TENSORS, most if step in stale else 1.0)
        rms[TENSORS[-1]] = max(rms[TENSORS[-1]], STALE * (step in other))
        rms[MIDDLE] = 1.0
        signals = [(f"tensors/{name}/rms", value) for name, value in rms.items()]
        run.signals.add(step, [*signals, ("layers/visual.transformer.blocks.0/out_max", features)])
    return run


def zero_shot(top1: float) -> ZeroShot:
    return ZeroShot(top1=top1, single=0.5, classes=4, pictures=40, prompts=11)


def clip_int8(cell: Cell) -> dict:
    bad = cell.arm == "llm-int8"
    return {"loss": 0.5 + bad + 0.001 * cell.seed, "classify": zero_shot(0.8 if bad else 0.9)}


def float8(cell: Cell) -> dict:
    lost = {"tensorwise": 2.0, "tensorwise, layer-scale": 0.5, "SwitchBack": 0.01}.get(cell.arm, 0)
    return {"loss": 1.0 + lost, "log": log(features=1.0 if "layer-scale" in cell.arm else 10.0)}


def float8_harmless(cell: Cell) -> dict:
    return {"loss": 1.0, "log": log()}


def spikes(cell: Cell) -> dict:
    height = {"beta2 0.9": 2, "beta2 0.99": 4, "beta2 0.999": 6, "batch 55": 2, "batch 110": 3}[cell.arm]
    return {"loss": 1.0, "log": log(spikes=3, height=height * (2 if cell.lr > 2e-3 else 1))}


def equal_spikes(cell: Cell) -> dict:
    return {"loss": 1.0, "log": log(spikes=3)}


def rms_spikes(cell: Cell) -> dict:
    return {"loss": 1.0, "log": log(spikes=2, false=3)}


def late_rms_spikes(cell: Cell) -> dict:
    return {"loss": 1.0, "log": log(spikes=2, ahead=-4, false=3)}


def stable_adamw(cell: Cell) -> dict:
    stable, spiky = cell.arm == "StableAdamW", cell.arm == "AdamW"
    made = log(spikes=3 * spiky, level=0.5 if stable else 1.0, most=STALE if spiky else 1.0)
    return {"loss": 0.9 if stable else 1.0, "log": made}


def stale_moment(cell: Cell) -> dict:
    """Where gradients are larger, RMS_t is high and the loss rises: least with StableAdamW."""
    rise = {"AdamW": 0.3, "AdamW, beta2 0.999": 0.6, "AdamW, clipping": 0.2, "AdamW, beta2 0.9": 0.2}.get(cell.arm, 0.1)
    run = Run(Path())
    for step in range(1, 601):
        changed = is_changed(step)
        run.log.add(step, [("loss", 2 + rise * changed)])
        run.signals.add(step, [(f"tensors/{name}/rms", STALE if changed else 1.0) for name in TENSORS])
    return {"loss": 2 + rise, "log": run}


def beta2_schedule(cell: Cell, gain: float = 0.0) -> dict:
    """The higher a constant, the higher the loss; a schedule is between, or gains."""
    loss = {"beta2 0.9": 2.0, "beta2 0.999": 2.2}.get(cell.arm, 2.1) - gain * cell.arm.startswith("power")
    run = Run(Path())
    for step in range(1, 601):
        run.log.add(step, [("loss", loss)])
    return {"loss": loss, "log": run}


PAPERS = {
    "clip-int8": clip_int8,
    "float8": float8,
    "spikes": spikes,
    "rms-spikes": rms_spikes,
    "stable-adamw": stable_adamw,
    "stale-moment": stale_moment,
    "beta2-schedule": beta2_schedule,
}
OTHERS = {
    "float8": float8_harmless,
    "spikes": equal_spikes,
    "rms-spikes": late_rms_spikes,
    "beta2-schedule": lambda cell: beta2_schedule(cell, 0.5),
}
