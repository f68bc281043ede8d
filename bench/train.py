"""What the loop adds to the bare step, what the parts bring a whole run, and how fast a checkpoint is written.

    python -m bench.train                       everything: about twelve minutes on two cores
    python -m bench.train --only checkpoint     one part: loop, small, checkpoint, compile, step

Everything runs through the real `trimtab.train`, in a temporary folder.
"""

import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.measure import Bar, Timing, console, report
from bench.step import measure_step
from trimtab.data import Prefetcher
from trimtab.nn import GPT, GPTConfig
from trimtab.recipes import gpt_small, gpt_tiny
from trimtab.runs import RunLog
from trimtab.train.build import build_optimizer, build_task
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.config import GPTRun, OptimConfig, SeqLenConfig, with_model
from trimtab.train.loop import _Run, train
from trimtab.train.processes import Processes

Part = Literal["loop", "small", "checkpoint", "compile", "step"]
QUIET = Console(file=io.StringIO())


def main(threads: int = 2, only: Part | None = None) -> None:
    """Measure whole runs.

    Args:
        threads: for everything that is measured
        only: one part instead of all
    """
    torch.set_num_threads(threads)
    parts: dict[Part, Callable[[], list[Bar]]] = {
        "loop": measure_loop,
        "small": measure_small,
        "checkpoint": measure_checkpoint,
        "compile": measure_compile,
        "step": measure_step,
    }
    report([bar for name, run in parts.items() if only in (None, name) for bar in run()])


def measure_loop(steps: int = 12, rounds: int = 5) -> list[Bar]:
    """The same model, optimizer and batch size, with and without everything a run does around them."""
    config = full_length(with_model(gpt_tiny(), depth=4, width=256, heads=4))
    with tempfile.TemporaryDirectory() as folder:
        run = start(config, Path(folder))
        task = build_task(config, Processes())
        optimizer, batches = build_optimizer(task.model, config.optim), task.batches("train", 1)
        params = list(task.model.parameters())

        def bare() -> None:
            for batch in ready:
                loss = task.loss(task.model, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(params, 1.0)
                optimizer.step()
                optimizer.zero_grad()

        def looped() -> None:
            for _ in range(steps):
                run.log.step(run._step())

        seconds: dict[str, list[float]] = {"bare": [], "loop": []}
        for _ in range(rounds + 1):
            ready = [batches.next(config.batch) for _ in range(steps)]
            for name, body in (("bare", bare), ("loop", looped)):
                begun = time.perf_counter()
                body()
                seconds[name].append(time.perf_counter() - begun)
        waited = run.batches.waited_s / run.state.clock.seconds
        run.batches.close()
        run.log.close()
    timings = {name: Timing(values[1:]) for name, values in seconds.items()}
    added = timings["loop"].median_ms / timings["bare"].median_ms - 1
    table = Table(f"{steps} steps of 4 layers x 256", "best ms", "median ms", box=None, pad_edge=False)
    for name, timing in timings.items():
        table.add_row(name, f"{timing.best_ms:.1f}", f"{timing.median_ms:.1f}")
    console.print(table, "")
    return [Bar("what the loop adds to the bare step", added, 0.03), Bar("time spent waiting for data", waited, 0.01)]


def measure_small(steps: int = 3, rounds: int = 3) -> list[Bar]:
    """gpt-small as it is, and the same run with nn.Linear and PyTorch's fused 32-bit AdamW."""
    ours = full_length(gpt_small())
    plain = with_model(ours, linear="float")
    plain = replace(plain, optim=OptimConfig(name="torch-adamw", lr=ours.optim.lr, bits=32, weight_decay=0.1))
    speeds: dict[str, list[float]] = {"nn.Linear, torch AdamW": [], "SwitchBack, 8-bit StableAdamW": []}
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: start(config, Path(folder) / str(i))
            for i, (name, config) in enumerate(zip(speeds, (plain, ours), strict=True))
        }
        for counted in [False] + [True] * rounds:
            for name, run in runs.items():
                tokens, seconds = run.state.clock.tokens, run.state.clock.seconds
                for _ in range(steps):
                    run._step()
                if counted:
                    clock = run.state.clock
                    speeds[name].append((clock.tokens - tokens) / (clock.seconds - seconds))
        for run in runs.values():
            run.batches.close()
    table = Table("gpt-small", "best tokens/s", "median tokens/s", box=None, pad_edge=False)
    for name, values in speeds.items():
        table.add_row(name, f"{max(values):,.0f}", f"{statistics.median(values):,.0f}")
    console.print(table, "")
    base, fast = (statistics.median(values) for values in speeds.values())
    return [Bar("tokens/s of gpt-small over nn.Linear and torch's AdamW", fast / base, 1.25, at_least=True)]


def measure_checkpoint(rounds: int = 3) -> list[Bar]:
    """A model of GPT-2's size with its 8-bit state, against copying as many bytes on the same disk."""
    model = GPT(GPTConfig(depth=12, width=768, heads=12, vocab=50_257, context=1024, positions="learned", tied=True))
    optimizer = build_optimizer(model, OptimConfig())
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    speeds: dict[str, list[float]] = {"checkpoint": [], "plain copy": []}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints", 1, Processes())
        for step in range(rounds + 1):
            begun = time.perf_counter()
            path = checkpoints.save(step, model, optimizer, {})
            seconds = time.perf_counter() - begun
            size = sum(file.stat().st_size for file in path.iterdir())
            begun = time.perf_counter()
            copy_synced(path / "model.safetensors", Path(folder) / "a")
            copy_synced(path / "optimizer.safetensors", Path(folder) / "b")
            copied = time.perf_counter() - begun
            if step:
                speeds["checkpoint"].append(size / seconds / 1e6)
                speeds["plain copy"].append(size / copied / 1e6)
    table = Table(f"{size / 1e6:,.0f} MB", "best MB/s", "median MB/s", box=None, pad_edge=False)
    for name, values in speeds.items():
        table.add_row(name, f"{max(values):,.0f}", f"{statistics.median(values):,.0f}")
    console.print(table, "")
    wrote, copy = (statistics.median(values) for values in speeds.values())
    return [Bar("speed of a checkpoint over that of a plain copy", wrote / copy, 0.5, at_least=True)]


def copy_synced(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def measure_compile(steps: int = 8) -> list[Bar]:
    """Sequence length warmup over a few lengths under torch.compile: at most one compilation each."""
    config = with_model(gpt_tiny(), depth=1, width=32, heads=2)
    seqlen = SeqLenConfig(start=32, steps=steps, multiple=32)
    config = replace(
        config, schedule=replace(config.schedule, seqlen=seqlen), steps=steps, compile=True, eval_batches=1
    )
    lengths = {config.seqlen_warmup.at(step) for step in range(1, steps + 1)}
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, Path(folder) / "run", console=QUIET)
    console.print(f"{len(lengths)} lengths, {result['compilations']} compilations\n", highlight=False)
    return [Bar("compilations over lengths", result["compilations"] / len(lengths), 1.0)]


def full_length(config: GPTRun) -> GPTRun:
    """Without warm-up of the length, so that every step costs the same."""
    return replace(config, schedule=replace(config.schedule, seqlen=SeqLenConfig()))


def start(config: GPTRun, folder: Path) -> _Run:
    folder.mkdir(exist_ok=True)
    run = _Run(config, build_task(config, Processes()), RunLog(folder), Processes(), QUIET)
    run.batches = Prefetcher(run.source, depth=config.data.prefetch, batch=config.batch)
    return run


if __name__ == "__main__":
    tyro.cli(main)
