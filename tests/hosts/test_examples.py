"""Every example of a host is short, marks the lines that changed, runs as it is printed, and learns."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from tests.hosts.vision import use_vision

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
FOLDER = Path(__file__).parents[2] / "examples"
HOSTS = ["nanogpt", "hf_trainer", "accelerate_loop", "deepspeed_client"]
CHECK = """
import importlib, os, sys, torch
comm = importlib.import_module("deepspeed.comm.torch")  # `import ... as` would give PyTorch itself
comm.build_shm_op = lambda: None  # compiling it takes longer than the example
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    print("example", name)
    if name == "deepspeed_client":  # as its launcher does; port 0 is any free one
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    done = importlib.import_module(name).main(steps=20)
    assert done.losses[-1] < 0.97 * done.losses[0], (name, done.losses)
    bits = {entry.name: entry.bits for entry in done.optimizer.describe().entries}
    embeddings = [bits[key] for key in bits if "wte" in key or "wpe" in key or key == "0.weight"]
    assert embeddings and set(embeddings) == {32} and 8 in bits.values(), (name, bits)
"""


def test_the_examples_run():
    """In one process: importing the hosts takes longer than the examples."""
    command = [sys.executable, "-c", CHECK, str(FOLDER), *HOSTS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout[-500:] + run.stderr[-2000:]
    assert run.stdout.count("tensors in 8 bits") == len(HOSTS)


@pytest.mark.parametrize("name", HOSTS)
def test_the_example_is_short_and_marks_the_lines_that_changed(name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 60
    assert sum("# line" in line for line in lines) == 2


def run_example(name, capsys, *, marks=2, share=0.8):
    """Run it in this process, and return what it prints. The last loss must be below this share of the first."""
    path = FOLDER / f"{name}.py"
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    count = text.count("# <- ")  # the lines that changed
    assert count == marks == 2 or count >= marks > 2
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", shown)]
    assert losses[-1] < share * losses[0], shown
    return shown


@pytest.mark.parametrize("name", ["open_clip_int8", "timm_vit", "peft_lora"])
def test_models_of_other_libraries(name, capsys):
    if name != "peft_lora":
        use_vision()
    assert "linear layers converted to switchback" in run_example(name, capsys, share=0.9)


@pytest.mark.parametrize("name", ["lightning_module", "fabric_loop", "trl_sft"])
def test_trainers_with_growing_lengths(name, capsys):
    shown = run_example(name, capsys, marks=5, share=0.5)
    lengths = [int(length) for length in re.findall(r"length (\d+)", shown)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 64


@pytest.mark.filterwarnings("ignore")
def test_torchtitan(capsys):
    run_example("torchtitan_optimizers", capsys)


@pytest.mark.filterwarnings("ignore")
def test_lm_evaluation_harness(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    assert "'acc': 1.0" in run_example("lm_eval_tasks", capsys)
