"""Only trimtab/runs contains the names of the files of a run and the reasons why one ended."""

import ast
from pathlib import Path

import pytest

import trimtab
from trimtab.runs import End

PACKAGE = Path(trimtab.__file__).parent
OTHERS = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != "runs"]
REASONS = {end.value for end in End} - {"done"}  # "done" is also an ordinary word


@pytest.mark.parametrize("name", [".jsonl", "result.json"])
def test_no_other_room_contains_a_file_name(name):
    lines = [(path, i, line) for path in OTHERS for i, line in enumerate(path.read_text().splitlines(), 1)]
    assert [f"{path.relative_to(PACKAGE)}:{i}" for path, i, line in lines if name in line] == []


def test_no_other_room_contains_an_end_reason():
    found = []
    for path in OTHERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in REASONS:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value!r}")
    assert found == []
