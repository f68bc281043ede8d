"""A run folder read back, while it is being written or long after: numbers by step, and what happened.

    log.jsonl       one object per step: loss, grad_norm, lr, rms_max, ...
    signals.jsonl   one object per watched step: "tensors" by name, "layers" by name, "totals"
    events.jsonl    skips, evaluations, alarms, the end
    config.json, result.json

Only files: any old run can be looked at again. What cannot be read is left out and counted, never guessed: null, NaN
and text where a number should be are NaN; a line that is not JSON, as a killed process leaves it, is skipped; of a step
that was taken twice, as after a resume, the last stays.
"""

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.analysis.spikes import Floats, Ints

Record = dict[str, Any]
# The signals an analysis needs. Keeping them all would cost a long run of a large model gigabytes.
TENSOR_SIGNALS = ("rms", "grad_rms", "eps_share")


class Lines:
    """The objects of a .jsonl file that may still grow: each call of `read` gives those that came since the last."""

    def __init__(self, path: Path) -> None:
        self.path, self.broken, self._place, self._rest, self._file = path, 0, 0, b"", -1

    def read(self) -> Iterator[Record]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._place:  # a resume has cut the log back
                self._place, self._rest, self._file = 0, b"", status.st_ino
            file.seek(self._place)
            for line in file:
                self._place += len(line)
                self._rest += line
                if not self._rest.endswith(b"\n"):
                    return  # half a line; the other half may come
                record, self._rest = _parse(self._rest), b""
                if record is not None:
                    yield record
                else:
                    self.broken += 1


class Series:
    """Numbers by step and name, in little memory. A name that is missing at a step is NaN there."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values: dict[str, array[float]] = {}
        self._known_order: Ints = np.empty(0, dtype=np.int64)
        self._ordered = 0  # steps that order was made for

    def add(self, step: int, values: Iterable[tuple[str, float]]) -> None:
        place = len(self._steps)
        self._steps.append(step)
        for name, value in values:
            column = self._values.setdefault(name, array("d"))
            column.extend([math.nan] * (place - len(column)))
            column.append(value)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    @property
    def steps(self) -> Ints:
        return np.array(self._steps, dtype=np.int64)[self._order()]

    def column(self, name: str) -> Floats:
        """The numbers of a name, in the order of `steps`; all NaN if nobody logged it."""
        values = np.full(len(self._steps), np.nan)
        known = self._values.get(name, array("d"))
        values[: len(known)] = known
        return values[self._order()]

    def _order(self) -> Ints:
        """Places in the order of the steps; of a step that comes twice, the last."""
        if self._ordered != len(self._steps):
            steps = np.array(self._steps, dtype=np.int64)
            _, last = np.unique(steps[::-1], return_index=True)
            self._known_order, self._ordered = len(steps) - 1 - last, len(steps)
        return self._known_order


@dataclass
class Run:
    """What a folder says. `log` has the columns of log.jsonl, `signals` those of signals.jsonl by path: its names are
    like "tensors/embedding.weight/rms", "layers/transformer.blocks.0/out_max" and "totals/logz"."""

    folder: Path
    log: Series = field(default_factory=Series)
    signals: Series = field(default_factory=Series)
    events: list[Record] = field(default_factory=list)
    config: Record = field(default_factory=dict)
    result: Record | None = None
    broken: int = 0  # lines that could not be read

    def tensors(self, signal: str) -> dict[str, Floats]:
        """One signal of every tensor, in the order of `signals.steps`."""
        return self._pick("tensors", signal)

    def layers(self, signal: str) -> dict[str, Floats]:
        return self._pick("layers", signal)

    def of_kind(self, *kinds: str) -> list[Record]:
        return [event for event in self.events if event.get("event") in kinds]

    def _pick(self, group: str, signal: str) -> dict[str, Floats]:
        parts = [(name, name.split("/")) for name in self.signals.names]
        return {p[1]: self.signals.column(name) for name, p in parts if len(p) == 3 and (p[0], p[2]) == (group, signal)}


def read_run(folder: str | Path, *, tensor_signals: tuple[str, ...] | None = TENSOR_SIGNALS) -> Run:
    """Read a folder; `tensor_signals` chooses what to keep of each tensor, None keeps all."""
    folder = Path(folder)
    run = Run(folder)
    log, signals, events = (Lines(folder / f"{name}.jsonl") for name in ("log", "signals", "events"))
    for record in log.read():
        add_step(run.log, record)
    for record in signals.read():
        add_signals(run.signals, record, tensor_signals)
    run.events = list(events.read())
    if not len(run.log.steps) and not len(run.signals.steps) and not run.events:
        raise ValueError(f"{folder} holds no run: there is nothing in log.jsonl, signals.jsonl or events.jsonl")
    run.config, run.result = _read_json(folder / "config.json") or {}, _read_json(folder / "result.json")
    run.broken = log.broken + signals.broken + events.broken
    return run


def add_step(series: Series, record: Record) -> None:
    step = _step_of(record)
    if step is not None:
        series.add(step, ((k, _number(v)) for k, v in record.items() if k != "step" and not isinstance(v, dict | list)))


def add_signals(series: Series, record: Record, tensor_signals: tuple[str, ...] | None = TENSOR_SIGNALS) -> None:
    step = _step_of(record)
    if step is not None:
        series.add(step, _flatten(record, tensor_signals))


def _flatten(record: Record, tensor_signals: tuple[str, ...] | None) -> Iterator[tuple[str, float]]:
    yield "loss", _number(record.get("loss"))
    for key, value in _items(record.get("totals")):
        yield f"totals/{key}", _number(value)
    for group in ("tensors", "layers"):
        for name, signals in _items(record.get(group)):
            for key, value in _items(signals):
                if group == "layers" or tensor_signals is None or key in tensor_signals:
                    yield f"{group}/{name}/{key}", _number(value)


def _items(values: Any) -> Iterable[tuple[str, Any]]:
    return values.items() if isinstance(values, dict) else ()


def _step_of(record: Record) -> int | None:
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _read_json(path: Path) -> Record | None:
    try:
        return _parse(path.read_bytes())
    except OSError:
        return None
