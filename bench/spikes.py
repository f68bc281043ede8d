"""Do RMS spikes precede loss spikes? Small GPTs and CLIPs, made unstable, on a CPU.

    python -m bench.spikes                      all settings, 3 seeds each: about ten minutes on one thread
    python -m bench.spikes --only clip --seeds 1 --steps 400

AdamW in a plain loop, large β₂ and a high learning rate. RMS_t of every tensor is measured at every step against the
second moment that the step used, and the rules are those of trimtab.analysis.spikes. What comes out is written to
docs/results/spikes.md and .json, whatever it is; --out keeps the runs as folders, which `trimtab explain` can read.
"""

import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from bench.measure import console
from bench.spikes_report import write_report
from trimtab.data import PairBatches, TextBatches, open_corpus, open_pairs
from trimtab.nn import CLIP, CLIP_SIZES, GPT, GPTConfig, WordTokenizer
from trimtab.optim import StableAdamW
from trimtab.runs.reader import Run, read_run

BETA1, EPS, DECAY, WARMUP = 0.9, 1e-6, 0.1, 20
RESULTS = Path(__file__).parent.parent / "docs" / "results"
EVERY, LENGTH = 200, 40  # a changing input changes for so many steps, each so many


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to make a run unstable, or not."""

    model: str  # "clip" or "gpt"
    lr: float
    beta2: float
    batch: int
    steps: int
    changes: bool = False  # contrast x4 (CLIP), upper and lower case swapped (GPT), now and then
    patch: int = 16  # pixels per side of the CLIP's
    text: int | None = None  # bytes of text for the GPT, few enough to learn by heart; None is all there are
    optimizer: str = "adamw"


# A batch that is half of all pairs, or all of the text, leaves no noise for a loss spike to hide in.
_CLIP = Setting(model="clip", lr=3e-3, beta2=0.999, batch=220, steps=600)
_GPT = Setting(model="gpt", lr=0.01, beta2=0.999, batch=32, steps=700, text=1025)
SETTINGS = {
    "clip": _CLIP,
    "clip-fast": replace(_CLIP, lr=5e-3, beta2=0.99),
    "clip-contrast": replace(_CLIP, beta2=0.99, changes=True),
    "clip-low-beta2": replace(_CLIP, beta2=0.9),
    "clip-stable": replace(_CLIP, optimizer="stable_adamw"),
    "clip-small-batch": replace(_CLIP, batch=32, steps=1000, patch=8),
    "gpt": _GPT,
    "gpt-fast": replace(_GPT, lr=0.03),
    "gpt-all-text": replace(_GPT, lr=0.03, batch=16, text=None),
    "gpt-case": replace(_GPT, batch=16, text=None, changes=True),
}


def main(seeds: int = 3, steps: int | None = None, only: str | None = None, out: Path | None = None) -> None:
    """Train, count, report.

    Args:
        seeds: runs per setting
        steps: instead of each setting's own
        only: one setting instead of all; the results in docs/ stay as they are
        out: keep the runs as folders here; those that are there already are not trained again
    """
    torch.set_num_threads(1)
    chosen = {
        name: s if steps is None else replace(s, steps=steps) for name, s in SETTINGS.items() if only in (None, name)
    }
    if not chosen:
        raise SystemExit(f"there is no setting {only!r}; try one of {', '.join(SETTINGS)}")
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, setting in chosen.items():
            for seed in range(seeds):
                begun, folder = time.perf_counter(), (out or Path(temporary)) / f"{name}-{seed}"
                run = read_run(folder) if folder.exists() else train(setting, seed, folder)
                runs.setdefault(name, []).append(run)
                seconds, losses = time.perf_counter() - begun, run.log.column("loss")
                console.print(f"{name} seed {seed}: {seconds:.0f} s, last loss {losses[-1]:.3f}", highlight=False)
    text, data = write_report(runs, {name: asdict(setting) for name, setting in chosen.items()})
    console.print(text, highlight=False, soft_wrap=True)
    if only is None and steps is None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "spikes.md").write_text(text)
        (RESULTS / "spikes.json").write_text(json.dumps(data, indent=1) + "\n")


def train(setting: Setting, seed: int, folder: Path) -> Run:
    """One run, to its folder and back."""
    torch.manual_seed(seed)
    model, losses = (build_clip if setting.model == "clip" else build_gpt)(setting, seed)
    params = dict(model.named_parameters())
    make: Any = StableAdamW if setting.optimizer == "stable_adamw" else torch.optim.AdamW
    optimizer = make(params.values(), lr=setting.lr, betas=(BETA1, setting.beta2), eps=EPS, weight_decay=DECAY)
    records: list[dict[str, Any]] = []
    for step in range(1, setting.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * min(1.0, step / WARMUP)
        optimizer.zero_grad()
        loss = next(losses)
        loss.backward()
        optimizer.step()
        rms = measure_rms(list(params.values()), optimizer, setting, step)
        records.append({"step": step, "loss": loss.item(), "rms": dict(zip(params, rms, strict=True))})
        if not math.isfinite(loss.item()):
            break
    save(folder, setting, seed, records)
    return read_run(folder)


def measure_rms(params: list[Tensor], optimizer: Any, setting: Setting, step: int) -> list[float]:
    """RMS_t = √ mean(g² / max(v, eps²)) of every tensor, v with its bias corrected and this step's gradient in it."""
    if isinstance(optimizer, StableAdamW):
        return [float(x) for x in optimizer.rms]
    squares = [p.grad.square() for p in params if p.grad is not None]
    moments = [optimizer.state[p]["exp_avg_sq"] for p in params]
    moments = list(torch._foreach_div(moments, 1 - setting.beta2**step))
    torch._foreach_clamp_min_(moments, EPS**2)
    torch._foreach_div_(squares, moments)
    return [float(x) for x in torch.stack([ratio.mean() for ratio in squares]).sqrt()]


def build_clip(setting: Setting, seed: int) -> tuple[nn.Module, Iterator[Tensor]]:
    """A CLIP of two image blocks and one text block of width 32, on 440 drawn shapes."""
    pairs = open_pairs("shapes")
    tokenizer = WordTokenizer.from_captions(pairs.captions("train"), context=12)
    small = {"depth": 2, "width": 32, "heads": 4, "text_depth": 1, "text_width": 32, "text_heads": 4, "embed": 32}
    model = CLIP(replace(CLIP_SIZES["tiny"], **small, patch=setting.patch, context=12, vocab=tokenizer.vocab))
    batches = PairBatches(pairs, seed=seed, tokenizer=tokenizer.encode)

    def losses() -> Iterator[Tensor]:
        for changed in changes(setting):
            batch = batches.next(setting.batch)
            model.clamp_logit_scale()
            yield model.loss(batch["images"] * (4.0 if changed else 1.0), batch["captions"]).loss

    return model, losses()


def build_gpt(setting: Setting, seed: int) -> tuple[nn.Module, Iterator[Tensor]]:
    """A GPT of 2 blocks of width 64 on the bytes of Python's own sources, 32 at a time."""
    corpus = open_corpus("stdlib")
    model = GPT(GPTConfig(vocab=corpus.vocab, context=32, depth=2, width=64, heads=4))
    batches = TextBatches(
        replace(corpus, splits={"train": corpus.tokens("train")[: setting.text]}), context=32, seed=seed
    )
    swap = torch.arange(corpus.vocab)
    swap[65:91], swap[97:123] = torch.arange(97, 123), torch.arange(65, 91)

    def losses() -> Iterator[Tensor]:
        for changed in changes(setting):
            batch = batches.next(setting.batch)
            tokens, targets = (swap[x] if changed else x for x in (batch["tokens"], batch["targets"]))
            yield model.loss(tokens, targets).loss

    return model, losses()


def changes(setting: Setting) -> Iterator[bool]:
    """Is the input changed, step by step?"""
    for step in range(1, setting.steps + 1):
        yield setting.changes and step > EVERY and step % EVERY < LENGTH


def save(folder: Path, setting: Setting, seed: int, records: list[dict[str, Any]]) -> None:
    """A run folder as `trimtab train` writes it, as far as there is something to write."""
    folder.mkdir(parents=True)
    config = {"seed": seed, "steps": setting.steps, "optim": {**asdict(setting), "eps": EPS}}
    (folder / "config.json").write_text(json.dumps({"config": config}))
    steps = [{"step": r["step"], "loss": r["loss"], "rms_max": max(r["rms"].values())} for r in records]
    signals = [
        {"step": r["step"], "loss": r["loss"], "tensors": {name: {"rms": x} for name, x in r["rms"].items()}}
        for r in records
    ]
    for name, rows in (("log", steps), ("signals", signals)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "result.json").write_text(json.dumps({"why": "done", "step": records[-1]["step"]}))


if __name__ == "__main__":
    tyro.cli(main)
