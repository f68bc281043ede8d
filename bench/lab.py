"""The default study's wall time against the same cells in a plain PyTorch loop, on the same cores.

    python -m bench.lab                  a sample: every size and both arms, three learning rates; ten minutes
    python -m bench.lab --steps 100      rougher: what a cell costs besides its steps weighs more
    python -m bench.lab --full           the whole study, once each way: about half an hour on two cores

Plain: one process with PyTorch's default threads, one cell after the other, fused AdamW, the same model, batches,
schedule, clipping and evaluations, and nothing else: no log, no watching, no checkpoints. Ours: `sweep`, with all of
that, from its first worker to its last. They take turns, and the final losses of both are compared, since a speed-up
of another training would be none.
"""

import io
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.measure import Bar, console, report
from trimtab.lab.executors import make_executor
from trimtab.lab.study import STEPS, Cell, Study, default_study
from trimtab.lab.subjects import with_steps
from trimtab.lab.sweep import sweep
from trimtab.lab.table import read_end
from trimtab.optim import groups
from trimtab.train.build import Task, build_task
from trimtab.train.config import RunConfig
from trimtab.train.plan import simulate
from trimtab.train.processes import Processes

SAMPLE_LRS = (1e-3, 1e-2, 1e-1)  # calm, best, and where the plain arm fails


def main(full: bool = False, steps: int = STEPS, rounds: int = 2, slots: int | None = None) -> None:
    """Measure the sweep.

    Args:
        full: the whole default study instead of a sample, once
        steps: of every cell of the sample
        rounds: turns of each side
        slots: cells at a time; None: one per core
    """
    study = default_study() if full else sample(default_study(), steps)
    warm = sample(study, 2)
    run_swept(replace(warm, lrs=warm.lrs[:1]), slots)  # torch is imported once, here and in the server
    run_plain(warm.cells()[:1])
    seconds: dict[str, list[float]] = {"sweep": [], "plain loop": []}
    for _ in range(1 if full else rounds):
        swept_s, swept = run_swept(study, slots)
        plain_s, plain = run_plain(study.cells())
        seconds["sweep"].append(swept_s)
        seconds["plain loop"].append(plain_s)
        console.print(f"sweep {swept_s:.1f} s, plain loop {plain_s:.1f} s: {plain_s / swept_s:.2f}x", highlight=False)
    show(study, seconds)
    # The ratio of each round: a slow minute slows both.
    ratio = median(b / a for a, b in zip(*seconds.values(), strict=True))
    report([Bar("wall time of a plain loop over the sweep's", ratio, 1.5, at_least=True), compare(study, swept, plain)])


def sample(study: Study, steps: int) -> Study:
    """Every size and arm; few learning rates, one seed, and short runs that spend the same share on evaluation."""
    batches = max(1, round(study.base.eval_batches * steps / study.base.steps))
    base = replace(with_steps(study.base, steps), eval_batches=batches)
    return replace(study, base=base, lrs=SAMPLE_LRS, seeds=study.seeds[:1])


def run_swept(study: Study, slots: int | None) -> tuple[float, dict[str, float]]:
    """Seconds, and the final validation loss of every cell; NaN where it was stopped early."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        summary = sweep(
            study, folder, executor=make_executor("local", slots), console=Console(file=io.StringIO(), width=100)
        )
        seconds = time.perf_counter() - begun
        if summary.failed or summary.left:
            raise SystemExit(f"the sweep is not complete, so there is nothing to compare: {summary}")
        ends = {cell.name: read_end(Path(folder) / cell.folder) for cell in study.cells()}
    return seconds, {name: math.nan if early else loss for name, (loss, early) in ends.items()}


def run_plain(cells: list[Cell]) -> tuple[float, dict[str, float]]:
    begun = time.perf_counter()
    losses = {cell.name: train_plainly(cell.config) for cell in cells}
    return time.perf_counter() - begun, losses


def train_plainly(config: RunConfig) -> float:
    """What one would write in a notebook; returns the final validation loss."""
    task = build_task(config, Processes())
    model, rate, batches = task.model, simulate(config).rate, task.batches("train", config.seed)
    optimizer = make_adamw(model, config)
    evaluate(task, config)
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate.at(config.optim.lr, step, 0)
        loss = task.loss(model, batches.next(config.batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if step % config.eval_every == 0:
            found = evaluate(task, config)
    return found if config.steps % config.eval_every == 0 else evaluate(task, config)


def make_adamw(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    optim = config.optim
    # PyTorch decays by weight_decay * lr; divided by the peak it is our independent decay, weight_decay * lr / peak.
    decay = optim.weight_decay / optim.lr if optim.independent_decay else optim.weight_decay
    ours = groups(model, lr=optim.lr, weight_decay=decay)
    plain = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in ours]
    return torch.optim.AdamW(plain, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


@torch.no_grad()
def evaluate(task: Task, config: RunConfig) -> float:
    task.model.eval()
    batches = task.batches("validation", 0)
    losses = [task.evaluate(task.model, batches.next(task.eval_batch))["loss"] for _ in range(config.eval_batches)]
    task.model.train()
    return float(torch.stack(losses).mean())


def compare(study: Study, swept: dict[str, float], plain: dict[str, float]) -> Bar:
    """The calmest learning rate of both: where training is stable, other sums of the same numbers end nearby."""
    names = [cell.name for cell in study.cells() if cell.lr == min(study.lrs)]
    worst = max(abs(swept[name] - plain[name]) for name in names)
    return Bar("largest difference of final losses at the lowest learning rate", worst, 0.01)


def show(study: Study, seconds: dict[str, list[float]]) -> None:
    table = Table(
        f"{len(study.cells())} cells, {study.base.steps} steps", "best s", "median s", box=None, pad_edge=False
    )
    for name, values in seconds.items():
        table.add_row(name, f"{min(values):.1f}", f"{median(values):.1f}")
    console.print(table, f"{torch.get_num_threads()} threads in the plain loop\n", highlight=False)


if __name__ == "__main__":
    tyro.cli(main)
