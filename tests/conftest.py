"""What the tests share: seeds, the backends and instruction sets of this machine, and exact comparison."""

import os

# Before anything imports Triton, which the compiler and other libraries do: test_triton needs its interpreter.
os.environ["TRITON_INTERPRET"] = "1"

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.ops import backends

LEVELS = backends.native.levels() if backends.native is not None else []


NAMELESS = "the parameters have no names"  # a warning that tests which are not about embeddings may ignore


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", f"ignore:{NAMELESS}:UserWarning")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once per instruction set this CPU has, and put the best one back."""
    assert backends.native is not None
    backends.native.set_level(request.param)
    backends.int8_product.cache_clear()
    yield request.param
    backends.native.set_level(LEVELS[0])
    backends.int8_product.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _own_cache_of_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's file of int8 measurements is not touched."""
    path = tmp_path_factory.mktemp("tuning") / "int8.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimtab.nn.tuning.cache_file", lambda: path)
        yield


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def spread(count: int, generator: torch.Generator, decades: float = 8) -> Tensor:
    """Gaussian values whose magnitudes are spread over this many decades."""
    return torch.randn(count, generator=generator) * 10 ** (-decades * torch.rand(count, generator=generator))


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Bit for bit, NaN where NaN is expected."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    same = (got == expected) | (got.isnan() & expected.isnan()) if got.is_floating_point() else got == expected
    wrong = (~same).nonzero()
    assert same.all(), f"{len(wrong)} of {got.numel()} differ, first at {wrong[0].tolist()}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The numbers that tests counted with `record_property`: damaged files, kills, command lines."""
    counts = Counter[str]()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties if report.when == "call" else ():
            counts[name] += value
    if counts:
        terminalreporter.write_line("counted: " + ", ".join(f"{value} {name}" for name, value in counts.items()))


@pytest.fixture(autouse=True, scope="session")
def _stop_processes() -> Iterator[None]:
    """The pair of processes.py, if a test started it."""
    yield
    processes = sys.modules.get("tests.processes")
    if processes is not None:
        processes.PAIR.stop()
