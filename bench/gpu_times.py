"""Times on a GPU, against PyTorch, bitsandbytes and torchao, as one Markdown file to paste into an issue.

    python -m bench.gpu                  on a GPU: the self-test, optimizer steps, linear layers; writes gpu.md
    python -m bench.gpu --interpret      the same code on the CPU with tiny sizes, kernels in Triton's interpreter

Candidates run alternately, and each run ends by waiting for the device. Medians of the rounds; ratios are times over
that of the first line, so smaller is faster.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import Timing, console, gpt2_shapes, interleave, peer
from trimtab.cli.gpu import examine_gpu
from trimtab.nn import SwitchBackLinear
from trimtab.nn.kinds import LinearKind
from trimtab.ops import doctor
from trimtab.optim import AdamW, StableAdamW

Run = Callable[[], Any]
LAYOUTS: dict[str, Sequence[tuple[int, ...]]] = {
    "one tensor of 64M values": [(1 << 26,)],
    "GPT-2, 124M": gpt2_shapes(),
    "300 tensors of 4096 values": [(4096,)] * 300,
}
TINY: dict[str, Sequence[tuple[int, ...]]] = {"one tensor of 5003 values": [(5003,)], "3 tensors": [(64,)] * 3}
WIDTHS, TOKENS = (1024, 2048, 4096), 8192


def measure(page: Path, *, interpret: bool) -> None:
    """Check, time, and write the page."""
    device = torch.device("cpu" if interpret else "cuda")
    rounds = 2 if interpret else 20
    lines = ["# Trimtab on a GPU", "", *_machine(device), "", "## Self-test", "", *_self_test(device), ""]
    for name, shapes in (TINY if interpret else LAYOUTS).items():
        lines += _table(f"Optimizer step: {name}", _steps(shapes, device), rounds, device)
    for width in (64,) if interpret else WIDTHS:
        tokens = 32 if interpret else TOKENS
        title = f"Linear layer {width} x {width}, {tokens} tokens, bfloat16, forward and backward"
        lines += _table(title, _layers(width, tokens, device), rounds, device)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print(f"wrote {page}")


def _machine(device: torch.device) -> Iterator[str]:
    facts = doctor.examine().machine
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        facts["GPU"] = f"{torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}"
    else:
        facts["GPU"] = "none: Triton's interpreter on the CPU, so the times below mean nothing"
    facts["system"] = platform.platform()
    yield from (f"- {name}: {value}" for name, value in facts.items())


def _self_test(device: torch.device) -> Iterator[str]:
    left = []
    for result in examine_gpu(device):
        if result.not_run is not None:
            left.append(f"{result.name} ({result.not_run})")
            continue
        console.print(f"{'wrong' if result.wrong else 'ok'}: {result.name}", highlight=False)
        yield f"- {result.name}: {'**wrong**: ' + '; '.join(result.wrong) if result.wrong else 'ok'}"
    yield f"- not run: {'; '.join(left) or 'nothing'}"


def _table(title: str, runs: dict[str, Run | str], rounds: int, device: torch.device) -> Iterator[str]:
    """`runs` has a reason where a candidate cannot run."""
    console.print(title, highlight=False)
    timed = {name: _waiting(run, device) for name, run in runs.items() if not isinstance(run, str)}
    times: dict[str, Timing] = interleave(timed, rounds)
    first = next(iter(times.values())).median_ms
    yield from (f"## {title}", "", "| | median ms | best ms | ratio |", "|---|---|---|---|")
    for name, run in runs.items():
        if isinstance(run, str):
            yield f"| {name} | not run: {run} | | |"
        else:
            ms = times[name]
            yield f"| {name} | {ms.median_ms:.3f} | {ms.best_ms:.3f} | {ms.median_ms / first:.2f}x |"
    yield ""


def _waiting(run: Run, device: torch.device) -> Run:
    def wait() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return wait


def _steps(shapes: Sequence[tuple[int, ...]], device: torch.device) -> dict[str, Run | str]:
    def params() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for p in made:
            p.grad = torch.randn_like(p)
        return made

    ours = {"min_8bit_size": 1}
    runs: dict[str, Run | str] = {
        "torch AdamW, fused": torch.optim.AdamW(params(), fused=True).step,
        "trimtab AdamW, 8-bit": AdamW(params(), bits=8, **ours).step,  # type: ignore[arg-type]
        "trimtab AdamW, 32-bit": AdamW(params()).step,
        "trimtab StableAdamW, 8-bit": StableAdamW(params(), bits=8, **ours).step,  # type: ignore[arg-type]
    }
    for package in ("bitsandbytes.optim", "torchao.optim"):
        module, name = peer(package), f"{package.split('.')[0]} AdamW8bit"
        if module is None:
            runs[name] = "not installed"
        elif device.type != "cuda":
            runs[name] = "needs a GPU"
        else:
            runs[name] = module.AdamW8bit(params()).step
    return runs


def _layers(width: int, tokens: int, device: torch.device) -> dict[str, Run | str]:
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    kinds: tuple[LinearKind, ...] = ("switchback", "switchback-m", "switchback-q", "fp8-switchback")
    layers: dict[str, nn.Module] = {"nn.Linear": nn.Linear(width, width, device=device, dtype=torch.bfloat16)}
    for kind in kinds:
        layers[kind] = SwitchBackLinear(width, width, device=device, dtype=torch.bfloat16, kind=kind)

    def run(layer: nn.Module) -> None:
        y: Tensor = layer(x)
        torch.autograd.backward(y, g)
        x.grad = None
        layer.zero_grad()

    return {name: (lambda layer=layer: run(layer)) for name, layer in layers.items()}
