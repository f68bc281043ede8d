"""A compiled module that does not belong to this Python code is not used."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from trimtab.ops import backends
from trimtab.ops.native import table
from trimtab.ops.step import RULES, SCALARS

NATIVE = {"TABLE": table.describe(), "SOURCES": table.hash_sources()}


def test_the_module_that_was_built_here_is_used():
    assert backends.native is not None
    assert backends.native_missing is None
    assert backends.find_mismatch(backends.native) is None


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({**NATIVE, "TABLE": table.describe().replace("adamw", "adamx")}, "another table"),
        ({**NATIVE, "TABLE": table.describe().replace("beta1 gain1", "gain1 beta1")}, "another table"),
        ({}, "another table"),  # built before there was one
        ({**NATIVE, "SOURCES": "0" * 64}, r"other C\+\+ sources"),
    ],
)
def test_a_stale_module_is_refused_with_the_remedy(fake, message):
    found = backends.find_mismatch(SimpleNamespace(**fake))
    assert re.search(f"{message}.*Rebuild it: `make .venv/ready`", str(found))


def test_a_wheel_without_sources_compares_the_table_alone(monkeypatch, tmp_path):
    assert table.hash_sources(tmp_path) is None
    monkeypatch.setattr(table, "hash_sources", lambda: None)
    assert backends.find_mismatch(SimpleNamespace(TABLE=table.describe(), SOURCES="0" * 64)) is None


def test_without_the_module_everything_runs_on_the_reference_and_doctor_reports_it():
    code = """
import sys, types, warnings
sys.modules["trimtab.ops._native"] = types.SimpleNamespace(TABLE="old", SOURCES="old")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from trimtab.ops import backends, doctor
assert backends.native is None
assert any("the native CPU kernels are not used" in str(w.message) for w in caught), caught
report = doctor.examine()
print(report.machine["native kernels"])
print("\\n".join(report.broken + report.missing))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    machine, *findings = run.stdout.splitlines()
    assert machine.startswith("stale: _native was built with another table")
    assert any(line.startswith("native CPU kernels: stale") for line in findings)


def test_the_table_is_the_one_that_python_uses():
    assert list(RULES) == list(table.RULES)
    assert table.SCALARS == SCALARS
    for rule, states in table.RULES.items():
        assert RULES[rule].states == states
        assert f"X({rule})" in table.header()


def test_other_devices_are_served_by_the_reference(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    rows = [row for row in backends.served() if row.device == "mps"]
    assert len(rows) == len(backends.OPS)
    assert {row.backend for row in rows} == {"reference"}
    assert rows[0].reason == "there are no kernels for mps: PyTorch operations"
