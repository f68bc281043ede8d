"""docs/architecture.md and README.md are true: files exist, each walk calls what it lists in this order, code runs."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trimtab as tt
from trimtab.recipes import gpt_lab

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()
OTHER_PROCESS = {"trimtab/lab/executors/worker.py"}  # not seen by the profiler
ROW = re.compile(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)


def walk(title: str) -> list[tuple[str, str]]:
    """The (file, function) rows of the table below a heading."""
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section, f"docs/architecture.md has no walk {title!r}"
    return ROW.findall(section[1])


def calls_of(work: Callable[[], Any]) -> list[tuple[str, str]]:
    """(file, function) of the package in the order of their first calls, on all threads."""
    found: dict[tuple[str, str], None] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT / "trimtab")):
            found.setdefault((os.path.relpath(path, ROOT), frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return list(found)


def assert_walked(listed: list[tuple[str, str]], work: Callable[[], Any]) -> None:
    calls = calls_of(work)
    python = [row for row in listed if row[0].endswith(".py") and row[0] not in OTHER_PROCESS]
    missing = [row for row in python if row not in calls]
    assert not missing, f"listed but never called: {missing}"
    order = [calls.index(row) for row in python]
    wrong = [python[i + 1] for i in range(len(order) - 1) if order[i] > order[i + 1]]
    assert not wrong, f"called earlier than the walk says: {wrong}"
    for path, name in listed:  # C++, templates: the name is in the file
        assert name in (ROOT / path).read_text(), f"{path} has no {name}"


def test_gradient_to_byte():
    model = nn.Linear(64, 64)
    optimizer = tt.optim.AdamW(model.named_parameters(), lr=1e-3, bits=8)

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

    step()  # creates the state
    listed = walk("From a gradient to a byte")
    assert len({path for path, _ in listed}) <= 10
    assert_walked(listed, step)


class Logged(Exception):
    """The first loss is in the log."""


def test_text_to_loss(tmp_path, monkeypatch):
    from trimtab.runs import RunLog

    (tmp_path / "text.txt").write_text("The loss of a small model at a high learning rate. " * 400)
    config = replace(gpt_lab(), data=replace(gpt_lab().data, corpus=str(tmp_path / "text.txt")), eval_batches=1)
    real = RunLog.step

    def first(self: RunLog, record: Any) -> None:
        real(self, record)
        raise Logged

    monkeypatch.setattr(RunLog, "step", first)

    def work() -> None:
        with pytest.raises(Logged):
            tt.train.train(config, tmp_path / "run")

    listed = walk("From text to a logged loss")
    assert len({path for path, _ in listed}) <= 18
    assert_walked(listed, work)


def test_study_to_page(tmp_path, capsys):
    from trimtab.cli import main

    (tmp_path / "text.txt").write_text("The loss of a small model at a high learning rate. " * 400)
    (tmp_path / "study.toml").write_text(
        f"""
        sizes = ["1x16", "1x32"]
        lrs = [1e-2, 1e-1]
        seeds = 1
        steps = 40
        [set]
        "data.corpus" = "{tmp_path / "text.txt"}"
        "model.context" = 16
        batch = 4
        eval_batches = 1
        """
    )

    def work() -> None:
        with pytest.raises(SystemExit) as end:
            main(["lab", "--config", str(tmp_path / "study.toml"), "--out", str(tmp_path / "study")])
        assert end.value.code == 0

    listed = walk("From a study to a page")
    assert len({path for path, _ in listed}) <= 20
    assert_walked(listed, work)
    assert (tmp_path / "study" / "report.html").exists()


def test_every_path_in_the_documents_exists():
    named = set(re.findall(r"`((?:trimtab|tests|docs|bench|examples)/[\w./-]*)`", TEXT))
    assert named
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, f"named in docs/architecture.md but not on disk: {missing}"


def test_the_tree_lists_every_room():
    tracked = subprocess.run(["git", "ls-files", "trimtab"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    rooms = {path.split("/")[1] + "/" * (path.count("/") > 1) for path in tracked} - {"py.typed"}
    block = re.search(r"```\n(trimtab/\n.*?)```", TEXT, re.DOTALL)
    assert block, "docs/architecture.md has no tree"
    listed = {line.split()[0] for line in block[1].splitlines()[1:]}
    assert listed == rooms


def test_rooms_are_small():
    for folder in {path.parent for path in (ROOT / "trimtab").rglob("*.py")}:
        files = [path for path in folder.iterdir() if path.is_file() and path.suffix != ".so"]
        assert len(files) <= 20, f"{folder} has {len(files)} files; at most 20, or a sub-folder"


def test_the_code_in_the_readme_runs():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code
    lines = [line for line in code[1].splitlines() if line.strip()]
    assert len(lines) <= 9  # eight, and the import

    def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    loader = [torch.randn(32, 128) for _ in range(3)]
    exec(code[1], {"model": model, "loader": loader, "training_step": training_step})
    assert type(model[0]) is not nn.Linear
