"""Timing on a noisy machine: the candidates run alternately; the best and the median are reported.

Ratios of two candidates compare their medians over the same rounds, so that a slow minute slows both.
"""

import importlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trimtab.ops import backends, doctor

console = Console(width=120)


@dataclass(frozen=True)
class Timing:
    seconds: list[float]

    @property
    def best_ms(self) -> float:
        return min(self.seconds) * 1e3

    @property
    def median_ms(self) -> float:
        return median(self.seconds) * 1e3


def interleave(
    candidates: Mapping[str, Callable[[], Any]], rounds: int, *, before: Callable[[], None] = lambda: None
) -> dict[str, Timing]:
    """Time every candidate once per round, after one round that does not count. `before` runs before each round."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for counted in [False] + [True] * rounds:
        before()
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if counted:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(values) for name, values in seconds.items()}


def show(
    title: str, timings: Mapping[str, Timing], *, baseline: str, megabytes: Mapping[str, float] | None = None
) -> None:
    """One table; `x baseline` is time over the baseline's time, so smaller is faster."""
    columns = ["best ms", "median ms", f"x {baseline}"] + (["GB/s"] if megabytes else [])
    table = Table(title, *columns, box=None, pad_edge=False, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, timing in timings.items():
        row = [name, f"{timing.best_ms:.1f}", f"{timing.median_ms:.1f}", f"{ratio(timings, name, baseline):.2f}"]
        if megabytes:
            row.append(f"{megabytes[name] / timing.median_ms:.1f}" if name in megabytes else "")
        table.add_row(*row)
    console.print(table, "")


def ratio(timings: Mapping[str, Timing], name: str, baseline: str) -> float:
    return timings[name].median_ms / timings[baseline].median_ms


class _Spy:
    """The native module, noting which of its functions are called."""

    def __init__(self, module: Any) -> None:
        self.module, self.called = module, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self.module, name)


@contextmanager
def must_call(*kernels: str) -> Iterator[None]:
    """Fail unless the code inside really reaches these native kernels: a benchmark of a fallback is worse than none."""
    module = backends.native
    if module is None:
        raise SystemExit(f"native kernels are not here ({backends.native_missing}); there is nothing to measure")
    backends.native = spy = _Spy(module)  # type: ignore[assignment]
    try:
        yield
    finally:
        backends.native = module
    missing = set(kernels) - spy.called
    if missing:
        raise SystemExit(f"asked to time the native kernels {sorted(kernels)}, but {sorted(missing)} did not run")


@dataclass(frozen=True)
class Bar:
    """A number we promised, and what was measured. At most, or at least."""

    what: str
    measured: float
    bar: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar


def step_bars(timings: Mapping[str, Timing], where: str, baseline: str) -> list[Bar]:
    """The bars of the 8-bit steps. The memory traffic of 8-bit state is 0.62 of that of 32 bits."""
    assert backends.native is not None
    bar = 0.75 if backends.native.level() == "avx512" else 0.85
    bars = (("AdamW", bar), ("StableAdamW", 1.15))
    return [
        Bar(f"8-bit {name} on {where}, time over torch fused", ratio(timings, f"trimtab {name}, 8-bit", baseline), bar)
        for name, bar in bars
    ]


def report(bars: list[Bar]) -> None:
    for bar in bars:
        verdict = "[green]met[/]" if bar.met else "[red]missed[/]"
        sign = ">=" if bar.at_least else "<="
        console.print(f"{verdict:>16}  {bar.what}: {bar.measured:.3g} (bar {sign} {bar.bar})", highlight=False)


def show_machine(threads: int) -> None:
    """The line that every ratio is read with."""
    level = backends.native.level() if backends.native is not None else "none"
    flags = ", ".join(doctor.cpu_features())
    console.print(f"CPU: {flags}; native kernels: {level}; {threads} threads\n", highlight=False)


class Gradients:
    """Gradients of these shapes with other values at every step: views of one buffer, from a place that moves.

    With the same values at every step √v would be |g|: no training is like that, and the 8-bit code of such blocks is
    another one than that of blocks with similar √v.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes, self.turn = shapes, 0
        total = sum(math.prod(shape) for shape in shapes)
        self.buffer = torch.randn(total + 64 * 997, generator=torch.Generator().manual_seed(0)) * 1e-3

    def next(self) -> list[Tensor]:
        place, grads = 64 * (self.turn % 997), []
        self.turn += 1
        for shape in self.shapes:
            grads.append(self.buffer[place : place + math.prod(shape)].view(shape))
            place += math.prod(shape)
        return grads


def peer(name: str) -> Any:
    """The module, or None. torchao warns about libraries for other Python versions; that does not matter here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module({"torchao": "torchao.optim"}.get(name, name))
    except ImportError:
        return None


def gpt2_shapes(
    width: int = 768, depth: int = 12, vocabulary: int = 50_257, context: int = 1024
) -> list[tuple[int, ...]]:
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    layers = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    block = [*norm, *norm, *(shape for layer in layers for shape in (layer, layer[1:]))]
    return [(vocabulary, width), (context, width), *block * depth, *norm]
