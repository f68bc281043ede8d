"""`trimtab doctor --gpu`: its checks pass where the kernels are right, and find those that are wrong."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from trimtab.cli import gpu
from trimtab.ops import backends, int8
from trimtab.ops.step import fused

CPU = torch.device("cpu")
CHECKS: list[Callable[[torch.device], gpu.Wrong]] = [gpu._small, gpu._blockwise, gpu._int8, gpu._steps, gpu._gelu]
CHECKS += [gpu._optimizers, gpu._layers]


@pytest.mark.parametrize("check", CHECKS, ids=lambda x: x.__name__)
def test_checks_pass_with_the_kernels_of_this_cpu(check):
    assert list(check(CPU)) == []


def test_wrong_kernels_are_found(monkeypatch):
    right = fused.step_native

    def wrong(params, grads, *rest):
        right(params, grads, *rest)
        params[-1][-1] += 0.01

    monkeypatch.setattr(fused, "step_native", wrong)
    monkeypatch.setattr(int8, "int8_matmul", lambda *a, **b: torch.zeros(1))
    results = {result.name: result for result in gpu.examine_gpu(CPU)}
    assert "fused_step of adamw, 8-bit state (quadratic), torch.float32" in results["fused steps"].wrong
    assert "AdamW with 32-bit state is" in " ".join(results["optimizers, 20 steps against float64"].wrong)
    assert results["int8 quantization and products"].wrong
    assert results["a step in a CUDA graph"].not_run == "needs a GPU"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimtab", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(backends.triton_missing is None, reason="there is a GPU")
def test_without_a_gpu_the_message_says_what_runs():
    done = run("--gpu")
    assert done.returncode == 2
    assert "the GPU kernels cannot run: no CUDA device; `trimtab doctor --gpu --interpret` runs them" in done.stderr


@pytest.mark.slow
def test_the_gpu_kernels_pass_in_the_interpreter():
    done = run("--gpu", "--interpret")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    fused steps" in done.stdout
    assert "not run: a step in a CUDA graph (needs a GPU)" in done.stdout
