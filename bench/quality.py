"""What 8 bits of state do to the result: the total update after 30, 2,000 and 10,000 steps, against float64.

    python -m bench.optim --only quality      every case, every peer that is installed; about half an hour

All candidates get the same gradients, step by step. The error is |p - p64| / |p64|, p what all steps together moved the
parameters by. Cases: gradients as they are in a model, independent ones, and those that break codes: blocks that mix
sizes, sparse and dead elements, outliers.
"""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from bench.measure import Bar, console, peer
from trimtab import optim

MARKS = (30, 2000, 10_000)
SIZE = 1 << 13
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OURS = "trimtab, 8-bit"


# --- Gradients


def gradients(kind: str, steps: int) -> Iterator[Tensor]:
    """One tensor per step, always the same ones."""
    if kind == "real":
        yield from real_gradients(steps)
        return
    generator, place = torch.Generator().manual_seed(0), torch.arange(SIZE)

    def draw() -> Tensor:
        return torch.randn(SIZE, generator=generator)

    def chosen(share: Tensor | float, count: int = SIZE) -> Tensor:
        return torch.rand(count, generator=generator) < share

    fixed, half = draw(), chosen(0.5)
    outlier, rows = place % 256 == 100, place // 64
    zipf = 1 / (1 + torch.randperm(SIZE // 64, generator=generator).float())
    for step in range(1, steps + 1):
        g = draw()
        match kind:
            case "Gaussian":
                yield g
            case "Gaussian with drift":
                yield g + 0.3 * fixed
            case "sizes spread by 10^(0.4 N)":
                yield g * 10 ** (0.4 * fixed)
            case "sizes spread by 10^N":
                yield g * 10 ** (fixed - 3)
            case "1e-12 to 1e3 in one block":
                yield g * 10 ** (15 * (place * 0.6180339887 % 1) - 12)
            case "heavy tails":
                yield g / (draw().abs() + 1e-3)
            case "1 % sparse":
                yield torch.where(chosen(0.01), g, 0.0)
            case "half of them rare":
                yield torch.where(half | torch.tensor(step % 97 == 1), g, 0.0)
            case "rows by Zipf's law":
                yield torch.where(chosen(zipf, SIZE // 64)[rows], g, 0.0)
            case "constant":
                yield fixed.clone()
            case "decaying":
                yield g * 0.999**step
            case "outliers x100":
                yield torch.where(outlier, 100 * g, g)
            case "outliers x1000":
                yield torch.where(outlier, 1000 * g, g)
            case "one dead in 64 after 50 steps":
                yield torch.where((place % 64 == 7) & (step > 50), 0.0, g)
            case _:
                raise ValueError(f"unknown kind of gradient {kind!r}")


KINDS = (
    "real",
    "Gaussian",
    "Gaussian with drift",
    "sizes spread by 10^(0.4 N)",
    "sizes spread by 10^N",
    "1e-12 to 1e3 in one block",
    "heavy tails",
    "1 % sparse",
    "half of them rare",
    "rows by Zipf's law",
    "constant",
    "decaying",
    "outliers x100",
    "outliers x1000",
    "one dead in 64 after 50 steps",
)


def real_gradients(steps: int, width: int = 64, context: int = 64) -> Iterator[Tensor]:
    """Of a one-layer Transformer over the bytes of the standard library, under AdamW; its matrices laid end to end."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((library / name).read_bytes() for name in ("argparse.py", "typing.py", "inspect.py", "tarfile.py"))
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)
    embed, head = nn.Embedding(256, width), nn.Linear(width, 256)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
    params = [p for module in (embed, layer, head) for p in module.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(context)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(corpus) - context - 1, (16,), generator=generator)
        x = torch.stack([corpus[i : i + context + 1] for i in starts.tolist()])
        logits = head(layer(embed(x[:, :-1]), src_mask=mask))
        nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
        yield torch.cat([p.grad.flatten() for p in params if p.grad is not None and p.numel() >= 4096])
        optimizer.step()
        optimizer.zero_grad()


# --- Float64


def adamw_in_float64(betas: tuple[float, float]) -> Callable[[int], Iterator[Tensor]]:
    def run(size: int) -> Any:
        (beta1, beta2), t = betas, 0
        p, m, v = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
        while True:
            g = (yield p).double()
            t += 1
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            p -= 1e-3 * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8)

    return run


def lion_in_float64(betas: tuple[float, float]) -> Callable[[int], Iterator[Tensor]]:
    def run(size: int) -> Any:
        beta1, beta2 = betas
        p, m = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        while True:
            g = (yield p).double()
            p -= 1e-3 * (beta1 * m + (1 - beta1) * g).sign()
            m = beta2 * m + (1 - beta2) * g

    return run


# --- Measuring


@dataclass
class Result:
    """Of one candidate on one kind of gradient."""

    errors: list[float] = field(default_factory=list)  # at each mark
    largest: float = 0.0  # step of one element, over the largest in float64


def compare(kind: str, makers: dict[str, Make], exact: Any, marks: tuple[int, ...]) -> dict[str, Result]:
    """Run all candidates side by side."""
    results = {name: Result() for name in makers}
    stream = gradients(kind, marks[-1])
    first = next(stream)
    reference = exact(first.numel())
    next(reference)
    params = {name: nn.Parameter(torch.zeros_like(first)) for name in makers}
    optimizers = {name: make([params[name]]) for name, make in makers.items()}
    before, before64, largest64 = {name: p.detach().clone() for name, p in params.items()}, torch.zeros(()), 0.0
    for step, g in enumerate(chain([first], stream), start=1):
        p64 = reference.send(g).clone()
        largest64 = max(largest64, float((p64 - before64).abs().max()))
        before64 = p64
        for name, p in params.items():
            p.grad = g.clone()
            optimizers[name].step()
            moved = p.detach().clone()
            results[name].largest = max(results[name].largest, float((moved - before[name]).abs().max()))
            before[name] = moved
            if step in marks:
                results[name].errors.append(float((moved - p64).norm() / p64.norm()))
    for result in results.values():
        result.largest /= largest64
    return results


def candidates(kind: str, betas: tuple[float, float]) -> dict[str, Make]:
    """Ours, the published table in our kernel, and the peers; `kind` is AdamW or Lion."""
    options: dict[str, Any] = {"lr": 1e-3, "betas": betas, "weight_decay": 0.0}
    ours: Any = {"AdamW": optim.AdamW, "Lion": optim.Lion}[kind]
    makers: dict[str, Make] = {
        OURS: lambda p: ours(p, bits=8, **options),
        "trimtab, dynamic": lambda p: ours(p, bits=8, codebook="dynamic", **options),
        "trimtab, dynamic-symmetric": lambda p: ours(p, bits=8, codebook="dynamic-symmetric", **options),
    }
    if (bitsandbytes := peer("bitsandbytes")) is not None:
        theirs: Any = {"AdamW": bitsandbytes.optim.AdamW8bit, "Lion": bitsandbytes.optim.Lion8bit}[kind]
        makers["bitsandbytes"] = lambda p: theirs(p, **options)
    if kind == "AdamW" and (torchao := peer("torchao")) is not None:
        makers["torchao"] = lambda p: torchao.AdamW8bit(p, **options)
        makers["torchao, float8"] = lambda p: torchao.AdamWFp8(p, **options)
    return makers


def measure_quality(marks: tuple[int, ...] = MARKS, kinds: tuple[str, ...] = KINDS) -> list[Bar]:
    """One table per optimizer and mark, and a bar for every case: no worse than the best of the others."""
    bars = []
    for name, betas, exact in (
        ("AdamW", (0.9, 0.999), adamw_in_float64),
        ("Lion", (0.9, 0.99), lion_in_float64),
        ("AdamW", (0.9, 0.95), adamw_in_float64),
        ("AdamW", (0.9, 0.99), adamw_in_float64),
    ):
        makers = candidates(name, betas)
        found = {}
        for kind in kinds:
            found[kind] = compare(kind, makers, exact(betas), marks)
            console.print(f"[dim]{name} {betas}: {kind}[/dim]", highlight=False)
        for i, mark in enumerate(marks):
            table = Table(
                f"{name} {betas}, error after {mark} steps", *makers, "largest step", box=None, pad_edge=False
            )
            for kind, results in found.items():
                errors = {who: result.errors[i] for who, result in results.items()}
                cells = [f"{error:.2e}" for error in errors.values()]
                table.add_row(kind, *cells, f"{results[OURS].largest:.2f}x")
                best = min(error for who, error in errors.items() if who != OURS)
                title = f"{name} {betas}, {kind}, {mark} steps: error over that of the best other"
                bars.append(Bar(title, errors[OURS] / best, 1.0))
            console.print(table, "")
        worst = max(results[OURS].largest for results in found.values())
        bars.append(Bar(f"{name} {betas}: largest step over that in float64, worst case", worst, 2.0))
    return bars
