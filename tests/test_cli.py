"""The command line, as a person types it."""

import subprocess
import sys

import pytest
import torch

from trimtab import cli
from trimtab.ops import backends, doctor


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trimtab", *words], capture_output=True, text=True)


def test_doctor_names_every_op_and_is_well():
    result = run("doctor")
    assert result.returncode == 0, result.stdout
    for op in backends.OPS:
        assert op in result.stdout
    assert "well every op agrees with its reference" in result.stdout
    assert torch.__version__ in result.stdout


def test_every_op_has_a_check():
    assert doctor.CHECKS.keys() == backends.OPS.keys()


def test_doctor_finds_a_wrong_kernel(monkeypatch, capsys):
    assert backends.native is not None

    class Wrong:
        """The native module with a quantizer that does nothing."""

        def __getattr__(self, name: str) -> object:
            return (lambda *_: None) if name == "quantize" else getattr(native, name)

    native = backends.native
    monkeypatch.setattr(backends, "native", Wrong())
    assert cli.doctor() == 1
    assert "broken quantize_blockwise on cpu does not agree with its reference" in capsys.readouterr().out


def test_doctor_says_what_is_missing_without_kernels(monkeypatch, capsys):
    monkeypatch.setattr(backends, "native_missing", "not built: no C++ compiler was found")
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert cli.doctor() == 0
    assert "missing native CPU kernels: not built: no C++ compiler was found" in capsys.readouterr().out
    # With a compiler at hand, kernels that are not there are a fault and not a choice.
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    assert cli.doctor() == 1
    assert "broken native CPU kernels" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--help"]])
def test_help_is_given(words):
    result = run(*words)
    assert result.returncode == 0
    assert "doctor" in result.stdout


def test_unknown_words_are_refused():
    result = run("docter")
    assert result.returncode == 2
    assert "doctor" in result.stderr + result.stdout
