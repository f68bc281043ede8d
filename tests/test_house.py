"""The layout of the package: imports point one way, signatures are short, importing is quick, forking is safe."""

import ast
import multiprocessing
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import trimtab
from trimtab.ops import load_codebook, quantize_blockwise

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trimtab"

ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"recipes"}
# The rooms that each room may import, besides itself, `hints` and `screen`.
ALLOWED = {
    "cli": {
        "lab",
        "train",
        "recipes",
        "watch",
        "nn",
        "optim",
        "ops",
        "runs",
        "analysis",
        "report",
        "schedule",
        "hosts",
    },
    "lab": {"train", "recipes", "analysis", "report", "runs", "data", "nn", "optim", "ops"},
    "report": {"analysis", "runs"},
    "analysis": {"runs"},
    "recipes": {"train", "nn", "optim", "data", "schedule"},
    "train": {"nn", "optim", "data", "watch", "schedule", "runs"},
    "hosts": {"nn", "optim", "data", "watch", "schedule"},
    "watch": {"nn.tap", "ops"},
    "nn": {"ops"},
    "optim": {"ops"},
    "ops": set(),
    "schedule": set(),
    "data": set(),
    "runs": set(),
    "hints": set(),
    "screen": set(),
    "__main__": {"cli"},
    "__init__": {*ROOMS},
}


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, without the leading `trimtab.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("trimtab.") for name in found if name.startswith("trimtab.")}


def violations(package: Path) -> list[str]:
    wrong = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        allowed = ALLOWED[room] | {room, "hints", "screen"}
        for name in sorted(imports(path)):
            if not any(name == other or name.startswith(f"{other}.") for other in allowed):
                wrong.append(f"{path.relative_to(package)} imports {name}")
    return wrong


def test_imports_point_one_way():
    assert violations(PACKAGE) == []


def test_a_wrong_import_would_be_found(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "bad.py").write_text("from trimtab.optim import AdamW\n")
    (tmp_path / "cli.py").write_text("from trimtab.ops.doctor import examine\n")
    assert violations(tmp_path) == ["ops/bad.py imports optim.AdamW"]


def test_there_is_no_room_for_homeless_functions():
    homeless = {"utils", "common", "core", "helpers", "misc"}
    assert not {path.stem for path in PACKAGE.rglob("*")} & homeless


def test_functions_have_at_most_six_positional_parameters():
    long = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "ops") or path == PACKAGE / "nn" / "multihead.py":
            continue  # kernels and the functions that are called like them; the arguments of nn.MultiheadAttention
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = [arg.arg for arg in node.args.posonlyargs + node.args.args if arg.arg not in ("self", "cls")]
                if (
                    len(names) > 6 and names[0] != "ctx"
                ):  # PyTorch passes the arguments of autograd functions by position
                    long.append(f"{path.relative_to(PACKAGE)}: {node.name} has {len(names)}")
    assert not long, long


def test_versions_agree():
    assert trimtab.__version__ == metadata.version("trimtab")
    assert Version(trimtab.__version__) >= Version("0.1.dev0")
    # Read on request: importing it takes longer than importing trimtab.
    code = "import sys, trimtab; print('importlib.metadata' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "False"


def test_importing_adds_little_to_torch():
    # The promise is 0.15 s; bench.ops measures it. A loaded machine may be slow, but never by a factor of four.
    code = (
        "import time, torch; t = time.perf_counter(); import trimtab.nn, trimtab.optim; print(time.perf_counter() - t)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.6


def test_importing_does_not_load_triton_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so Triton is wanted")
    code = "import sys, trimtab; print('triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def _quantize_in_child(x: torch.Tensor, queue: "multiprocessing.Queue[list[int]]") -> None:
    # Only our kernel runs on several threads here: PyTorch's own OpenMP hangs in a child whose parent has used it.
    torch.set_num_threads(2)
    codes, _ = quantize_blockwise(x, load_codebook())
    queue.put(codes[:2].tolist())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_kernels_work_in_a_forked_child():
    # The parent's threads do not exist there; a data loader's workers are such children.
    x = torch.ones(200_000)
    quantize_blockwise(x, load_codebook())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_quantize_in_child, args=(x, queue), daemon=True)
    child.start()
    try:
        assert queue.get(timeout=30) == [255, 255]
        child.join(timeout=30)
        assert child.exitcode == 0
    finally:
        child.kill()
