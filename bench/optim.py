"""What the optimizers cost and what 8 bits do to their results, against PyTorch and the peers, in one run.

    python -m bench.optim                   everything: about ten minutes on two cores
    python -m bench.optim --only speed      one part: speed, overhead, memory, release or quality

Steps go through the real `optimizer.step()`. Peers that are not installed are left out and said so (`make bench`
installs them).
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.table import Table
from torch import Tensor, nn

from bench.measure import (
    Bar,
    Gradients,
    Timing,
    console,
    gpt2_shapes,
    interleave,
    must_call,
    peer,
    ratio,
    report,
    show,
    show_machine,
    step_bars,
)
from bench.quality import measure_quality
from trimtab import optim
from trimtab.nn import GPT, GPTConfig

Part = Literal["speed", "overhead", "memory", "release", "quality"]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
FUSED = "torch AdamW fused, 32-bit"


def main(rounds: int = 9, threads: int = 2, only: Part | None = None) -> None:
    """Measure the optimizers.

    Args:
        rounds: how often each candidate is timed; peers that take seconds are timed five times
        threads: for everything that is measured
        only: one part instead of all
    """
    torch.set_num_threads(threads)
    parts: dict[Part, Callable[[], list[Bar]]] = {
        "speed": lambda: measure_speed(rounds),
        "overhead": lambda: measure_overhead(5 * rounds),
        "memory": measure_memory,
        "release": lambda: measure_release(rounds),
        "quality": measure_quality,
    }
    show_machine(threads)
    missing = [name for name in ("bitsandbytes", "torchao", "optimi") if peer(name) is None]
    if missing:
        console.print(f"not installed, so their rows are missing: {', '.join(missing)}; `make bench` installs them\n")
    report([bar for name, run in parts.items() if only in (None, name) for bar in run()])


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3
    return params


def time_steps(makers: dict[str, Make], shapes: list[tuple[int, ...]], rounds: int) -> dict[str, Timing]:
    """The steps of all optimizers, in turns, on the same gradients."""
    gradients = Gradients(shapes)
    params = {name: [nn.Parameter(torch.randn(shape)) for shape in shapes] for name in makers}

    def next_gradients() -> None:
        grads = gradients.next()
        for mine in params.values():
            for p, g in zip(mine, grads, strict=True):
                p.grad = g

    next_gradients()
    steps = {name: make(params[name]).step for name, make in makers.items()}
    with must_call("step"):
        steps["trimtab AdamW, 8-bit"]()
    return interleave(steps, rounds, before=next_gradients)


# --- Speed


def measure_speed(rounds: int) -> list[Bar]:
    shapes = gpt2_shapes()
    ours: dict[str, Make] = {
        FUSED: lambda p: torch.optim.AdamW(p, fused=True),
        "trimtab AdamW, 8-bit": lambda p: optim.AdamW(p, bits=8),
        "   with the dynamic table": lambda p: optim.AdamW(p, bits=8, codebook="dynamic-symmetric"),
        "trimtab AdamW, 32-bit": lambda p: optim.AdamW(p),
        "trimtab StableAdamW, 8-bit": lambda p: optim.StableAdamW(p, bits=8),
        "trimtab LAMB, 8-bit": lambda p: optim.LAMB(p, bits=8),
        "trimtab AdEMAMix, 8-bit": lambda p: optim.AdEMAMix(p, bits=8),
        "trimtab Lion, 8-bit": lambda p: optim.Lion(p, bits=8),
        "trimtab SGD, 8-bit": lambda p: optim.SGD(p, momentum=0.9, bits=8),
    }
    timings = time_steps(ours, shapes, rounds)
    show("step on the 148 tensors of GPT-2 124M", timings, baseline=FUSED)
    bars = step_bars(timings, "GPT-2", FUSED)

    slow: dict[str, Make] = {
        "trimtab AdamW, 8-bit": ours["trimtab AdamW, 8-bit"],
        "trimtab StableAdamW, 8-bit": ours["trimtab StableAdamW, 8-bit"],
    }
    if (bitsandbytes := peer("bitsandbytes")) is not None:
        slow["bitsandbytes AdamW8bit"] = lambda p: bitsandbytes.optim.AdamW8bit(p)
    if (torchao := peer("torchao")) is not None:
        slow["torchao AdamW8bit"] = lambda p: torchao.AdamW8bit(p)
    if (optimi := peer("optimi")) is not None:
        slow["optimi StableAdamW, 32-bit"] = lambda p: optimi.StableAdamW(p, lr=1e-3, triton=False)
    timings = time_steps(slow, shapes, 5)
    show("the same, with the peers", timings, baseline="trimtab AdamW, 8-bit")
    for name, mine, bar in (
        ("bitsandbytes AdamW8bit", "trimtab AdamW, 8-bit", 15.0),
        ("torchao AdamW8bit", "trimtab AdamW, 8-bit", 15.0),
        ("optimi StableAdamW, 32-bit", "trimtab StableAdamW, 8-bit", 4.0),
    ):
        if name in timings:
            bars.append(Bar(f"times faster than {name}", ratio(timings, name, mine), bar, at_least=True))
    return bars


def measure_overhead(rounds: int) -> list[Bar]:
    """Many small tensors: what Python costs."""
    makers: dict[str, Make] = {
        FUSED: lambda p: torch.optim.AdamW(p, fused=True),
        "trimtab AdamW, 8-bit": lambda p: optim.AdamW(p, bits=8),
        "trimtab AdamW, 32-bit": lambda p: optim.AdamW(p),
        "trimtab StableAdamW, 8-bit": lambda p: optim.StableAdamW(p, bits=8),
    }
    timings = time_steps(makers, [(4096,)] * 300, rounds)
    show("step on 300 tensors of 4,096", timings, baseline=FUSED)
    return [Bar("8-bit AdamW on 300 small tensors, time over torch fused", ratio(timings, list(makers)[1], FUSED), 1.0)]


# --- Memory


def measure_memory() -> list[Bar]:
    """Bytes of state as it lies in memory, and how far a step goes above that."""
    table = Table("state on GPT-2 124M", "bytes per parameter", "extra during a step, MB", box=None, pad_edge=False)
    bars = []
    makers: dict[str, Make] = {
        "trimtab AdamW, 8-bit": lambda p: optim.AdamW(p, bits=8),
        "trimtab StableAdamW, 8-bit": lambda p: optim.StableAdamW(p, bits=8),
        "trimtab Lion, 8-bit": lambda p: optim.Lion(p, bits=8),
        "trimtab AdamW, 32-bit": lambda p: optim.AdamW(p),
    }
    for name, make in makers.items():
        params = parameters(gpt2_shapes())
        optimizer = make(params)
        optimizer.step()
        tensors = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        each = sum(x.nbytes for x in tensors) / sum(p.numel() for p in params)
        extra = peak_growth(optimizer.step) / 1e6
        table.add_row(name, f"{each:.3f}", f"{extra:.1f}")
        if name.endswith("8-bit"):
            bars.append(Bar(f"{name}, state bytes per parameter", each, 1.03 if "Lion" in name else 2.04))
            bars.append(Bar(f"{name}, extra memory during a step, MB", extra, 16.0))
    console.print(table, "")
    return bars


def measure_release(rounds: int) -> list[Bar]:
    """An iteration with few tokens, so that the step is a large part of it: plain, and with updates during backward."""
    tokens = torch.randint(0, 8192, (1, 16), generator=torch.Generator().manual_seed(0))

    def iterate(model: GPT, optimizer: optim.Optimizer) -> None:
        model(tokens, tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    bars = []
    for kind in (optim.AdamW, optim.StableAdamW):
        runs: dict[str, functools.partial[None]] = {}
        for name in ("plain", "released"):
            model = GPT(GPTConfig(depth=12, width=768, heads=12, context=16, vocab=8192))
            optimizer = kind(model.named_parameters(), lr=1e-5, bits=8)
            if name == "released":
                optimizer.step_in_backward(model)
            runs[name] = functools.partial(iterate, model, optimizer)
        timings = interleave(runs, rounds)
        show(f"iteration of a GPT with 98M parameters, {kind.__name__}", timings, baseline="plain")
        most = {name: most_gradients(run.args[0], run) for name, run in runs.items()}
        console.print(f"gradients at the same time: {most['plain']:.0f} MB, released {most['released']:.0f} MB\n")
        bars.append(Bar(f"{kind.__name__} released, time over plain", ratio(timings, "released", "plain"), 1.05))
        share = most["released"] / most["plain"]
        bars.append(Bar(f"{kind.__name__} released, share of the gradients in memory", share, 0.25))
    return bars


def most_gradients(model: nn.Module, run: Callable[[], Any]) -> float:
    """Megabytes of gradients that exist together, at most."""
    params, most = list(model.parameters()), 0

    def look(new: Tensor) -> None:
        nonlocal most
        most = max(most, new.nbytes + sum(p.grad.nbytes for p in params if p.grad is not None))

    hooks = [p.register_hook(look) for p in params]
    run()
    for hook in hooks:
        hook.remove()
    return most / 1e6


def peak_growth(run: Callable[[], Any]) -> int:
    """By how many bytes the process grows at most while this runs (Linux)."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # forget the old peak
    before = status("VmRSS")
    run()
    return max(0, status("VmHWM") - before)


if __name__ == "__main__":
    tyro.cli(main)
