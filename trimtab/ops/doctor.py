"""Self-test: which kernels are available, and do they match the reference?

`examine()` runs every op on a small input. It finds a kernel that was built for another machine, and a library that
computes something else.
"""

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from trimtab.ops import backends, blockwise, fingerprint, float8, gelu, int8
from trimtab.ops.codebook import load_codebook
from trimtab.ops.float32 import attention, product, score
from trimtab.ops.step import fused
from trimtab.ops.step.rules import adam_averages, rows

# The instruction sets that the kernels use.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "i8mm")
PACKAGES = ("trimtab", "torch", "numpy", "triton")


@dataclass
class Report:
    machine: dict[str, str]
    served: list[backends.Served]
    missing: list[str] = field(default_factory=list)  # slower than it could be, and what to do about it
    broken: list[str] = field(default_factory=list)  # wrong, or expected and not there


def examine() -> Report:
    """Collect the facts, and compare every op with its reference once."""
    report = Report(machine=_machine(), served=backends.served())
    if backends.native_missing is not None and not backends.interpreted:
        has_compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
        where = report.broken if has_compiler else report.missing
        where.append(f"native CPU kernels: {backends.native_missing}")
    if torch.cuda.is_available() and backends.triton_missing is not None:
        report.broken.append(f"GPU kernels: {backends.triton_missing}")
    if backends.int8_product()[0] == "reference":
        report.missing.append(f"int8 matmul is no faster than float32 here: {backends.int8_product()[1]}")
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        for op, check in CHECKS.items():
            try:
                agrees, what = check(device), "does not agree with its reference"
            except Exception as error:  # whatever it is, it goes into the report
                agrees, what = False, f"failed: {error}"
            if not agrees:
                report.broken.append(f"{op} on {device} {what}")
    return report


def _machine() -> dict[str, str]:
    native = str(backends.native_missing)
    if backends.native is not None:
        native = f"{', '.join(backends.native.levels())}; built from sources {backends.native.SOURCES[:12]}"
    return {
        "CPU": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()} in PyTorch",
        "features": ", ".join(cpu_features()) or "none that the kernels use",
        "native kernels": native,
        "threads": str(torch.get_num_threads()),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def cpu_features() -> list[str]:
    """The instruction sets of this CPU that the kernels use."""
    flags = _cpu_flags()
    return [name for name in FEATURES if name in flags]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_flags() -> set[str]:
    """The CPU's features from /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":")[1].split()}


# --- One small check per op. 1000 values make three whole blocks and a short one.


def _values(device: str) -> Tensor:
    return torch.linspace(-1, 1, 1000, device=device, dtype=torch.float32) ** 3


def _quantize(device: str) -> bool:
    x, book = _values(device), load_codebook().to(device)
    codes, absmax = blockwise.quantize_blockwise(x, book)
    expected = blockwise.quantize_reference(x, book, 256)
    return torch.equal(codes, expected[0]) and torch.equal(absmax, expected[1])


def _dequantize(device: str) -> bool:
    codes = torch.arange(1000, device=device).to(torch.uint8)
    absmax, book = torch.linspace(0.1, 3, 4, device=device, dtype=torch.float32), load_codebook().to(device)
    expected = blockwise.dequantize_reference(codes, absmax, book, 256, torch.float32)
    return torch.equal(blockwise.dequantize_blockwise(codes, absmax, book), expected)


def _row(device: str) -> Tensor:
    """The first step of AdamW."""
    steps = torch.ones(1, device=device, dtype=torch.float32)
    return rows(steps, **adam_averages((0.9, 0.999), steps.double()), eps=1e-8, lr=0.1 / (1 - 0.9))


def _step(device: str, *, norms: bool) -> bool:
    """One AdamW step with 8-bit state from zero, in each code, by the op and by the reference."""
    return all(_step_in(code, device, norms=norms) for code in get_args(fused.Code))


def _step_in(code: fused.Code, device: str, *, norms: bool) -> bool:
    books = load_codebook().to(device), load_codebook(signed=False).to(device)
    g, row = _values(device).flip(0), _row(device)
    fresh = [_values(device), *torch.zeros(2, 1000, device=device, dtype=torch.uint8)]
    fresh += torch.zeros(2, 4, device=device, dtype=torch.float32)
    mine, theirs = ([x.clone() for x in fresh] for _ in range(2))
    expected = (theirs[:1], [g], theirs[1:3], theirs[3:], row, *books, "adamw", code, 256)
    stored: fused.Stored = {"absmax": [[a] for a in mine[3:]], "code": code}
    given = ("adamw", mine[:1], [g], [[c] for c in mine[1:3]], row)
    if norms:
        return torch.allclose(fused.step_norms(*given, **stored), fused.norms_reference(*expected), rtol=1e-5)
    fused.fused_step(*given, **stored)
    fused.step_reference(*expected)
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _gradient_norms(device: str) -> bool:
    g = [_values(device)]
    return torch.allclose(fused.gradient_norms(g), fused.gradient_norms_reference(g), rtol=1e-5)


def _gradient_ratios(device: str) -> bool:
    g, v, row = [_values(device)], [_values(device) ** 2], _row(device)
    expected = fused.ratios_reference(g, g, v, [], row, row, row, "rms", "codebook", 256)  # float32 needs no codebooks
    return torch.allclose(fused.gradient_ratios(g, v, row), expected, rtol=1e-5)


def _quantize_int8(device: str) -> bool:
    x = _values(device).view(20, 50)
    return all(
        torch.equal(a, b)
        for quantize, dim in ((int8.quantize_rowwise, 1), (int8.quantize_columnwise, 0))
        for a, b in zip(quantize(x), int8.quantize_reference(x, dim), strict=True)
    )


def _quantize_both_layouts(device: str) -> bool:
    x = _values(device).view(20, 50)
    found = zip(int8.quantize_both_layouts(x), int8.both_layouts_reference(x), strict=True)
    return all(torch.equal(a, b) for a, b in found)


def _requantize_both_layouts(device: str) -> bool:
    x = torch.linspace(-1, 1, 6, device=device).view(2, 3)
    kept = int8.empty_both_layouts(x)
    for changed in (x, x, x.neg().exp()):
        int8.requantize_both_layouts(changed, *kept)
        found = zip(kept[:3], int8.both_layouts_reference(changed), strict=True)
        if not all(torch.equal(a, b) for a, b in found):
            return False
    return True


def _int8_matmul(device: str) -> bool:
    x = _values(device).view(20, 50)
    a, b = int8.quantize_rowwise(x), int8.quantize_rowwise(x.flip(0))
    operands = (a[0], b[0].t(), a[1], b[1])
    expected = int8.matmul_reference(*operands, None, torch.float32)
    return torch.allclose(int8.int8_matmul(*operands), expected, rtol=1e-6)


def _int8_linear(device: str) -> bool:
    x = _values(device).view(20, 50)
    (a, a_absmax), (b, b_absmax) = int8.quantize_rowwise(x), int8.quantize_rowwise(x.flip(0))
    expected = int8.matmul_reference(a, b.t(), a_absmax, b_absmax, None, torch.float32)
    return torch.allclose(int8.int8_linear(x, b.t(), b_absmax), expected, rtol=1e-6)


def _round_float8(device: str) -> bool:
    x = torch.tensor([448.0, 449 / 2, -1.0, 0.0], device=device, dtype=torch.float32)
    return float8.round_float8_tensorwise(x, "e4m3").tolist() == [448.0, 224.0, -1.0, 0.0]


def _fingerprint(device: str) -> bool:
    x = torch.randn(1500)  # it reads CPU memory only
    return fingerprint.fingerprint(x) == fingerprint.fingerprint_reference(x)


def _product(device: str) -> bool:
    a, b = torch.randn(1500, 40, device=device), torch.randn(1500, 30, device=device)  # large enough for the kernel
    return torch.allclose(product.product_tn(a, b), a.t() @ b, rtol=1e-4, atol=1e-3)


def _attention(device: str) -> bool:
    qkv = _values(device)[:960].view(1, 20, 3, 2, 8).clone().requires_grad_()
    found = []
    for function in (attention.attention, attention.attention_reference):
        y = function(*qkv.unbind(2), causal=True, scale=0.5)
        found.append((y, *torch.autograd.grad(y.square().sum(), qkv)))
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))


def _score(device: str) -> bool:
    logits, index = 5 * _values(device)[:960].view(30, 32), torch.arange(32, device=device) % 30
    found = []
    for function in (score.score_, score.score_reference_):
        y = logits.clone()
        found.append((*function(y, index, index > 3, 1e-4), y))
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))


def _gelu(device: str, *, backward: bool) -> bool:
    x, grad = 8 * _values(device), _values(device)
    if backward:
        expected = gelu.backward_reference(grad.double(), x.double()).float()
        return torch.allclose(torch.ops.trimtab.gelu_backward(grad, x), expected, rtol=1e-5, atol=1e-6)
    return torch.allclose(gelu.gelu(x), gelu.gelu_reference(x.double()).float(), rtol=1e-5)


CHECKS: dict[str, Callable[[str], bool]] = {
    "quantize_blockwise": _quantize,
    "dequantize_blockwise": _dequantize,
    "fused_step": partial(_step, norms=False),
    "step_norms": partial(_step, norms=True),
    "gradient_norms": _gradient_norms,
    "gradient_ratios": _gradient_ratios,
    "quantize_int8": _quantize_int8,
    "quantize_both_layouts": _quantize_both_layouts,
    "requantize_both_layouts": _requantize_both_layouts,
    "int8_matmul": _int8_matmul,
    "int8_linear": _int8_linear,
    "round_float8": _round_float8,
    "fingerprint": _fingerprint,
    "product": _product,
    "attention": _attention,
    "score": _score,
    "gelu": partial(_gelu, backward=False),
    "gelu_backward": partial(_gelu, backward=True),
}
