"""The examples for other trainers run as they are printed, and are short."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.mark.parametrize("name", ["lightning_module", "fabric_loop", "trl_sft"])
def test_an_example_trains_with_growing_lengths(name, capsys):
    path = EXAMPLES / f"{name}.py"
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert text.count("# <- ") >= 5  # the lines that changed
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"length \d+  loss (\d+\.\d+)", shown)]
    lengths = [int(length) for length in re.findall(r"length (\d+)", shown)]
    assert losses[-1] < 0.5 * losses[0], shown
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 64
