"""What is distributed: the contents of the sdist and the wheel, and the wheel in an environment of its own."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
CODE = {".cpp", ".h"}  # compiled, and not in a wheel


def package_files() -> set[str]:
    """The files of the package that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "trimtab"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    files = {name for name in run.stdout.split() if (ROOT / name).exists()}
    if not files:
        pytest.skip("not a git repository, so there is no list of files to compare with")
    return files


def build(hook: str, folder: Path, settings: dict[str, str] | None = None) -> Path:
    """Call the build backend, as pip does, but without an environment of its own: nothing is downloaded."""
    code = f"from scikit_build_core import build; print(build.{hook}({str(folder)!r}, {settings or {}!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder / run.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build("build_sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def python_wheel(tmp_path_factory) -> Path:
    """The wheel without the native kernels, which takes a second to build."""
    return build("build_wheel", tmp_path_factory.mktemp("wheel"), {"wheel.cmake": "false"})


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(facts: Message) -> list[tuple[str, bool]]:
    """(name, whether it belongs to an extra) of every dependency."""
    found = [Requirement(line) for line in facts.get_all("Requires-Dist", [])]
    return [(each.name, "extra ==" in str(each.marker)) for each in found]


def test_the_sdist_contains_all_that_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = package_files() | {"CMakeLists.txt", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert any(Path(name).suffix == ".cpp" for name in needed)
    assert not needed - names
    assert not [
        name for name in names if name.endswith((".so", ".pyc")) or name.startswith((".venv", "build/", "runs/"))
    ]


def test_the_wheel_contains_the_package_and_its_data_files(python_wheel):
    with zipfile.ZipFile(python_wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("trimtab/")}
        outside = {name.split("/")[0] for name in archive.namelist()} - {"trimtab"}
    expected = {name for name in package_files() if Path(name).suffix not in CODE}
    assert {Path(name).suffix for name in expected} >= {".py", ".css", ".js", ".typed"}
    assert names == expected
    assert len(outside) == 1, f"files beside the package: {outside}"  # the metadata


def test_the_metadata_are_complete(python_wheel, sdist):
    facts = read_metadata(python_wheel)
    version = Version(facts["Version"])
    assert version >= Version("0.1.dev0")
    assert version.local is None, "a version with the commit or the date cannot be uploaded to PyPI"
    assert sdist.name == f"trimtab-{facts['Version']}.tar.gz"
    extras = facts.get_all("Provides-Extra")
    assert {"lab", "clip", "ray", "hf", "tensorboard", "gpu", "docs", "dev"} <= set(extras)
    required = [line for line in facts.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.split(r"[^\w-]", line)[0] for line in required} >= {
        "torch",
        "msgspec",
        "filelock",
        "platformdirs",
        "tyro",
    }


def test_the_wheel_runs_without_the_source_tree(python_wheel, tmp_path):
    """The fast form of the slow test below: unpacked instead of installed, and without native kernels."""
    with zipfile.ZipFile(python_wheel) as archive:
        archive.extractall(tmp_path)
    packages = str(
        Path(torch.__file__).parent.parent
    )  # -S: without its .pth files, such as that of an editable trimtab
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path.append({packages!r})"
    code = f"{paths}; import trimtab, trimtab.cli; print(trimtab.__file__, trimtab.__version__, flush=True)"
    for verb in "--help", "recipes":
        command = [sys.executable, "-I", "-S", "-c", f"{code}; sys.exit(trimtab.cli.main([{verb!r}]))"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        place, version = run.stdout.split()[:2]
        assert Path(place).is_relative_to(tmp_path)
        assert version == read_metadata(python_wheel)["Version"]
    assert "gpt-tiny" in run.stdout


def test_a_folder_without_git_has_a_version(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = next(tmp_path.iterdir())
    code = "from scikit_build_core.build import build_sdist; print(build_sdist('out'))"
    for remove, expected in ((), sdist.name), (("PKG-INFO",), "trimtab-0.1.0.dev0.tar.gz"):
        for name in remove:
            (folder / name).unlink()
        run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split()[-1] == expected


def test_the_changelog_has_an_entry_for_every_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = [Version(name) for name in re.findall(r"^## \[?(\d[^\s\]]*)", text, re.MULTILINE)]
    assert versions == sorted(versions, reverse=True)
    assert text.index("## Unreleased") < text.index("## 0.1.0")
    tags = subprocess.run(["git", "tag", "--list", "v[0-9]*"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert {Version(tag) for tag in tags} <= set(versions)


def test_constraints_pin_every_dependency(python_wheel):
    pins = dict(re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert Version(torch.__version__).base_version == pins["torch"]
    named = {name for name, _ in requirements(read_metadata(python_wheel))}
    assert not named - set(pins) - {"trimtab", "packaging", "typing-extensions"}


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(tmp_path):
    """Builds the sdist, and the wheel from the sdist, as `make wheel` does; that downloads the build requirements."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python, trimtab = tmp_path / "venv/bin/python", tmp_path / "venv/bin/trimtab"
    code = "import importlib.util; print(importlib.util.find_spec('trimtab'))"
    assert run(python, "-c", code).strip() == "None", "the environment is not empty"

    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT)
    wheel = next((tmp_path / "dist").glob("*.whl"))
    assert "none-any" not in wheel.name, "the kernels were not compiled"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    # torch and the other dependencies from this environment. A .pth file inside that folder, such as the one of an
    # editable trimtab, has no effect there.
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(packages) / "dependencies.pth").write_text(str(Path(torch.__file__).parent.parent))

    place = run(python, "-c", "import trimtab.ops.backends as b; print(b.__file__, b.native.__file__)").split()
    assert all(path.startswith(packages) for path in place)
    assert run(python, "-c", "import trimtab; print(trimtab.__version__)").strip() in wheel.name
    assert "native" in run(trimtab, "doctor")
    assert "doctor" in run(trimtab, "--help")
    assert "gpt-tiny" in run(trimtab, "recipes")
