"""The largest model for a given memory: peak memory of real training steps of GPT-2, from 124M to 1.5B parameters.

    python -m bench.memory                                  everything: about 30 minutes on two cores
    python -m bench.memory --only 124M 355M --settings torch lean

Each pair of size and setting is a new process. It builds the model and takes two steps (forward, backward, step,
zero_grad) on random tokens: the second one has optimizer state from the beginning. The peak is the kernel's (VmHWM):
it includes the interpreter and PyTorch, activations, temporary copies, and memory that the allocator keeps. No
allocator setting is changed here; `step_in_backward` itself calls malloc_trim twice, so "release" and "lean" have that.

    bytes per parameter = (peak - memory before the model is built) / parameters

A pair that would not fit into the free memory is predicted from the smaller sizes and not run. The largest models in
8, 16 and 24 GiB are computed from the line through the measured peaks, not run.

The model is trimtab.nn.GPT in the shape of GPT-2 in all settings; the first five have float32 weights and keep all
activations. Embeddings have 32-bit state in ours (the default) and 8-bit state in bitsandbytes and torchao (theirs).
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import tyro

from bench.measure import Bar, console, peer, report
from trimtab import optim
from trimtab.nn import GPT, GPTConfig, convert_linears

Size = Literal["124M", "355M", "774M", "1.5B"]
Setting = Literal["torch", "bitsandbytes", "torchao", "8-bit", "release", "lean"]
GIB = 2**30
SHAPES = {"124M": (12, 768, 12), "355M": (24, 1024, 16), "774M": (36, 1280, 20), "1.5B": (48, 1600, 25)}
NAMES: dict[Setting, str] = {
    "torch": "torch AdamW, fused",
    "bitsandbytes": "bitsandbytes AdamW8bit",
    "torchao": "torchao AdamW8bit",
    "8-bit": "trimtab AdamW, 8-bit",
    "release": "the same + step in backward",
    "lean": "the same + split bfloat16, SwitchBack-M, checkpointing",
}
# Weights, gradients and state per parameter: to predict a size before two smaller ones are measured.
KNOWN: dict[Setting, float] = {"torch": 16, "bitsandbytes": 10, "torchao": 10, "8-bit": 10, "release": 7, "lean": 6.5}
BARS: dict[str, float] = {"774M": 6.0, "1.5B": 10.0}  # GiB, in the setting "lean"
MEMORIES = (8, 16, 24)  # GiB
SPARE = 4  # GiB of the machine for other processes: a prediction above the rest is not run
LEAST = 1  # GiB; a process that leaves less to the machine is ended


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    setting: Setting
    depth: int
    width: int
    heads: int
    vocab: int = 50_257
    context: int = 1024
    batch: int = 1
    steps: int = 2
    threads: int = 2


@dataclass(frozen=True)
class Result:
    """What it found; memory in bytes."""

    parameters: int
    before: int
    built: int  # the peak until the model and the optimizer exist
    peak: int
    seconds: float  # of the last step
    loss: float

    @property
    def bytes_per_parameter(self) -> float:
        return (self.peak - self.before) / self.parameters


def main(
    only: tuple[Size, ...] = get_args(Size),
    settings: tuple[Setting, ...] = get_args(Setting),
    context: int = 1024,
    batch: int = 1,
    threads: int = 2,
) -> None:
    """Measure the memory of training steps.

    Args:
        only: sizes of GPT-2
        settings: optimizers and their settings
        context: tokens in a row
        batch: rows
        threads: for everything that is measured
    """
    missing = [name for name in ("bitsandbytes", "torchao") if name in settings and peer(name) is None]
    if missing:
        console.print(f"not installed, so their rows are missing: {', '.join(missing)}; `make bench` installs them\n")
    console.print(f"{batch} x {context} tokens, {threads} threads, {available() / GIB:.1f} GiB free\n", highlight=False)
    found: dict[Setting, dict[str, Result | float]] = {}
    for setting in settings:
        if setting in missing:
            continue
        rows = found[setting] = {}
        for size in (size for size in SHAPES if size in only):
            task = Task(setting, *SHAPES[size], context=context, batch=batch, threads=threads)
            rows[size] = measure_or_predict(task, [row for row in rows.values() if isinstance(row, Result)])
            console.print(f"{NAMES[setting]}, {size}: {describe(rows[size])}", highlight=False, soft_wrap=True)
    console.print("")
    show(found)
    lean = found.get("lean", {})
    report(
        [
            Bar(f"GPT-2 {size}, lean, peak GiB", (row.peak if isinstance(row, Result) else row) / GIB, BARS[size])
            for size, row in lean.items()
            if size in BARS
        ]
    )


# --- One process


def take_steps(task: Task) -> Result:
    """Build the model, take the steps. For a new process."""
    torch.set_num_threads(task.threads)
    if task.setting in ("bitsandbytes", "torchao"):
        peer(task.setting)
    before = status("VmRSS")
    torch.manual_seed(0)
    model = build_model(task)
    optimizer = build_optimizer(task.setting, model)
    built = status("VmHWM")
    samples = {name: p[:8].clone() for name, p in model.state_dict().items() if p.dim() == 2}
    for _ in range(task.steps):
        tokens = torch.randint(0, task.vocab, (task.batch, task.context + 1))
        start = time.perf_counter()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:].contiguous()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        if not loss.isfinite():
            raise SystemExit(f"the loss is {loss.item()}")
    peak = status("VmHWM")
    for name, p in model.state_dict().items():
        if name in samples and (p[:8] != samples[name]).float().mean() < 0.5:
            raise SystemExit(f"{name} has not changed")
    return Result(sum(p.numel() for p in model.parameters()), before, built, peak, seconds, loss.item())


def build_model(task: Task) -> GPT:
    lean = task.setting == "lean"
    config = GPTConfig(
        vocab=task.vocab,
        depth=task.depth,
        width=task.width,
        heads=task.heads,
        context=task.context,
        bias=True,
        positions="learned",
        tied=True,
        norm_eps=1e-5,
        checkpointing=lean,
    )
    if not lean:
        return GPT(config)
    torch.set_default_dtype(torch.bfloat16)  # no float32 copy of the weights at any time
    model = GPT(config)
    torch.set_default_dtype(torch.float32)
    convert_linears(model, "switchback-m", when="always")
    return model


def build_optimizer(setting: Setting, model: GPT) -> Any:
    if setting == "torch":
        return torch.optim.AdamW(model.parameters(), fused=True)
    if setting == "bitsandbytes":
        return peer("bitsandbytes").optim.AdamW8bit(model.parameters())
    if setting == "torchao":
        return peer("torchao").AdamW8bit(model.parameters())
    optimizer = optim.AdamW(model.named_parameters(), bits=8, rounding="split" if setting == "lean" else "nearest")
    if setting != "8-bit":
        optimizer.step_in_backward(model)
    return optimizer


def status(field: str, process: int | str = "self") -> int:
    """Bytes, from the kernel (Linux)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), 0)


# --- Processes, one at a time


def measure_or_predict(task: Task, smaller: Sequence[Result]) -> Result | float:
    """The result of a new process; if it would not fit, the bytes that it would need."""
    needs = predict(task, smaller)
    return needs if needs > available() - SPARE * GIB else run(task)


def run(task: Task) -> Result:
    """Measure in a new process, which is ended if it leaves too little memory to the machine."""
    code = "import json, sys; from bench import memory; memory.main_of_process(json.loads(sys.argv[1]))"
    command = [sys.executable, "-c", code, json.dumps(asdict(task))]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=Path(__file__).parents[1]
        )
        while process.poll() is None:
            if available() < LEAST * GIB:
                used = status("VmRSS", process.pid) / GIB
                process.kill()
                process.wait()
                raise SystemExit(f"{task} was ended at {used:.1f} GiB: the machine has less than {LEAST} GiB left")
            time.sleep(0.05)
        printed, _ = process.communicate()
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{task} failed with exit code {process.returncode}:\n{errors.read()[-2000:]}")
    return Result(**json.loads(printed.splitlines()[-1]))


def main_of_process(task: Mapping[str, Any]) -> None:
    print(json.dumps(asdict(take_steps(Task(**task)))))


def available() -> int:
    """Bytes that processes can still get on this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


# --- Larger sizes, from the smaller ones


def predict(task: Task, smaller: Sequence[Result]) -> float:
    """Bytes at the peak: by the line through smaller sizes, or by what is known of the setting."""
    count = 12 * task.depth * task.width**2 + (task.vocab + task.context) * task.width
    if len(smaller) < 2:
        return KNOWN[task.setting] * count
    start, slope = line(smaller)
    return start + slope * count


def line(results: Sequence[Result]) -> tuple[float, float]:
    """Least squares: the peak of an empty model, and the bytes of every parameter."""
    n = len(results)
    x = sum(r.parameters for r in results) / n
    y = sum(r.peak for r in results) / n
    slope = sum((r.parameters - x) * (r.peak - y) for r in results) / sum((r.parameters - x) ** 2 for r in results)
    return y - slope * x, slope


def largest(results: Sequence[Result], memory: int) -> float:
    """Parameters of the largest model in so many bytes, by the line."""
    start, slope = line(results)
    return (memory - start) / slope


# --- Tables


def describe(row: Result | float) -> str:
    if not isinstance(row, Result):
        return f"does not fit (needs about {row / GIB:.1f} GiB, predicted)"
    return (
        f"peak {row.peak / GIB:.2f} GiB (before the model {row.before / GIB:.2f}, when built {row.built / GIB:.2f}), "
        f"{row.bytes_per_parameter:.2f} bytes per parameter, {row.seconds:.0f} s per step, loss {row.loss:.2f}"
    )


def show(found: Mapping[Setting, Mapping[str, Result | float]]) -> None:
    """Markdown, as in the README. Bytes per parameter are those of the largest size that every setting could run."""
    measured = [{size for size, row in rows.items() if isinstance(row, Result)} for rows in found.values()]
    common = [size for size in SHAPES if all(size in sizes for sizes in measured)]
    sizes = [size for size in SHAPES if any(size in rows for rows in found.values())]
    columns = [f"bytes per parameter at {common[-1]}"] if common else []
    columns += [f"peak GiB at {size}" for size in sizes] + [f"largest in {memory} GiB" for memory in MEMORIES]
    print("| setting | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for setting, rows in found.items():
        results = [row for row in rows.values() if isinstance(row, Result)]
        cells = [f"{rows[common[-1]].bytes_per_parameter:.1f}"] if common else []  # type: ignore[union-attr]
        cells += [in_cell(rows[size]) if size in rows else "" for size in sizes]
        for memory in MEMORIES:
            cells.append(in_words(largest(results, memory * GIB)) if len(results) > 1 else "")
        print(f"| {NAMES[setting]} | " + " | ".join(cells) + " |")
    print()


def in_cell(row: Result | float) -> str:
    return f"{row.peak / GIB:.2f}" if isinstance(row, Result) else f"no: about {row / GIB:.0f}"


def in_words(parameters: float) -> str:
    return f"{parameters / 1e9:.2g}B" if parameters >= 9.95e8 else f"{parameters / 1e6:.0f}M"


if __name__ == "__main__":
    tyro.cli(main)
