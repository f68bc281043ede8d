"""How much memory does 8-bit optimizer state save? Dettmers et al. 2022, section 1 and Tables 1 and 2.

The paper: 8 bytes per parameter become 2 for Adam, and 4 become 1 for momentum; Adafactor with momentum needs 4. That
saves up to 8.5 GB (1.5B parameters), so that larger models fit. Here the bytes of real state tensors are counted after
one step of a small GPT. What fits into a given memory is computed from the config (trimtab/train/memory.py: float32
weights, gradients, state and activations of one row), not measured.

Peaks of whole processes, which `python -m bench.memory` measures, are a fifth to a third higher (the table is in
docs/optim.md and the README). The same models fit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trimtab.analysis.answers import Table
from trimtab.lab.questions.question import Checks, Measurement, Numbers, judge
from trimtab.recipes import gpt2_117m, gpt_lab
from trimtab.train.build import build_model, build_optimizer
from trimtab.train.config import GPTRun, OptimConfig, with_values
from trimtab.train.memory import Memory, estimate

WIDTH, DEPTH = 512, 2  # blocks of realistic shape; the embedding has 2% of the parameters
SMALL = 4096  # tensors with fewer values keep 32 bits
STATE: Mapping[str, OptimConfig] = {
    "torch.optim.AdamW": OptimConfig(name="torch-adamw", bits=32),
    "AdamW, 32 bits": OptimConfig(name="adamw", bits=32),
    "AdamW, 8 bits": OptimConfig(name="adamw"),
    "AdamW, 8 bits, published": OptimConfig(name="adamw", codebook="dynamic", block=2048, embedding_bits=8),
    "momentum, 32 bits": OptimConfig(name="sgd", bits=32),
    "momentum, 8 bits": OptimConfig(name="sgd", embedding_bits=8),
    "Lion, 8 bits": OptimConfig(name="lion", embedding_bits=8),
    "AdEMAMix, 8 bits": OptimConfig(name="ademamix", embedding_bits=8),
    "Adafactor with momentum": OptimConfig(name="adafactor", bits=32),
}
SHAPES = {"124M": (12, 768, 12), "355M": (24, 1024, 16), "774M": (36, 1280, 20), "1.5B": (48, 1600, 25)}  # GPT-2
GB = 10**9
MEMORIES = (6, 11, 24)  # GB, as in the paper's Table 2
PAPER_SAVED = 8.5  # GB, at 1.5B parameters


def measure(folder: Path) -> dict[str, Any]:
    config = with_values(gpt_lab(), {"model.width": WIDTH, "model.depth": DEPTH, "model.heads": 8})
    needs = {bits: {name: _needed(shape, bits) for name, shape in SHAPES.items()} for bits in (32, 8)}
    return {
        "state": {name: _count(replace(config, optim=optim)) for name, optim in STATE.items()},
        "saved": (needs[32]["1.5B"].optimizer - needs[8]["1.5B"].optimizer) / GB,
        "needed": {
            str(bits): {name: found.total / GB for name, found in sizes.items()} for bits, sizes in needs.items()
        },
    }


def _count(config: GPTRun) -> dict[str, float]:
    """Bytes of the state after a step, and those of the formula for Adam."""
    model = build_model(config)
    optimizer = build_optimizer(model, config.optim)
    params = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    tensors = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    optim, count = config.optim, sum(p.numel() for p in params.values())
    exact = [
        p.numel() < SMALL or optim.bits == 32 or (optim.embedding_bits == 32 and "embedding" in name)
        for name, p in params.items()
    ]
    per_moment = sum(
        4 * p.numel() if kept else p.numel() + 4 * -(-p.numel() // optim.block)
        for p, kept in zip(params.values(), exact, strict=True)
    )
    return {
        "bytes": sum(x.nbytes for x in tensors if x.numel() > 1) / count,  # not the step number
        "formula": per_moment / count,
        "params": count,
    }


def _needed(shape: tuple[int, int, int], bits: int) -> Memory:
    """An estimate for GPT-2 of this shape with one row of 1024 tokens."""
    depth, width, heads = shape
    values = {
        **{"model.depth": depth, "model.width": width, "model.heads": heads, "model.context": 1024},
        **{"batch": 1, "micro_batch": None, "tokens": None, "schedule.seqlen.start": None, "optim.bits": bits},
    }
    found = estimate(with_values(gpt2_117m(), values))
    assert found is not None
    return found


def check(numbers: Numbers) -> Checks:
    per = {name: found["bytes"] for name, found in numbers["state"].items()}
    yield judge(
        "Adam: 8 bytes per parameter become 2, and 2% more at most",
        {name: per[name] for name in ("AdamW, 32 bits", "AdamW, 8 bits, published")},
        lambda exact, few: abs(exact - 8) < 0.01 and few <= 2.04,
        note="bytes per parameter",
    )
    yield judge(
        "momentum: 4 bytes per parameter become 1, and 4% more at most",
        {name: per[name] for name in ("momentum, 32 bits", "momentum, 8 bits")},
        lambda exact, few: abs(exact - 4) < 0.01 and few <= 1.04,
        note="bytes per parameter",
    )
    adams = ("AdamW, 32 bits", "AdamW, 8 bits", "AdamW, 8 bits, published")
    ratios = {name: per[name] / (2 * numbers["state"][name]["formula"]) for name in adams}
    yield judge(
        "the state of Adam is that of the formula 2 (n - E) + 8 blocks + 8 E, within 0.1%",
        ratios,
        lambda *x: all(abs(ratio - 1) < 1e-3 for ratio in x),
        note="E: values with 32-bit state",
    )
    names = ("AdamW, 8 bits, published", "Adafactor with momentum")
    claim = "Adafactor with momentum needs twice the state of 8-bit Adam, within 10%"
    yield judge(claim, {name: per[name] for name in names}, lambda few, factored: 1.8 <= factored / few <= 2.2)
    yield judge(
        "at 1.5B parameters the state shrinks by as much as in the paper, within 10%",
        {"paper": PAPER_SAVED, "computed": numbers["saved"]},
        lambda paper, computed: abs(computed / paper - 1) <= 0.1,
        note="GB",
    )
    largest = {f"{gb} GB, {bits} bits": _largest(numbers, gb, bits) for gb in MEMORIES for bits in ("32", "8")}
    yield judge(
        "with 8 bits a larger GPT-2 fits into 6, 11 and 24 GB",
        {key: 0.0 if name is None else float(list(SHAPES).index(name) + 1) for key, name in largest.items()},
        lambda *x: all(few > exact for exact, few in zip(x[::2], x[1::2], strict=True)),
        note="place among 124M, 355M, 774M, 1.5B; 0: none",
    )


def _largest(numbers: Numbers, gb: int, bits: str) -> str | None:
    fitting = [name for name in SHAPES if numbers["needed"][bits][name] <= gb]
    return fitting[-1] if fitting else None


def tables(numbers: Numbers) -> Iterator[Table]:
    rows = [(name, found["bytes"]) for name, found in numbers["state"].items()]
    yield Table("Bytes of optimizer state per parameter, counted", ("optimizer", "bytes per parameter"), rows)
    columns = ("memory, GB", "32-bit AdamW", "8-bit AdamW")
    fits: list[tuple[Any, ...]] = [
        (gb, *(_largest(numbers, gb, bits) or "none" for bits in ("32", "8"))) for gb in MEMORIES
    ]
    yield Table("The largest GPT-2 that fits, computed for one row of 1024 tokens in float32", columns, fits)
    needed: list[tuple[Any, ...]] = [
        (name, *(numbers["needed"][bits][name] for bits in ("32", "8"))) for name in SHAPES
    ]
    yield Table("GB that a training needs, computed", ("GPT-2", "32-bit AdamW", "8-bit AdamW"), needed)


QUESTION = Measurement(
    "state-memory",
    __doc__,
    measure,
    check,
    minutes=0.2,
    paper="P2",
    design=(
        f"State tensors of a GPT with {DEPTH} blocks of width {WIDTH} after one step. Totals for the shapes of GPT-2 "
        "are computed from the config; `python -m bench.memory` measures them."
    ),
    tables=tables,
)
