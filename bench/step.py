"""A whole training step (forward, backward, clipping, optimizer) of our GPT against nanoGPT's and Hugging Face's.

`python -m bench.train --only step`. The model is the same everywhere: GPT-2's shape, learned positions, a tied head, no
dropout; without biases, as in nanoGPT's training script, except Hugging Face's, which always has them. PyTorch's fused
AdamW runs after clipping the gradient's norm to 1, as in nanoGPT. StableAdamW needs no clipping and runs without.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor, nn

from bench.measure import Bar, Timing, console, interleave
from bench.nano_gpt import NanoGPT, decay_groups
from bench.nn import hugging_face, hugging_face_loss
from trimtab.nn import GPT, GPTConfig, convert_linears
from trimtab.ops import backends, doctor
from trimtab.optim import StableAdamW

NANO, PEER = "nanoGPT, fused AdamW", "Hugging Face GPT-2, fused AdamW"
FLOAT, FLOAT_8BIT = "trimtab, fused AdamW", "trimtab, 8-bit StableAdamW"
INT8 = "trimtab, SwitchBack, 8-bit StableAdamW"


@dataclass(frozen=True)
class Size:
    depth: int
    width: int
    heads: int
    vocab: int
    context: int
    batch: int
    rounds: int
    steps: int  # per round
    int8_bar: float  # without VNNI

    def __str__(self) -> str:
        return f"{self.depth}x{self.width}"


SIZES = (
    Size(4, 128, 4, vocab=256, context=64, batch=12, rounds=15, steps=20, int8_bar=1.2),
    Size(6, 384, 6, vocab=256, context=256, batch=16, rounds=5, steps=2, int8_bar=1.15),
    Size(12, 768, 12, vocab=50_304, context=512, batch=4, rounds=3, steps=1, int8_bar=1.15),
)


def measure_step(sizes: tuple[Size, ...] = SIZES) -> list[Bar]:
    flags = doctor.cpu_features()
    product, why = backends.int8_product()
    console.print(f"CPU: {', '.join(flags)}\nint8 products by {product}: {why}\n", highlight=False)
    return [bar for size in sizes for bar in _measure_size(size)]


def _measure_size(size: Size) -> list[Bar]:
    torch.manual_seed(0)
    tokens = torch.randint(0, size.vocab, (size.batch, size.context + 1))
    runs = _candidates(size, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    timings = interleave({name: _repeat(run, size.steps) for name, run in runs.items()}, size.rounds)
    _show(size, timings)
    gains = {name: timings[NANO].median_ms / timing.median_ms for name, timing in timings.items()}
    bar = size.int8_bar if "no VNNI" in backends.int8_product()[1] else 1.5
    return [
        Bar(f"{size}: {FLOAT}, over nanoGPT", gains[FLOAT], 1.0, at_least=True),
        Bar(f"{size}: {FLOAT_8BIT}, over nanoGPT", gains[FLOAT_8BIT], 1.0, at_least=True),
        Bar(f"{size}: {INT8}, over nanoGPT", gains[INT8], bar, at_least=True),
    ]


def _candidates(size: Size, tokens: Tensor, targets: Tensor) -> dict[str, Callable[[], None]]:
    shape = {"vocab": size.vocab, "context": size.context, "depth": size.depth, "width": size.width}
    config = GPTConfig(**shape, heads=size.heads, positions="learned", tied=True, norm_eps=1e-5)
    nano, theirs = NanoGPT(**shape, heads=size.heads), hugging_face(config)
    runs = {NANO: _clipped_step(nano, lambda: nano(tokens, targets))}
    if theirs is not None:
        runs[PEER] = _clipped_step(theirs, lambda: hugging_face_loss(theirs, tokens, targets))
    plain, eight_bit, quantized = GPT(config), GPT(config), GPT(config)
    convert_linears(quantized, "switchback", when="faster")
    runs[FLOAT] = _clipped_step(plain, lambda: plain.loss(tokens, targets).loss)
    runs[FLOAT_8BIT] = _stable_step(eight_bit, lambda: eight_bit.loss(tokens, targets).loss)
    runs[INT8] = _stable_step(quantized, lambda: quantized.loss(tokens, targets).loss)
    return runs


def _clipped_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def run() -> None:
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _stable_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = StableAdamW(decay_groups(model), lr=1e-4, betas=(0.9, 0.95), bits=8)

    def run() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _repeat(run: Callable[[], None], steps: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(steps):
            run()

    return several


def _show(size: Size, timings: dict[str, Timing]) -> None:
    tokens = size.batch * size.context * size.steps
    title = f"training step, {size}, context {size.context}, batch {size.batch}"
    table = Table(title, "best ms", "median ms", "tokens/s", "speed-up", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, timing in timings.items():
        speed = tokens / timing.median_ms * 1e3
        gain = timings[NANO].median_ms / timing.median_ms
        one = size.steps
        table.add_row(
            name, f"{timing.best_ms / one:.1f}", f"{timing.median_ms / one:.1f}", f"{speed:,.0f}", f"{gain:.2f}x"
        )
    console.print(table, "")
