"""Small runs for tests: one layer of 32 over random words, a CLIP of 8-pixel shapes, and processes to kill."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab.nn import CLIP_SIZES, GPTConfig
from trimtab.schedule import LearningRate
from trimtab.train import (
    BatchConfig,
    CLIPRun,
    DataConfig,
    GPTRun,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SeqLenConfig,
    read_lines,
)

CONTEXT, BATCH = 32, 4
PATIENCE_S = 60


def quiet() -> Console:
    return Console(file=io.StringIO())


def write_words(path: Path, count: int = 12_000, seed: int = 0) -> Path:
    chosen = random.Random(seed)
    words = ["".join(chosen.choices("etaoinshrdlu", k=chosen.randint(1, 7))) for _ in range(200)]
    path.write_text(" ".join(chosen.choices(words, k=count)))
    return path


def tiny(folder: Path, *, start: int | None = None, grows: BatchConfig | None = None, **changes: Any) -> GPTRun:
    """Twelve steps. One thread, so that sums are always in the same order."""
    text = folder / "words.txt"
    if not text.exists():
        write_words(text)
    schedule = ScheduleConfig(
        lr=LearningRate(kind="cosine", warmup=3, decay_unit="tokens", floor=1e-4),
        seqlen=SeqLenConfig(start=start, steps=8),
        batch=grows or BatchConfig(),
    )
    run = GPTRun(
        model=GPTConfig(depth=1, width=32, heads=2, vocab=257, context=CONTEXT, qk_norm="shared", z_loss=1e-4),
        optim=OptimConfig(lr=3e-3),
        schedule=schedule,
        data=DataConfig(corpus=str(text), cache=str(folder / "cache")),
        steps=12,
        batch=BATCH,
        eval_every=4,
        eval_batches=2,
        checkpoint_every=4,
        keep=10,
        threads=1,
    )
    return replace(run, **changes)


def tiny_clip(folder: Path, *, batch: int = 16, **changes: Any) -> CLIPRun:
    """Half of the patches are dropped at random, so a resume needs the generator's state."""
    model = replace(CLIP_SIZES["tiny"], patch_dropout=0.5)
    run = CLIPRun(
        model=model,
        optim=OptimConfig(lr=1e-3, betas=(0.9, 0.98), eps=1e-6),
        schedule=ScheduleConfig(lr=LearningRate(kind="cosine", warmup=1)),
        data=DataConfig(corpus="shapes", cache=str(folder / "cache")),
        steps=6,
        batch=batch,
        eval_every=3,
        eval_batches=1,
        checkpoint_every=2,
        keep=10,
        threads=1,
    )
    return replace(run, **changes)


# --- Reading a run back


def read_log(run: Path) -> list[dict[str, Any]]:
    return list(read_lines(run / "log.jsonl"))


def read_events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run / "events.jsonl") if event["event"] == kind]


def trajectory(run: Path) -> list[tuple[Any, ...]]:
    """Everything of a log that does not depend on the speed of the machine."""
    keys = ("step", "samples", "tokens", "loss", "lr", "length", "batch", "grad_norm", "rms_max")
    return [tuple(line.get(key) for key in keys) for line in read_log(run)]


def hashes(run: Path, step: int) -> dict[str, str]:
    """Of weights and optimizer state."""
    manifest = json.loads((run / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items() if name != "state.json"}


def assert_same_run(run: Path, reference: Path, step: int) -> None:
    assert trajectory(run) == trajectory(reference)
    assert hashes(run, step) == hashes(reference, step)


# --- Processes that may be killed. They are forked from a server that has imported torch, which takes seconds, and the
# compiler, which the first optimizer of a process would import.

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["trimtab.train", "trimtab.cli", "tests.train.runs", "torch._dynamo"])


def start(function: Callable[..., None], *args: Any, output: Path, env: dict[str, str] | None = None) -> BaseProcess:
    """A real process whose standard output and error go to a file."""
    process = _SERVER.Process(target=_work, args=(output, env or {}, function, *args))
    process.start()
    return process


def _work(output: Path, env: dict[str, str], function: Callable[..., None], *args: Any) -> None:
    os.environ.update(env)
    with output.open("w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            function(*args)


def end(process: BaseProcess) -> int | None:
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"process {process.pid} is not done after {PATIENCE_S} s")
    return process.exitcode


def wait_for(condition: Callable[[], Any], process: BaseProcess | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process is None or process.is_alive(), f"the process ended early, with {process.exitcode}"
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s without success"
        time.sleep(0.005)


def count_steps(run: Path) -> int:
    path = run / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def write_config(path: Path, config: RunConfig) -> Path:
    """Configs are given to processes as JSON."""
    from trimtab.train.config import to_json

    path.write_text(json.dumps(to_json(config)))
    return path


def read_config(path: Path) -> RunConfig:
    from trimtab.train.config import from_json

    return from_json(json.loads(path.read_text()))
