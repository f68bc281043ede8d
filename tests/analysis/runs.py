"""Run and study folders without training: the files of `train`, byte for byte of the same format, with numbers planted.

    study = grid(sizes=("2x16", "2x32", "3x64"), lrs=(0.01, 0.1))
    write_study(tmp_path, study)                     # as `planted` says: a power law and a critical value
    write_run(tmp_path / "one", config, loss=2.0)    # one run with these numbers

The planted law: the attention logit is LOGIT * params^SLOPE * (lr / 0.1)^STEEP, steadied runs keep theirs at 5, and a
run whose logit is above CRITICAL ends LOST nats above what it could have reached.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.lab.sizes import parse_size
from trimtab.lab.study import Arm, Cell, Study
from trimtab.recipes import gpt_lab
from trimtab.train.config import GPTRun, RunConfig, WatchConfig, to_json

LOGIT, SLOPE, STEEP, CRITICAL, LOST, FIRST = 0.02, 0.8, 2.0, 150.0, 0.7, 5.8
ARMS = (Arm("plain"), Arm("steadied", ("qk-norm", "z-loss=1e-4")))


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What one run should say of itself."""

    loss: float = 2.0  # last validation loss
    first: float = FIRST
    logit: float | None = 5.0  # largest attention logit from the first look on; None: nobody looked at layers
    grad_rms: float = 1e-3
    logz: float = 5.5
    why: str = "done"  # "diverged" and "not finite" end half-way
    until: int | None = None  # the last step of a run that is still going on
    spikes: tuple[int, ...] = ()  # steps at which the training loss jumps, for three steps
    sha256: str = "a" * 64
    versions: Mapping[str, str] = field(default_factory=lambda: {"trimtab": "0.1.0", "torch": "2.0", "python": "3.11"})


def grid(
    sizes: Sequence[str] = ("2x16", "2x32", "3x64"),
    lrs: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    arms: Sequence[Arm] = ARMS,
    seeds: Sequence[int] = (0, 1),
    *,
    steps: int = 100,
    name: str = "planted",
) -> Study:
    looks = WatchConfig(every=max(1, steps // 50))
    return Study(
        name=name,
        question="Does it break?",
        subject="gpt-lab",
        base=replace(gpt_lab(), steps=steps, eval_every=max(1, steps // 4), watch=looks),
        sizes=tuple(parse_size(size) for size in sizes),
        lrs=tuple(lrs),
        arms=tuple(arms),
        seeds=tuple(seeds),
    )


def planted(cell: Cell) -> Numbers:
    """The law; seeds lie a little above it and below it by turns."""
    params = params_of(cell.config)
    wiggle = math.exp((-1) ** cell.seed * 0.05 * (1 + math.sin(params + 1000 * cell.lr)))
    steadied = cell.arm != "plain"
    logit = 5.0 * wiggle if steadied else logit_at(params, cell.lr) * wiggle
    reachable = 2.4 - 0.15 * math.log10(params / 6144) + 0.3 * max(math.log10(0.01 / cell.lr), 0.0)
    above = 0.03 * max(math.log10(cell.lr / 0.01), 0.0)
    lost = LOST if logit > CRITICAL else 0.0
    return Numbers(loss=reachable + above + lost + 0.01 * wiggle, logit=logit, grad_rms=2e-2 * params**-0.4 * wiggle)


def logit_at(params: float, lr: float) -> float:
    return LOGIT * params**SLOPE * (lr / 0.1) ** STEEP


def fails_at(lr: float) -> float:
    """The size at which the planted law reaches the critical value."""
    return float((CRITICAL / (LOGIT * (lr / 0.1) ** STEEP)) ** (1 / SLOPE))


def write_study(folder: Path, study: Study, numbers: Callable[[Cell], Numbers | None] = planted) -> Path:
    """All cells for which `numbers` has some."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(study.to_json()))
    for cell in study.cells():
        found = numbers(cell)
        if found is not None:
            write_run(folder / cell.folder, cell.config, found)
    return folder


def write_failures(folder: Path, failures: Iterable[tuple[str, str]], *, at: float = 0.0) -> None:
    lines = [{"cell": cell, "attempt": 2, "error": error, "time": at} for cell, error in failures]
    _write_lines(folder / "failures.jsonl", lines)


def write_run(folder: Path, config: RunConfig, numbers: Numbers | None = None, **changes: Any) -> Path:
    """One run folder. `changes` are fields of `Numbers`."""
    numbers = replace(numbers or Numbers(), **changes)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"sha256": numbers.sha256, "params": params_of(config), "versions": dict(numbers.versions)}
    (folder / "config.json").write_text(json.dumps({"config": to_json(config), **facts}))
    last = numbers.until or (config.steps if numbers.why == "done" else config.steps // 2)
    losses = [_training_loss(numbers, step, config.steps) for step in range(1, last + 1)]
    _write_lines(folder / "log.jsonl", [_step(config, step, loss) for step, loss in enumerate(losses, start=1)])
    looks = range(config.watch.every, last + 1, config.watch.every)
    _write_lines(folder / "signals.jsonl", [_look(config, numbers, step, losses[step - 1]) for step in looks])
    _write_lines(folder / "events.jsonl", list(_events(config, numbers, last)))
    if numbers.until is None:
        clock = {"step": last, "samples": last * config.batch, "tokens": _tokens(config, last), "seconds": last / 50}
        result = {"why": numbers.why, **clock, "validation_loss": _finite(numbers.loss), "skipped": 0, "waited_s": 0.0}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def params_of(config: RunConfig) -> int:
    assert isinstance(config, GPTRun)
    return 12 * config.model.depth * config.model.width**2


def _step(config: RunConfig, step: int, loss: float) -> dict[str, Any]:
    clock = {"step": step, "samples": step * config.batch, "tokens": _tokens(config, step), "seconds": step / 50}
    rest = {"step_seconds": 0.02, "loss": _finite(loss), "lr": config.optim.lr, "length": 64, "batch": config.batch}
    return clock | {"warmup_steps": None, "warmup_tokens": None} | rest | {"grad_norm": 0.5}


def _look(config: RunConfig, numbers: Numbers, step: int, loss: float) -> dict[str, Any]:
    assert isinstance(config, GPTRun)
    tensor = {"rms": 1.1, "grad_rms": numbers.grad_rms, "param_rms": 0.2, "update_rms": config.optim.lr, "ratio": 0.1}
    names = [f"transformer.blocks.{i}.{part}.weight" for i in range(config.model.depth) for part in ("mlp.up", "norm1")]
    layers: dict[str, Any] = {}
    for i in range(config.model.depth) if numbers.logit is not None else ():
        layers[f"transformer.blocks.{i}"] = {"out_rms": 1.5 + i, "out_max": 6.0}
        heard = {"logit_max": numbers.logit / (1 + i), "entropy": 1.0, "q_norm": 4.0, "k_norm": 4.0, "cosine": 0.1}
        layers[f"transformer.blocks.{i}.attention"] = heard
    totals = {"grad_norm": 0.5, "logz": numbers.logz} if layers else {"grad_norm": 0.5}
    tensors = {name: {**tensor, "eps_share": 1e-5} for name in names}
    return {"step": step, "loss": _finite(loss), "tensors": tensors, "layers": layers, "totals": totals}


def _events(config: RunConfig, numbers: Numbers, last: int) -> Iterable[dict[str, Any]]:
    for step in sorted({0, *range(config.eval_every, last + 1, config.eval_every), last} - {numbers.until}):
        share = step / config.steps
        loss = numbers.loss if step == last else numbers.first + (numbers.loss - numbers.first) * share
        clock = {"tokens": _tokens(config, step), "seconds": step / 50}
        yield {"event": "evaluated", "time": 1.8e9 + step, "step": step, **clock, "loss": _finite(loss)}
    if numbers.until is None:
        done = {"event": "done", "step": last, "tokens": _tokens(config, last)}
        yield done if numbers.why == "done" else {"event": "stopped", "reason": f"planted: {numbers.why}"}


def _training_loss(numbers: Numbers, step: int, steps: int) -> float:
    end = numbers.loss if math.isfinite(numbers.loss) else numbers.first
    spike = 3.0 if any(at <= step < at + 3 for at in numbers.spikes) else 0.0
    return end + (numbers.first - end) * math.exp(-8 * step / steps) + 0.02 * math.sin(1.7 * step) + spike


def _tokens(config: RunConfig, step: int) -> int:
    return step * config.batch * 64


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
