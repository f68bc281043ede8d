"""The Triton kernels, compiled for GPUs that this machine does not have: what the compiler made of them.

The compiler and Triton's interpreter, which the other tests use, cannot run in one process: bench.kernels is a command.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from bench import gpu
from bench.kernels import NVIDIA, Case, Facts, cases
from trimtab.ops import blockwise_triton, gelu_triton, int8_triton
from trimtab.ops.step import fused_triton

KERNELS = {
    name
    for module in (blockwise_triton, gelu_triton, int8_triton, fused_triton)
    for name, value in vars(module).items()
    if name.endswith("_kernel") and value.__class__.__name__ == "InterpretedFunction"
}


@cache
def compiled(*options: str) -> dict[str, dict[str, Facts]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.kernels", *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=gpu.PAGE.parents[1])
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    return {name: {target: Facts(**facts) for target, facts in row.items()} for name, row in found.items()}


def listed(*, quick: bool) -> list[Any]:
    chosen = [case for case in cases() if case.listed and (case.quick or not quick)]
    return [pytest.param(case, id=case.name) for case in chosen]


def assert_good(case: Case, found: dict[str, Facts]) -> None:
    """No spills, the planned occupancy, wide accesses, tensor cores, and no instruction that rounds differently."""
    assert set(found) == set(case.targets)
    for target, facts in found.items():
        where = f"{case.name} on {target}: {facts}"
        assert facts.spills == 0, where
        assert bool(facts.tensor_cores) == bool(case.operations), where
        if target not in NVIDIA:
            continue
        assert not facts.inexact, where
        assert gpu.resident_warps(facts, target) >= case.warps, where
        # Codes are searched for in shared memory: what is read in small pieces are addresses, coefficients and scales.
        assert facts.narrow_loads <= 70, where
        if not case.operations:
            assert 16 * facts.wide_loads >= int(case.reads) * case.per_thread, where
            assert 16 * facts.wide_stores >= int(case.writes) * case.per_thread, where


@pytest.mark.parametrize("case", listed(quick=True))
def test_the_compiled_kernel_is_as_planned(case: Case) -> None:
    assert_good(case, compiled("--quick")[case.name])


def test_kernels_compile_for_sizes_of_one_for_long_blocks_and_for_more_than_2_31_values() -> None:
    found = compiled("--quick")
    for case in cases():
        if not case.listed:
            assert found[case.name]["sm_90"].spills == 0


def test_every_kernel_is_compiled() -> None:
    assert len(KERNELS) == 10
    assert {facts.kernel for row in compiled("--quick").values() for facts in row.values()} == KERNELS


def test_the_weight_in_both_layouts_saves_shared_loads_in_the_backward_product() -> None:
    found = compiled("--quick")
    both, alone = found["int8 product X W^T"], found["int8 product G W, W alone kept"]
    assert both["sm_80"].shared_loads <= 32
    assert alone["sm_80"].shared_loads >= 100
    assert both["sm_90"].wide_loads > alone["sm_90"].wide_loads  # through registers, byte by byte, without W^T


def test_the_table_of_the_documentation_lists_every_kernel() -> None:
    text = gpu.PAGE.read_text(encoding="utf-8").split(gpu.BEGIN)[1].split(gpu.END)[0]
    names = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    assert names == ["kernel", "---", *(case.name for case in cases() if case.listed)]


@pytest.mark.slow
def test_all_kernels_are_as_planned_and_the_documentation_has_their_numbers() -> None:
    found = compiled()
    chosen = [case for case in cases() if case.listed]
    for case in chosen:
        assert_good(case, found[case.name])
    text = gpu.PAGE.read_text(encoding="utf-8")
    assert all(f"| {' | '.join(row)} |" in text for row in gpu.table(chosen, found))
