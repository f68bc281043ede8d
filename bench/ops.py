"""What the kernels cost, against PyTorch, bitsandbytes and the memory itself, in one run.

    python -m bench.ops                     everything: about two minutes on two cores
    python -m bench.ops --only step         one part: quantize, step, gpt2, int8, gelu or import
    python -m bench.ops --millions 8        smaller tensors, for a quick look

Every candidate of a table takes its turn in every round. Peers that are not installed are left out and said so
(`make bench` installs them).
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
import tyro
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from bench.measure import (
    Bar,
    Gradients,
    Timing,
    console,
    gpt2_shapes,
    interleave,
    must_call,
    ratio,
    report,
    show,
    show_machine,
    step_bars,
)
from trimtab.ops import (
    backends,
    dequantize_blockwise,
    fused_step,
    gradient_ratios,
    int8,
    load_codebook,
    quantize_blockwise,
    step_rules,
)
from trimtab.ops.blockwise import count_blocks
from trimtab.ops.gelu import gelu
from trimtab.ops.step import Code

HAS_PEER = importlib.util.find_spec("bitsandbytes") is not None

Part = Literal["quantize", "step", "gpt2", "int8", "gelu", "import"]
BLOCK = 256


def main(millions: int = 64, rounds: int = 9, threads: int = 2, only: Part | None = None) -> None:
    """Measure the kernels.

    Args:
        millions: size of the flat tensors, in units of 2^20 values
        rounds: how often each candidate is timed
        threads: for everything that is measured
        only: one part instead of all
    """
    torch.set_num_threads(threads)
    count = millions << 20
    parts: dict[Part, Callable[[], list[Bar]]] = {
        "quantize": lambda: measure_quantize(count, rounds),
        "step": lambda: measure_step(f"AdamW step, one tensor of {millions}M", [(count,)], rounds, flat=True),
        "gpt2": lambda: measure_step("AdamW step, the 148 tensors of GPT-2 124M", gpt2_shapes(), rounds, flat=False),
        "int8": lambda: measure_int8(rounds),
        "gelu": lambda: measure_gelu(rounds),
        "import": lambda: measure_import(rounds),
    }
    show_machine(threads)
    console.print(f"int8 product: {backends.int8_product()[1]}\n", highlight=False)
    if not HAS_PEER:
        console.print("bitsandbytes is not installed, so its rows are missing; `make bench` installs it\n")
    bars = [bar for name, run in parts.items() if only in (None, name) for bar in run()]
    report(bars)


def measure_quantize(count: int, rounds: int) -> list[Bar]:
    """Traffic: 4 bytes per value on one side, 1 on the other, and the scales. A fresh result also costs its pages."""
    x, book = torch.randn(count), load_codebook()
    codes, absmax = quantize_blockwise(x, book, block=BLOCK)
    out = torch.empty(count)
    quantize: dict[str, Callable[[], Any]] = {
        "trimtab": lambda: quantize_blockwise(x, book, block=BLOCK),
        "trimtab, out=": lambda: quantize_blockwise(x, book, block=BLOCK, out=(codes, absmax)),
        "copy float32, out=": lambda: out.copy_(x),
    }
    dequantize: dict[str, Callable[[], Any]] = {
        "trimtab": lambda: dequantize_blockwise(codes, absmax, book, block=BLOCK),
        "trimtab, out=": lambda: dequantize_blockwise(codes, absmax, book, block=BLOCK, out=out),
        "copy float32, out=": lambda: out.copy_(x),
    }
    if HAS_PEER:  # which has no out= on the CPU
        from bitsandbytes import functional as bnb

        peer_codes, peer_state = bnb.quantize_blockwise(x, blocksize=BLOCK)
        quantize["bitsandbytes"] = lambda: bnb.quantize_blockwise(x, blocksize=BLOCK)
        dequantize["bitsandbytes"] = lambda: bnb.dequantize_blockwise(peer_codes, peer_state)
    bars = []
    for title, candidates, bar in (("quantize", quantize, 6.0), ("dequantize", dequantize, 2.5)):
        with must_call(title):
            candidates["trimtab"]()
        timings = interleave(candidates, rounds)
        traffic = {name: (8 if name.startswith("copy") else 5 + 4 / BLOCK) * count / 1e6 for name in candidates}
        show(
            f"{title} {count >> 20}M float32, block {BLOCK}", timings, baseline="copy float32, out=", megabytes=traffic
        )
        if HAS_PEER:
            speed = ratio(timings, "bitsandbytes", "trimtab")
            bars.append(Bar(f"{title}, times the speed of bitsandbytes", speed, bar, at_least=True))
    return bars


class Model:
    """Parameters of these shapes with gradients, and 8-bit or 32-bit Adam state for our step."""

    def __init__(self, shapes: list[tuple[int, ...]], *, bits: int, code: Code = "quadratic") -> None:
        self.code = code
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.randn(shape, generator=generator) for shape in shapes]
        self.grads: list[Tensor] = []
        # Small tensors keep 32 bits, as the optimizers do it.
        narrow = [i for i, p in enumerate(self.params) if bits == 8 and p.numel() >= 4096]
        wide = [i for i in range(len(shapes)) if i not in set(narrow)]
        self.groups: list[tuple[list[int], list[list[Tensor]], list[list[Tensor]] | None]] = []
        if narrow:
            codes = [[torch.zeros_like(self.params[i], dtype=torch.uint8) for i in narrow] for _ in range(2)]
            scales = [[torch.zeros(count_blocks(self.params[i].numel(), BLOCK)) for i in narrow] for _ in range(2)]
            self.groups.append((narrow, codes, scales))
        if wide:
            self.groups.append((wide, [[torch.zeros_like(self.params[i]) for i in wide] for _ in range(2)], None))

    def adamw(self) -> None:
        for members, states, absmax in self.groups:
            params, grads = [self.params[i] for i in members], [self.grads[i] for i in members]
            rows = _adamw_rows(torch.full((len(members),), 10.0))
            fused_step("adamw", params, grads, states, rows, absmax=absmax, block=BLOCK, code=self.code)

    def stable_adamw(self) -> None:
        for members, states, absmax in self.groups:
            params, grads = [self.params[i] for i in members], [self.grads[i] for i in members]
            steps = torch.full((len(members),), 10.0)
            numels = torch.tensor([p.numel() for p in params])
            first = step_rules.debiased(_adamw_rows(steps))
            scales = None if absmax is None else absmax[1]
            ratios = gradient_ratios(grads, states[1], first, absmax=scales, block=BLOCK, code=self.code)
            rms = step_rules.rms_from_ratios(ratios, numels)
            rows = _adamw_rows(steps, 1e-3 / rms.clamp(min=1))
            fused_step("adamw", params, grads, states, rows, absmax=absmax, block=BLOCK, code=self.code)


def _adamw_rows(steps: Tensor, lr: step_rules.Number = 1e-3) -> Tensor:
    t = steps.double()
    averages = step_rules.adam_averages((0.9, 0.999), t)
    return step_rules.rows(steps, **averages, eps=1e-8, decay=1 - lr * 0.01, lr=lr / (1 - 0.9**t))


def measure_step(title: str, shapes: list[tuple[int, ...]], rounds: int, *, flat: bool) -> list[Bar]:
    ours8, ours32 = Model(shapes, bits=8), Model(shapes, bits=32)
    table8, stable8 = Model(shapes, bits=8, code="codebook"), Model(shapes, bits=8)
    theirs = [[torch.nn.Parameter(p.clone()) for p in ours8.params] for _ in range(1 + HAS_PEER)]
    gradients = Gradients(shapes)

    def next_gradients() -> None:
        grads = gradients.next()
        for model in (ours8, ours32, table8, stable8):
            model.grads = grads
        for params in theirs:
            for p, g in zip(params, grads, strict=True):
                p.grad = g

    next_gradients()
    fused = torch.optim.AdamW(theirs[0], lr=1e-3, fused=True)
    candidates: dict[str, Callable[[], Any]] = {
        "torch AdamW fused, 32-bit": fused.step,
        "trimtab AdamW, 8-bit": ours8.adamw,
        "   with the dynamic table": table8.adamw,
        "trimtab StableAdamW, 8-bit": stable8.stable_adamw,
        "trimtab AdamW, 32-bit": ours32.adamw,
    }
    if HAS_PEER:
        import bitsandbytes

        peer = bitsandbytes.optim.AdamW8bit(theirs[1], lr=1e-3)
        candidates["bitsandbytes AdamW8bit"] = peer.step
    if flat:
        assert backends.native is not None
        for name, model in (("memory traffic alone, 8-bit", ours8), ("memory traffic alone, 32-bit", ours32)):
            candidates[name] = _traffic(model)
    with must_call("step"):
        ours8.adamw()
    timings = interleave(candidates, rounds, before=next_gradients)
    show(title, timings, baseline="torch AdamW fused, 32-bit")
    return step_bars(timings, "64M" if flat else "GPT-2", "torch AdamW fused, 32-bit")


def _traffic(model: Model) -> Callable[[], None]:
    """The loads and stores of one AdamW step and no arithmetic: what the memory allows. On copies: it spoils them."""
    assert backends.native is not None
    native, (members, states, absmax) = backends.native, model.groups[0]
    tensors = [x.clone() for x in (model.params[members[0]], model.grads[members[0]], states[0][0], states[1][0])]
    count, quantized, threads = tensors[0].numel(), absmax is not None, torch.get_num_threads()
    return lambda: native.traffic(*(x.data_ptr() for x in tensors), count, quantized, threads)


def measure_int8(rounds: int, rows: int = 4096, inner: int = 1024, columns: int = 4096) -> list[Bar]:
    """One linear layer's forward, and its pieces."""
    x, w = torch.randn(rows, inner), torch.randn(columns, inner)
    (xq, xs), (wq, ws) = int8.quantize_rowwise(x), int8.quantize_tensorwise(w)

    def whole() -> Tensor:
        b, b_absmax = int8.quantize_tensorwise(w)
        return int8.int8_linear(x, b.t(), b_absmax)

    product, _ = backends.int8_product()
    with must_call("quantize_int8", *{"onednn": ["rescale"], "native": ["matmul"], "reference": []}[product]):
        whole()
    timings = interleave(
        {
            "float32 matmul": lambda: x @ w.t(),
            "int8: quantize + matmul + rescale": whole,
            "   quantize x by row": lambda: int8.quantize_rowwise(x),
            "   quantize w as a tensor": lambda: int8.quantize_tensorwise(w),
            "   quantize x by column": lambda: int8.quantize_columnwise(x),
            "   quantize x + matmul + rescale": lambda: int8.int8_linear(x, wq.t(), ws),
            "   matmul + rescale": lambda: int8.int8_matmul(xq, wq.t(), xs, ws),
        },
        rounds,
    )
    show(f"int8 linear pieces, {rows} x {inner} x {columns}", timings, baseline="float32 matmul")
    speed = ratio(timings, "float32 matmul", "int8: quantize + matmul + rescale")
    return [Bar("int8 quantize + matmul + rescale, times the speed of the float32 matmul", speed, 2.0, at_least=True)]


def measure_gelu(rounds: int) -> list[Bar]:
    """Forward and backward, at the sizes of an MLP's inner layer from a test's to GPT-2's."""
    table = Table("gelu, forward + backward", "torch ms", "trimtab ms", "speed-up", box=None, pad_edge=False)
    speeds = {}
    for count in (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 23):
        x, grad = torch.randn(count, requires_grad=True), torch.randn(count)
        candidates = {
            "torch": lambda x=x, grad=grad: torch.autograd.grad(F.gelu(x, approximate="tanh"), x, grad),
            "trimtab": lambda x=x, grad=grad: torch.autograd.grad(gelu(x), x, grad),
        }
        with must_call("gelu"):
            candidates["trimtab"]()
        timings = interleave(candidates, max(rounds, min(200, (1 << 21) // count)))
        speeds[count] = ratio(timings, "torch", "trimtab")
        times = [f"{timings[name].median_ms:.2f}" for name in ("torch", "trimtab")]
        table.add_row(f"{count >> 10}k values", *times, f"{speeds[count]:.2f}x")
    console.print(table, "")
    return [Bar("gelu on 256k values, times the speed of PyTorch", speeds[1 << 18], 2.0, at_least=True)]


def measure_import(rounds: int) -> list[Bar]:
    """In fresh interpreters, each timing its own import statement."""

    def importing(what: str) -> float:
        code = f"import time, torch; start = time.perf_counter(); {what}; print(time.perf_counter() - start)"
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    importing("import trimtab.nn, trimtab.optim")  # fills the caches
    extra = Timing([importing("import trimtab.nn, trimtab.optim") for _ in range(rounds)])
    show("import", {"trimtab, after torch": extra}, baseline="trimtab, after torch")
    return [Bar("import trimtab.nn and trimtab.optim after torch, seconds", extra.median_ms / 1e3, 0.15)]


if __name__ == "__main__":
    tyro.cli(main)
