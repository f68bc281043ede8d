"""The GPU kernels: their times on a GPU, and what a compiler says about them without one.

    python -m bench.gpu                      check and time everything on this GPU, and write gpu.md (gpu_times.py)
    python -m bench.gpu --interpret          the same code without a GPU, at tiny sizes, in Triton's interpreter
    python -m bench.gpu --static             compile every kernel, print the table, write it to docs/gpu.md

The table has one row per kernel (bench/kernels.py lists the kernels and reads the compiled code):

    warps       that a multiprocessor can hold at the same time, from registers and shared memory
    limit       the time of VALUES values, or of one matrix, on a GPU that reaches its full rate in what is slowest:
                memory, tensor cores, float64, or the rate at which instructions are issued

A limit is a bound and not a prediction. No kernel has been timed on a GPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from bench.kernels import NVIDIA, TOKENS, VALUES, WIDTH, Case, Facts, cases, examine
from bench.measure import console
from trimtab.ops import backends

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- begin: python -m bench.gpu --static -->", "<!-- end -->"
KIB = 1024


@dataclass(frozen=True)
class Gpu:
    """The vendor's numbers for dense arithmetic at the boost clock."""

    target: str  # whose compiled code is used
    bytes_per_s: float
    int8_per_s: float  # operations, two per multiply-add
    processors: int
    hertz: float
    doubles: int  # float64 instructions per clock and multiprocessor
    issued: int = 128  # instructions of threads per clock and multiprocessor


GPUS = {
    "A100": Gpu("sm_80", 2.04e12, 624e12, 108, 1.41e9, 32),
    "H100": Gpu("sm_90", 3.35e12, 1979e12, 132, 1.83e9, 64),
    "RTX 4090": Gpu("sm_80", 1.01e12, 661e12, 128, 2.52e9, 2),
}
SHARED = {"sm_80": 164 * KIB, "sm_90": 228 * KIB, "sm_100": 228 * KIB}  # per multiprocessor
REGISTERS, WARPS, PROGRAMS = 65536, 64, 32  # per multiprocessor

# The share of the limit that others reach, from bitsandbytes' log of its SwitchBack layers on an A100 (width 4096,
# 131,072 tokens, forward and backward): 146.1 ms, where the three products alone take 112.8 at full rate; 6.2 % of it
# quantizes, which would take 3.9 ms if X and G were read once.
PEERS = {
    "int8 product": "77 % (bitsandbytes, A100, whole layer)",
    "quantize rows": "43 % (bitsandbytes, A100)",
}


def main(static: bool = False, interpret: bool = False, page: Path = Path("gpu.md")) -> None:
    """Report on the GPU kernels.

    Args:
        static: compile them, print the table and write it to docs/gpu.md; needs no GPU
        interpret: run the checks and the timing code in Triton's interpreter; needs no GPU
        page: the file that the times are written to
    """
    if not static:
        return time_all(page, interpret)
    listed = [case for case in cases() if case.listed]
    rows = list(table(listed, examine(listed, NVIDIA)))
    show(rows)
    write(rows)


def time_all(page: Path, interpret: bool) -> None:
    if interpret and not backends.interpreted:  # the kernels are chosen when trimtab is imported
        again = [sys.executable, "-m", "bench.gpu", "--interpret", "--page", str(page)]
        raise SystemExit(subprocess.run(again, env=os.environ | {"TRIMTAB_INTERPRET": "1"}, check=False).returncode)
    if backends.triton_missing is not None:
        raise SystemExit(
            f"error: the GPU kernels cannot run: {backends.triton_missing}; --static and --interpret need no GPU"
        )
    from bench.gpu_times import measure

    measure(page, interpret=interpret)


def table(listed: list[Case], found: dict[str, dict[str, Facts]]) -> Iterator[list[str]]:
    """The header, then one row per kernel."""
    yield [
        *("kernel", "registers", "spills", "shared KiB", "warps", "tensor cores", "128-bit loads, stores"),
        *("bytes", "instructions", *(f"limit {name}, ms" for name in GPUS), "peers reach"),
    ]
    for case in listed:
        facts = found[case.name]
        yield [
            case.name,
            each(facts, lambda one, target: one.registers),
            each(facts, lambda one, target: one.spills),
            each(facts, lambda one, target: one.shared // KIB),
            each(facts, resident_warps),
            each(facts, lambda one, target: one.tensor_cores.split(".")[0] or "no"),
            each(facts, lambda one, target: f"{one.wide_loads}, {one.wide_stores}"),
            f"{case.reads + case.writes:.3g}",
            each(facts, lambda one, target, values=case.per_thread: round(one.instructions / values)),
            *(describe_limit(case, facts.get(gpu.target), gpu) for gpu in GPUS.values()),
            next((share for name, share in PEERS.items() if case.name.startswith(name)), "not reported"),
        ]


def each(facts: Mapping[str, Facts], number: Callable[[Facts, str], object]) -> str:
    """The numbers of the architectures, "-" where the kernel is not used, or one number if they agree."""
    words = [str(number(facts[target], target)) if target in facts else "-" for target in NVIDIA]
    return words[0] if len(set(words)) == 1 else " / ".join(words)


def resident_warps(facts: Facts, target: str) -> int:
    """The occupancy: how many warps fit on a multiprocessor. Registers are given to warps in units of 8 per thread."""
    by_registers = REGISTERS // (-(-facts.registers // 8) * 8 * 32 * facts.warps)
    by_shared = SHARED[target] // (facts.shared + KIB)  # the system takes 1 KiB per program
    return min(by_registers, by_shared, WARPS // facts.warps, PROGRAMS) * facts.warps


def limits(case: Case, facts: Facts, gpu: Gpu) -> dict[str, float]:
    """Seconds for all values, if one resource alone were used at its full rate."""
    rate = gpu.processors * gpu.hertz
    seconds = {
        "memory": (case.reads + case.writes) * case.values / gpu.bytes_per_s,
        "tensor cores": case.operations * case.values / gpu.int8_per_s,
    }
    if not case.operations:  # the loop of a product runs an unknown number of times
        seconds["issue"] = facts.instructions / case.per_thread * case.values / (rate * gpu.issued)
        seconds["float64"] = facts.doubles / case.per_thread * case.values / (rate * gpu.doubles)
    return seconds


def describe_limit(case: Case, facts: Facts | None, gpu: Gpu) -> str:
    if facts is None:
        return "-"
    found = limits(case, facts, gpu)
    slowest = max(found, key=found.__getitem__)
    return f"{1e3 * found[slowest]:.3g} {slowest}"


def show(rows: list[list[str]]) -> None:
    shown = Table(*rows[0], box=None, pad_edge=False)
    for row in rows[1:]:
        shown.add_row(*row)
    console.print(shown, width=240, soft_wrap=True)


def write(rows: list[list[str]]) -> None:
    """Replace the table of docs/gpu.md."""
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    lines = [" | ".join(row) for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    note = f"sm_80 / sm_90 / sm_100. {VALUES:,} values; matrices of {TOKENS:,} x {WIDTH:,} and {WIDTH:,} x {WIDTH:,}."
    body = "\n".join([BEGIN, "", note, "", *(f"| {line} |" for line in lines), "", END])
    PAGE.write_text(head + body + tail, encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
