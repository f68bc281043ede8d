"""The Triton kernels, compiled for GPUs that this machine does not have: what the compiler made of them.

The compiler and Triton's interpreter, which the other tests use, cannot run in one process: bench.kernels is a command.
"""

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from bench import gpu
from bench.kernels import NVIDIA, TARGETS, Case, Facts, cases
from trimtab.ops import blockwise_triton, gelu_triton, int8_triton
from trimtab.ops.step import fused_triton

KERNELS = {
    name
    for module in (blockwise_triton, gelu_triton, int8_triton, fused_triton)
    for name, value in vars(module).items()
    if name.endswith("_kernel") and value.__class__.__name__ == "InterpretedFunction"
}


QUICK = (*NVIDIA, "gfx942")


@cache
def compiled(*options: str) -> dict[str, dict[str, Facts]]:
    """What `python -m bench.kernels` prints. Processes take turns: the second one finds the cache."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.kernels", *options]
    with Path(tempfile.gettempdir(), "trimtab-kernels.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=gpu.PAGE.parents[1])
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    return {name: {target: Facts(**facts) for target, facts in row.items()} for name, row in found.items()}


def compiled_quickly() -> dict[str, dict[str, Facts]]:
    return compiled("--quick", "--targets", *QUICK)


def assert_good(case: Case, found: dict[str, Facts]) -> None:
    """No spills, the planned occupancy, wide accesses, tensor cores, and no instruction that rounds differently."""
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


@pytest.mark.parametrize("name", [case.name for case in cases() if case.quick and case.listed])
def test_the_compiled_kernel_is_as_planned(name: str) -> None:
    (case,) = (case for case in cases() if case.name == name)
    found = compiled_quickly()[name]
    assert set(found) == set(QUICK)
    assert_good(case, found)


def test_kernels_compile_for_sizes_of_one_for_long_blocks_and_for_more_than_2_31_values() -> None:
    found = compiled_quickly()
    for case in cases():
        if not case.listed:
            assert found[case.name]["sm_90"].spills == 0


def test_every_kernel_is_compiled() -> None:
    assert len(KERNELS) == 13
    assert {facts.kernel for row in compiled_quickly().values() for facts in row.values()} == KERNELS


def test_the_weight_in_both_layouts_saves_shared_loads_in_the_backward_product() -> None:
    found = compiled_quickly()
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
        assert set(found[case.name]) == set(case.targets) <= set(TARGETS)
        assert_good(case, found[case.name])
    text = gpu.PAGE.read_text(encoding="utf-8")
    assert all(f"| {' | '.join(row)} |" in text for row in gpu.table(chosen, found))
