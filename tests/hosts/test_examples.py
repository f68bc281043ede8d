"""Every example of a host runs, learns, and keeps embeddings in 32 bits."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
HOSTS = ["nanogpt", "hf_trainer", "accelerate_loop", "deepspeed_client"]
CHECK = """
import importlib, os, sys, torch
import deepspeed.comm.torch as comm
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
