"""Which kernels are available and, if one is not, why. PyTorch's dispatcher chooses between them.

`native` is the compiled CPU module or None; `triton_missing` is the reason why the GPU kernels are not used, or None.
Triton is imported only where there is a GPU, because importing it takes half a second.

With TRIMTAB_INTERPRET=1 the GPU kernels run on CPU tensors, in Triton's interpreter, in place of the native ones: very
slow, and the code that a GPU runs. `trimtab doctor --gpu --interpret` and tests use it.
"""

import importlib
import importlib.util
import os
import platform
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from trimtab.ops.native import table

Backend = Literal["reference", "native", "onednn", "torch", "triton"]
REBUILD = "Rebuild it: `make .venv/ready` in a clone, else `pip install --force-reinstall --no-deps trimtab`"


def find_mismatch(module: ModuleType) -> str | None:
    """Why a compiled module does not belong to this Python code, or None if it does."""
    if getattr(module, "TABLE", None) != table.describe():
        return f"stale: _native was built with another table of rules and columns. {REBUILD}"
    sources = table.hash_sources()
    if sources is not None and sources != module.SOURCES:
        return f"stale: _native was built from other C++ sources than those in trimtab/ops. {REBUILD}"
    return None


interpreted = os.environ.get("TRIMTAB_INTERPRET") == "1"
if interpreted:
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported
triton_device: Literal["cpu", "cuda"] = "cpu" if interpreted else "cuda"  # of the tensors that the GPU kernels get

native: ModuleType | None = None
native_missing: str | None = None
try:
    native = None if interpreted else importlib.import_module("trimtab.ops._native")
except ImportError as error:
    native_missing = f"not built ({error})"
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        native_missing = "not built: no C++ compiler was found; install g++ and reinstall trimtab"
else:
    native_missing = "TRIMTAB_INTERPRET=1" if native is None else find_mismatch(native)
    if native is not None and native_missing is not None:
        native = None
        warnings.warn(f"the native CPU kernels are not used, the reference is. {native_missing}", stacklevel=2)

triton_missing: str | None = None
if importlib.util.find_spec("triton") is None:
    triton_missing = "triton is not installed; pip install 'trimtab[gpu]'"
elif not torch.cuda.is_available() and not interpreted:
    triton_missing = "no CUDA device"

# The codes of the dtypes in the native module.
DTYPE_CODES = {getattr(torch, name): code for code, name in enumerate(table.DTYPES)}

# Allocations of this many bytes or more come from the system, not from the allocator's cache.
HUGE = 4 << 20

# The ops and the backends they have a kernel for, for doctor, tests and benchmarks.
_STEP = ("fused_step", "step_norms", "gradient_norms", "gradient_ratios")
_INT8 = ("quantize_int8", "quantize_both_layouts", "requantize_both_layouts", "int8_matmul", "int8_linear")
_OTHERS = ("quantize_blockwise", "dequantize_blockwise", *_INT8, "gelu", "gelu_backward")
_ALL: tuple[Backend, ...] = ("reference", "native", "triton")
OPS = dict.fromkeys((*_STEP, *_OTHERS), _ALL) | {"round_float8": _ALL[:1]}
OPS |= dict.fromkeys(("fingerprint", "product", "attention", "score"), _ALL[:2])


@dataclass(frozen=True)
class Served:
    """The backend of an op on one kind of device, and the reason."""

    op: str
    device: str
    backend: Backend
    reason: str


def served() -> list[Served]:
    """One row per op and per available device."""
    rows = []
    for op, kernels in OPS.items():
        backend: Backend = "native" if native is not None and "native" in kernels else "reference"
        reason = f"{native.level()} kernels" if native is not None else str(native_missing)
        if op in _INT8[3:]:
            backend, reason = int8_product()
        if op == "product":
            backend, reason = float_product()
        if kernels == ("reference",):
            reason = "simulated; there is only a PyTorch implementation"
        if interpreted and "triton" in kernels:
            backend, reason = "triton", "TRIMTAB_INTERPRET=1: the GPU kernels in Triton's interpreter"
        rows.append(Served(op, "cpu", backend, reason))
        if torch.cuda.is_available():
            on_gpu: Backend = "triton" if triton_missing is None and "triton" in kernels else "reference"
            why = "Triton kernels" if "triton" in kernels else "there is no kernel for GPUs: PyTorch operations"
            rows.append(Served(op, "cuda", on_gpu, triton_missing or why))
        elif (other := _other_device()) is not None:
            rows.append(Served(op, other, "reference", f"there are no kernels for {other}: PyTorch operations"))
    return rows


def _other_device() -> str | None:
    """The type of a GPU that is neither NVIDIA's nor AMD's, such as Apple's "mps" or Intel's "xpu"."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None or found.type == "cuda" else found.type


@cache
def int8_product() -> tuple[Literal["onednn", "native", "reference"], str]:
    """The backend of int8 matrix products on this CPU, and the reason.

    With VNNI our own product is the fastest, with AMX oneDNN's (`torch._int_mm`). That one needs VNNI or AMX: else it
    runs a plain loop, a hundred times slower.
    """
    if native is not None and native.has_vnni() and not torch.cpu._is_amx_tile_supported():
        return "native", f"{native.level()} with VNNI"
    if platform.machine() not in ("x86_64", "AMD64") or not torch.cpu._is_vnni_supported():
        why = "no VNNI, so torch._int_mm would be slow"
    elif _int_mm_is_exact():
        return "onednn", "torch._int_mm (oneDNN with VNNI or AMX)"
    else:
        why = "torch._int_mm gives wrong sums on this CPU"
    if native is not None and native.has_matmul():
        return "native", f"{why}; {native.level()} int16 pairs"
    return "reference", f"{why}; {native_missing or 'exact float32 products'}"


@cache
def float_product() -> tuple[Literal["onednn", "torch"], str]:
    """The library of large float32 products on this CPU (ops/float32/product.py), and the reason."""
    if native is None or native.levels()[0] != "avx512":
        return "torch", "PyTorch's own products"
    if not (torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_supported()):
        return "torch", "PyTorch has no oneDNN with AVX-512 here"
    if cpu_vendor() in ("GenuineIntel", ""):
        return "torch", "MKL uses AVX-512 on CPUs of Intel"
    return "onednn", f"oneDNN and native: MKL uses no AVX-512 on a CPU of {cpu_vendor()}"


def is_plain(x: Tensor) -> bool:
    """Whether nothing but a native kernel wants to see an op: no compiler, no mode, no subclass."""
    return (
        native is not None
        and x.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._functorch.is_legacy_batchedtensor(x)  # of is_grads_batched=True
    )


def cpu_vendor() -> str:
    """The vendor's name in /proc/cpuinfo, such as AuthenticAMD; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A fresh CPU tensor for a native kernel's result, on large pages if it is large and the system has them."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if native is not None and out.nbytes >= HUGE:
        native.prefer_huge_pages(out.data_ptr(), out.nbytes)
    return out


def _int_mm_is_exact() -> bool:
    """Test with the largest sums of both signs: arithmetic that saturates at 16 bits gives other results."""
    a = torch.full((32, 64), 127, dtype=torch.int8)
    b = a.clone()
    b[::2] = -127
    expected = 64 * 127**2 * torch.ones(32, 32, dtype=torch.int32)
    expected[:, ::2] *= -1
    return torch.equal(torch._int_mm(a, b.t()), expected)
