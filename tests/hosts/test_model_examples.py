"""The examples for models of other libraries run as they are printed, and are short."""

import re
import runpy
from pathlib import Path

import pytest

from tests.hosts.vision import use_vision

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]


@pytest.mark.parametrize("name", ["open_clip_int8", "timm_vit", "peft_lora"])
def test_an_example_trains(name, capsys):
    path = EXAMPLES / f"{name}.py"
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert text.count("# <- ") == 2  # the lines that changed
    if name != "peft_lora":
        use_vision()
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    assert "linear layers converted to switchback" in shown
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", shown)]
    assert losses[-1] < 0.9 * losses[0], shown
