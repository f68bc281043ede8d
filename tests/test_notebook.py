"""The notebook of examples/ is valid, and runs from the first cell to the last."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest

PATH = Path(__file__).parent.parent / "examples" / "trimtab.ipynb"


def test_the_notebook_is_valid_has_no_outputs_and_compiles():
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 5
    for cell in cells:
        assert not cell.outputs
        assert cell.execution_count is None
        compile(re.sub(r"^!", "# !", cell.source, flags=re.MULTILINE), str(PATH), "exec")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs(tmp_path, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(PATH, as_version=4)
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    losses = [float(x) for x in re.findall(r"length +\d+  loss (\d+\.\d+)", shown)]
    assert losses[-1] < losses[0]
    assert "switchback" in shown
    assert list((tmp_path / "lab-notebook").glob("*.html"))
