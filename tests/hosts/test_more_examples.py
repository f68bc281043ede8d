"""The examples of TorchTitan and lm-evaluation-harness run as they are printed, and are short."""

import re
import runpy
from pathlib import Path

import datasets
import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["torchtitan_optimizers", "lm_eval_tasks"])
def test_an_example_learns(name, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    path = EXAMPLES / f"{name}.py"
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert text.count("# <- ") == 2  # the lines that changed
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", shown)]
    assert losses[-1] < 0.8 * losses[0], shown
    if name == "lm_eval_tasks":
        assert "'acc': 1.0" in shown
