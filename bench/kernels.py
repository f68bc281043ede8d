"""Every Triton kernel, compiled for GPUs that this machine does not have, and what the compiler says about it.

    python -m bench.kernels                     all kernels for all targets, as JSON
    python -m bench.kernels --targets sm_90     one target

A case calls the function that launches the kernel, with tensors on the device "meta": they have shapes and no memory.
The launch is recorded instead of executed, and compiled with the types, alignments and constants that Triton's launcher
derives from its arguments. So the tiles, the number of warps and the hints are those of a real call.

    case --launch--> kernel, arguments --compile--> cubin --disassemble--> registers, spills, widths, tensor cores

Results are kept in kernels.json in the cache folder (Linux: ~/.cache/trimtab), by a hash of the sources.
"""

import hashlib
import json
import os
import re
import secrets
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import tyro
from torch import Tensor

from trimtab.nn.tuning import cache_file
from trimtab.ops.step.rules import RULES, SCALARS

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
}
NVIDIA = tuple(name for name in TARGETS if name.startswith("sm_"))
VALUES = 2**26  # of a case without a matrix
TOKENS, WIDTH = 8192, 4096  # of a matrix: X [TOKENS, WIDTH], W [WIDTH, WIDTH]
# Instructions that round differently from the reference.
INEXACT = ("fma.rn.f32", ".ftz", ".approx", "div.full")
SLOW_PATH = 5  # instructions around a call that only denormal numbers, infinities and NaNs need


@dataclass(frozen=True)
class Case:
    """A kernel as one caller uses it. Bytes are per value of the result, from and to the GPU's memory."""

    name: str
    run: Callable[[], Any]
    reads: float
    writes: float
    values: int = VALUES
    per_thread: int = 16  # values of the result
    operations: float = 0  # int8 multiply-adds per value of the result, times 2
    warps: int = 16  # per multiprocessor, at least: the occupancy that the tile was chosen for
    launch: int = 0  # which of the launches of `run`
    quick: bool = False  # compiled by `make test`
    targets: tuple[str, ...] = tuple(TARGETS)  # where it is used
    listed: bool = True  # in the table of docs/gpu.md


@dataclass(frozen=True)
class Facts:
    """What is in the compiled kernel. AMD's compiler reports registers, spills and shared memory only."""

    kernel: str
    registers: int
    spills: int  # bytes per thread
    shared: int  # bytes per program
    warps: int  # per program
    tensor_cores: str = ""  # the instruction
    wide_loads: int = 0  # of 128 bits, per thread
    wide_stores: int = 0
    narrow_loads: int = 0  # from the GPU's memory: addresses, coefficients, scales
    shared_loads: int = 0
    instructions: int = 0  # per thread, without rare paths
    doubles: int = 0  # of them in float64
    inexact: tuple[str, ...] = ()


def main(targets: tuple[str, ...] = tuple(TARGETS), only: str = "", quick: bool = False) -> None:
    """Compile the kernels and print what was found.

    Args:
        targets: architectures
        only: part of a case's name
        quick: the selection of `make test`
    """
    found = examine([case for case in cases() if only in case.name and (case.quick or not quick)], targets)
    print(json.dumps({name: {target: asdict(facts) for target, facts in row.items()} for name, row in found.items()}))


# --- The cases


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def cases() -> list[Case]:
    return [*_blockwise(), *_steps(), *_int8(), *_gelu(), *_odd()]


def _blockwise() -> Iterator[Case]:
    from trimtab.ops import blockwise_triton as op

    book, codes = empty(256), empty(VALUES, dtype=torch.uint8)
    for name, dtype, size in (("float32", torch.float32, 4), ("bfloat16", torch.bfloat16, 2)):
        x = empty(VALUES, dtype=dtype)
        for block in (256, 4096) if size == 4 else (256,):
            quantize = partial(op.quantize, x, book, block)
            twice = 2 if block > op.TILE else 1
            reads, label = twice * size, f"quantize_blockwise, {name}, blocks of {block}"
            yield Case(
                label, quantize, reads, 1 + 4 / block, warps=20 if twice == 2 else 24, quick=block == 256 and size == 2
            )
        dequantize = partial(op.dequantize, codes, empty(VALUES // 256), book, 256, dtype)
        yield Case(f"dequantize_blockwise, {name}", dequantize, 1 + 4 / 256, size, warps=32, quick=size == 2)


def _steps() -> Iterator[Case]:
    from trimtab.ops.step import fused_triton as op

    half = torch.bfloat16
    for rule in RULES:
        for code in ("float32", "codebook", "quadratic"):
            for dtype in (torch.float32, half) if rule == "adamw" else (half,):
                size, states = dtype.itemsize, len(RULES[rule].states)
                state = states * (4 if code == "float32" else 1 + 4 / 256)
                name = f"step {rule}, {code}, {str(dtype).removeprefix('torch.')}"
                run = partial(op.step, *step_arguments(rule, code, dtype))
                quick, warps = rule == "adamw" and dtype == half, 8 if states == 3 else 12
                yield Case(name, run, 2 * size + state, size + state, warps=warps, quick=quick)
    for what in ("norms", "ratios"):
        arguments = step_arguments("adamw" if what == "norms" else "rms", "quadratic", half)
        states = 2 if what == "norms" else 1
        run = partial(getattr(op, what), *arguments)
        yield Case(f"step {what}, quadratic, bfloat16", run, 4 + states, 0, quick=what == "norms")
    grads = [empty(VALUES, dtype=half)]
    yield Case("gradient norms, bfloat16", partial(op.gradient_norms, grads), 2, 0, warps=24)


def step_arguments(rule: str, code: str, dtype: torch.dtype, count: int = VALUES, block: int = 256) -> tuple[Any, ...]:
    states = range(len(RULES[rule].states))
    params, grads = [empty(count, dtype=dtype)], [empty(count, dtype=dtype)]
    stored = [empty(count, dtype=torch.float32 if code == "float32" else torch.uint8) for _ in states]
    scales = [] if code == "float32" else [empty(-(-count // block)) for _ in states]
    rows, book = empty(1, len(SCALARS)), empty(256)
    return params, grads, stored, scales, rows, book, book, rule, "codebook" if code == "float32" else code, block


def _int8() -> Iterator[Case]:
    from trimtab.ops import int8_triton as op

    half, values = torch.bfloat16, TOKENS * WIDTH
    x, w = empty(TOKENS, WIDTH, dtype=half), empty(WIDTH, WIDTH, dtype=half)
    row_scale, scale = empty(TOKENS), torch.empty((), device="meta")
    yield Case("quantize rows of X or G, bfloat16", partial(op.quantize, x, 1), 2, 1, values, warps=32, quick=True)
    long = empty(TOKENS // 4, 4 * WIDTH, dtype=half)
    yield Case("quantize rows of 16384, bfloat16", partial(op.quantize, long, 1), 2, 1, values, 32, warps=16)
    for k, (what, writes, warps) in enumerate((("absmax of columns", 0, 32), ("quantize columns", 1, 20))):
        yield Case(f"{what}, bfloat16", partial(op.quantize, x, 0), 2, writes, values, warps=warps, launch=k)
    kept = (w, empty(WIDTH, WIDTH, dtype=torch.int8), empty(WIDTH, WIDTH, dtype=torch.int8), scale)
    run = partial(op.requantize_both_layouts, *kept, empty(3, op.PROGRAMS, dtype=torch.int32))
    yield Case("absmax and marks of W, bfloat16", run, 2, 0, WIDTH**2, warps=16, quick=True)
    yield Case("compare marks of W", run, 24, 12, op.PROGRAMS, 8, warps=0, launch=1, quick=True)
    yield Case("quantize W in both layouts, bfloat16", run, 2, 2, WIDTH**2, 32, warps=32, launch=2, quick=True)
    whole = empty(1, values, dtype=half)
    yield Case(
        "quantize a tensor, bfloat16", partial(op.quantize, whole, 1), 2, 1, values, warps=32, launch=1, quick=True
    )
    total = empty(TOKENS, WIDTH, dtype=torch.int32)
    yield Case("rescale", partial(op.rescale, total, row_scale, scale, None, half), 4, 2, values, warps=32, quick=True)

    a, b = empty(TOKENS, WIDTH, dtype=torch.int8), empty(WIDTH, WIDTH, dtype=torch.int8)
    # Each operand once: the tiles of a wave share theirs in the cache.
    product: dict[str, Any] = {"values": values, "operations": 2 * WIDTH, "per_thread": 64, "warps": 8}
    reads, operands = (TOKENS * WIDTH + WIDTH**2) / values, (a, b.t(), row_scale, scale)
    bias = empty(WIDTH, dtype=half)
    yield Case("int8 product X W^T", partial(op.multiply, *operands, bias, half), reads, 2, quick=True, **product)
    yield Case("int8 product G W, W^T kept", partial(op.multiply, *operands, None, half), reads, 2, **product)
    split = partial(op.multiply_split, *operands, None, half, 4)
    yield Case("int8 product, inner dimension in 4 parts", split, reads, 4, quick=True, **product)
    other = partial(op.multiply, a, b, row_scale, scale, None, half)
    yield Case("int8 product G W, W alone kept", other, reads, 2, quick=True, **product)
    for config in op.CONFIGS[1:]:
        tile = config.all_kwargs()
        name = (
            "int8 product, tile " + " x ".join(str(tile[k]) for k in ("M", "N", "K")) + f", {tile['num_warps']} warps"
        )
        run = partial(op.multiply, *operands, None, half, tile)
        sums = op.sums_per_thread(config)
        used = tuple(target for target in TARGETS if sums <= 64 or target != "sm_80")
        yield Case(name, run, reads, 2, **(product | {"per_thread": sums, "targets": used}))


def _gelu() -> Iterator[Case]:
    from trimtab.ops import gelu_triton as op

    x = empty(VALUES, dtype=torch.bfloat16)
    yield Case("gelu, bfloat16", partial(op.run, x, None), 2, 2, per_thread=8, warps=32, quick=True)
    yield Case("gelu backward, bfloat16", partial(op.run, x, x), 4, 2, per_thread=8, warps=32)
    exact = empty(VALUES)
    yield Case("gelu, float32", partial(op.run, exact, None), 4, 4, per_thread=8, warps=32)


def _odd() -> Iterator[Case]:
    """Sizes of 1, which Triton makes constants; sizes that nothing divides; blocks longer than a tile; 2^31 values."""
    from trimtab.ops import blockwise_triton, gelu_triton, int8_triton
    from trimtab.ops.step import fused_triton

    codes = empty(1, 1, dtype=torch.int8)
    one = (codes, codes.t(), empty(1), torch.empty((), device="meta"), None, torch.float32)
    book, count = empty(256), 2**31 + 1
    runs: dict[str, Callable[[], Any]] = {
        "quantize_blockwise, one value": lambda: blockwise_triton.quantize(empty(1), book, 1),
        "dequantize_blockwise, 2^31 values": lambda: blockwise_triton.dequantize(
            empty(count, dtype=torch.uint8), empty(1), book, count, torch.float16
        ),
        "quantize_int8, one value": lambda: int8_triton.quantize(empty(1, 1), 1),
        "quantize_int8, columns of one row": lambda: int8_triton.quantize(empty(1, 7), 0),
        "quantize_both_layouts, one value": lambda: int8_triton.quantize_both_layouts(empty(1, 1)),
        "int8_matmul, one value": lambda: int8_triton.multiply(*one),
        "gelu, 2^31 values": lambda: gelu_triton.run(empty(count), None),
        "step, long blocks": lambda: fused_triton.step(
            *step_arguments("adamw", "codebook", torch.float16, 2**20, 4096)
        ),
        "step, long quadratic blocks": lambda: fused_triton.step(
            *step_arguments("ademamix", "quadratic", torch.float32, 2**20, 4096)
        ),
        "step, addresses in a graph": lambda: fused_triton.write_lines(
            empty(1, 12, dtype=torch.int64), [[2**40] * 8 + [2**32, 0, 1, 0]]
        ),
        "step, blocks of 33": lambda: fused_triton.step(*step_arguments("lion", "codebook", torch.float32, 9001, 33)),
    }
    for name, run in runs.items():
        yield Case(name, run, 0, 0, per_thread=1, warps=0, quick=True, targets=("sm_90",), listed=False)


# --- Compiling


@contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Kernels that are launched inside are noted and not run: (kernel, arguments, options)."""
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((self, arguments, options))

    with mock.patch.object(JITFunction, "run", note):
        yield launches


def compile_case(case: Case, target: str) -> Any:
    """As the launcher would compile it on this GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    with recorded() as launches:
        case.run()
    kernel, arguments, options = launches[case.launch]
    gpu = GPUTarget(*TARGETS[target])
    backend, options = make_backend(gpu), options | {"debug": False}
    bound, specialization, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *arguments, **options
    )
    chosen, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, rest)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=gpu, options=chosen.__dict__)


def read(compiled: Any) -> Facts:
    """The facts of a compiled kernel."""
    sizes = {"kernel": compiled.metadata.name, "shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps}
    if "cubin" not in compiled.asm:
        note = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\s*$", compiled.asm["amdgcn"], re.M)}
        matrix = re.search(r"v_mfma\w+", compiled.asm["amdgcn"])
        spills = 4 * (note["vgpr_spill_count"] + note["sgpr_spill_count"])
        return Facts(**sizes, registers=note["vgpr_count"], spills=spills, tensor_cores=matrix[0] if matrix else "")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _run("cuobjdump", "-res-usage", file.name)))
        code = _run("nvdisasm", "-c", file.name)
    main = code[: code.rindex("EXIT")]  # the rare paths of divisions and roots come after it
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", main)
    count = Counter(found)

    def total(pattern: str) -> int:
        return sum(n for name, n in count.items() if re.fullmatch(pattern, name))

    matrix = next((name for name in found if re.match(r"IMMA|IGMMA|UTCIMMA", name)), "")
    return Facts(
        **sizes,
        registers=int(usage["REG"]),
        spills=int(usage["STACK"]) + int(usage["LOCAL"]) if total(r"(LDL|STL)\b.*") else 0,
        tensor_cores=matrix,
        wide_loads=total(r"(LDG|LDGSTS)\..*\b128(\..*)?"),
        wide_stores=total(r"STG\..*\b128(\..*)?"),
        narrow_loads=total(r"LDG\.(?!.*\b128\b).*"),
        shared_loads=total(r"LDS.*"),
        instructions=len(found) - SLOW_PATH * total(r"CALL.*") - total("NOP"),
        doubles=total(r"(DADD|DMUL|DFMA|DSETP|F2F\.F64|F2F\.F32\.F64|FRND\.F64).*"),
        inexact=tuple(name for name in INEXACT if name in compiled.asm["ptx"]),
    )


def _run(tool: str, *arguments: str) -> str:
    from triton import knobs

    path = getattr(knobs.nvidia, tool).path
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


# --- All cases, from the cache where nothing has changed


def examine(chosen: Sequence[Case], targets: Sequence[str]) -> dict[str, dict[str, Facts]]:
    """The facts by case and target."""
    known, found = _load(), dict[str, dict[str, Facts]]()
    before = len(known)
    for case in chosen:
        for target in (target for target in targets if target in case.targets):
            key = f"{case.name} {target}"
            if key not in known:
                known[key] = asdict(read(compile_case(case, target)))
            found.setdefault(case.name, {})[target] = Facts(**known[key])
    if len(known) > before:
        _save(known)
    return found


def hash_sources() -> str:
    """Of the kernels, of this file, and of the compiler."""
    here = Path(__file__)
    ops = here.parents[1] / "trimtab" / "ops"
    files = [*sorted(ops.rglob("*_triton.py")), ops / "step" / "quadratic.py", ops / "step" / "rules.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in (*files, here)) + metadata.version("triton")
    return hashlib.sha256(text.encode()).hexdigest()


def _path() -> Path | None:
    path = cache_file()
    return None if path is None else path.with_name("kernels.json")


def _load() -> dict[str, Any]:
    path = _path()
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8")) if path else {}
        if kept["sources"] == hash_sources():
            return dict(kept["facts"])
    return {}


def _save(known: Mapping[str, Any]) -> None:
    path = _path()
    if path is None:
        return
    work = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        work.write_text(json.dumps({"sources": hash_sources(), "facts": known}, default=list), encoding="utf-8")
        os.replace(work, path)


if __name__ == "__main__":
    tyro.cli(main)
