"""What watching costs, beside the step of a GPT with ten million parameters.

    python -m bench.watch                      about four minutes on two cores
    python -m bench.watch --rounds 5           rougher

The watcher's own work is timed inside a running loop, step by step, and divided by the rest of the same steps: a slow
minute slows both. Taps without listeners are compared with a model without taps, run alternately.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import tyro
from rich.table import Table
from torch import Tensor

from bench.measure import Bar, console, interleave, must_call, ratio, report
from trimtab import optim
from trimtab.nn import GPT, GPTConfig, attention, gpt, loss, transformer
from trimtab.watch import Watch

CONTEXT = 256


def main(threads: int = 2, rounds: int = 11, batch: int = 16) -> None:
    """Measure what a watcher adds to a step.

    Args:
        threads: for everything that is measured
        rounds: steps that are measured in each setting
        batch: sequences of 256 bytes in a step
    """
    torch.set_num_threads(threads)
    bars: list[Bar] = []
    for name, build in OPTIMIZERS.items():
        bars += measure_tensors(name, build, rounds, batch)
    measure_deep(rounds, batch)
    report([*bars, *measure_taps(rounds, batch)])


OPTIMIZERS: dict[str, Callable[[GPT], torch.optim.Optimizer]] = {
    "8-bit StableAdamW": lambda model: optim.StableAdamW(model.named_parameters(), lr=1e-4, bits=8),
    "torch's fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
}


def build_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(depth=3, width=512, heads=8, vocab=257, context=CONTEXT))


def measure_tensors(name: str, build: Callable[[GPT], torch.optim.Optimizer], rounds: int, batch: int) -> list[Bar]:
    """All signals of all tensors at every step, and at every tenth."""
    model = build_model()
    optimizer = build(model)
    watch = Watch(model, optimizer, taps=False, deep_every=10**9)
    with must_call("step", "gradient_norms"):
        spent, rest = run(model, optimizer, watch, rounds + 1, batch)
    look, step = median(spent[1:]), median(rest[1:])
    idle_watch = Watch(model, optimizer, every=10**9, taps=False)
    idle = median(run(model, optimizer, idle_watch, rounds, batch)[0])
    count = sum(p.numel() for p in model.parameters()) / 1e6
    table = Table(f"{name}, {count:.1f}M parameters", "median ms", "of the step", box=None, pad_edge=False)
    for row, seconds in (("step", step), ("a look at all tensors", look), ("a step between looks", idle)):
        table.add_row(row, f"{seconds * 1e3:.2f}", f"{seconds / step:.2%}")
    console.print(table, "")
    return [
        Bar(f"{name}: all tensors at every step, share of the step", look / step, 0.03),
        Bar(f"{name}: all tensors at every 10th step", (look + 9 * idle) / 10 / step, 0.005),
    ]


def measure_deep(rounds: int, batch: int) -> None:
    """What layers, totals and rounding errors add to the steps that look at them; no bar, for information."""
    table = Table("what one deep look adds", "median ms", "of the step", box=None, pad_edge=False)
    for name, taps in (("totals, rounding of the state", False), ("and layers", True)):
        model = build_model()
        optimizer = OPTIMIZERS["8-bit StableAdamW"](model)
        watch = Watch(model, optimizer, taps=taps, deep_every=2)
        spent, rest = run(model, optimizer, watch, 2 * rounds + 2, batch)
        steps = [a + b for a, b in zip(spent, rest, strict=True)][2:]
        plain, deep = median(steps[::2]), median(steps[1::2])  # they take turns
        table.add_row(name, f"{(deep - plain) * 1e3:.1f}", f"{deep / plain - 1:.1%}")
    console.print(table, "")


def measure_taps(rounds: int, batch: int) -> list[Bar]:
    """The forward pass with taps, and with taps that do not check for listeners."""
    model, (tokens, targets) = build_model(), data(batch)

    def forward() -> None:
        with torch.no_grad():
            model(tokens, targets)

    def without() -> None:
        with untapped():
            forward()

    timings = interleave({"taps": forward, "no taps": without}, 2 * rounds)
    return [Bar("taps without listeners, over a model without taps", ratio(timings, "taps", "no taps"), 1.01)]


@contextmanager
def untapped() -> Iterator[None]:
    """Every tap in the model replaced by nothing at all."""
    users: tuple[Any, ...] = (attention, gpt, loss, transformer)
    saved = [(module, module.tap) for module in users]
    for module in users:
        module.tap = lambda x, name: x
    try:
        yield
    finally:
        for module, tap in saved:
            module.tap = tap


def run(
    model: GPT, optimizer: torch.optim.Optimizer, watch: Watch, steps: int, batch: int
) -> tuple[list[float], list[float]]:
    """Seconds that the watcher took in every step, and seconds of everything else."""
    tokens, targets = data(batch)
    spent, rest = [], []
    with timed(watch) as clock:
        for _ in range(steps):
            clock[0], begun = 0.0, time.perf_counter()
            value = model(tokens, targets).loss
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(value)
            total = time.perf_counter() - begun
            spent.append(clock[0])
            rest.append(total - clock[0])
    watch.close()
    return spent, rest


@contextmanager
def timed(watch: Watch) -> Iterator[list[float]]:
    """Hooks and `step` of this watcher behind a clock."""
    clock = [0.0]

    def behind(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            clock[0] += time.perf_counter() - begun
            return result

        return call

    for hook in watch._hooks:
        hook.remove()
    optimizer = watch.optimizer
    watch._hooks = [
        optimizer.register_step_pre_hook(behind(watch._before)),
        optimizer.register_step_post_hook(behind(watch._after)),
    ]
    watch.step = behind(watch.step)  # type: ignore[method-assign]
    yield clock


def data(batch: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(257, (batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


if __name__ == "__main__":
    tyro.cli(main)
