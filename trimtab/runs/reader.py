"""A run folder read back, while it is being written or later: columns of numbers by step, and the events.

Reading needs only the files, so any old run can be analysed again. What cannot be read is left out and counted: null
and text where a number should be are NaN; a line that is not JSON, as a killed process leaves it, is skipped; of a step
that was trained twice, as after a resume, the last record counts.
"""

import math
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab.runs.files import RunError, open_file
from trimtab.runs.folder import RunFolder, SavedConfig, parse_line
from trimtab.runs.records import Event, EventKind, Json, LayerSignal, Result, SignalRecord, TensorSignal, number, whole

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# The signals that an analysis needs. All of them would take gigabytes for a long run of a large model.
TENSOR_SIGNALS: tuple[TensorSignal, ...] = ("rms", "grad_rms", "eps_share")


class Lines:
    """The objects of a JSON-lines file that may still grow; each `read` yields those added since the last."""

    def __init__(self, path: Path) -> None:
        self.path, self.broken, self._place, self._rest, self._file = path, 0, 0, b"", -1

    def read(self) -> Iterator[Json]:
        try:
            file = open_file(self.path)
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._place:  # a resume has truncated the log
                self._place, self._rest, self._file = 0, b"", status.st_ino
            file.seek(self._place)
            for line in file:
                self._place += len(line)
                self._rest += line
                if not self._rest.endswith(b"\n"):
                    return  # an incomplete line; the rest may follow
                record, self._rest = parse_line(self._rest), b""
                if record is not None:
                    yield record
                else:
                    self.broken += 1


class Series:
    """Numbers by step and name, stored compactly. A name that is missing at a step is NaN there."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values: dict[str, array[float]] = {}
        self._known_order: Ints = np.empty(0, dtype=np.int64)
        self._ordered = 0  # length for which the order was computed

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

    @property
    def loss(self) -> Floats:
        return self.column("loss")

    def column(self, name: str) -> Floats:
        """The numbers of a name, in the order of `steps`; all NaN if it was never logged."""
        values = np.full(len(self._steps), np.nan)
        known = self._values.get(name, array("d"))
        values[: len(known)] = known
        return values[self._order()]

    def _order(self) -> Ints:
        """Indices in the order of the steps; of a step that occurs twice, the last."""
        if self._ordered != len(self._steps):
            steps = np.array(self._steps, dtype=np.int64)
            _, last = np.unique(steps[::-1], return_index=True)
            self._known_order, self._ordered = len(steps) - 1 - last, len(steps)
        return self._known_order


class StepLog(Series):
    """The columns of the step log."""

    @property
    def tokens(self) -> Floats:
        return self.column("tokens")

    @property
    def seconds(self) -> Floats:
        return self.column("seconds")

    @property
    def rms_max(self) -> Floats:
        """The largest RMS_t of each step; all NaN if the optimizer does not measure it."""
        return self.column("rms_max")

    def add_record(self, record: Json) -> None:
        step = whole(record.pop("step", None))
        if step is not None:
            self.add(step, ((k, number(v)) for k, v in record.items() if not isinstance(v, dict | list)))


class SignalLog(Series):
    """The columns of the watcher's records."""

    def total(self, name: str) -> Floats:
        """A signal of the whole model, such as "logz"."""
        return self.column(f"totals/{name}")

    @property
    def totals(self) -> list[str]:
        return [name.removeprefix("totals/") for name in self.names if name.startswith("totals/")]

    def tensors(self, signal: TensorSignal) -> dict[str, Floats]:
        """One signal of every tensor, by its name."""
        return self._pick("tensors", signal)

    def layers(self, signal: LayerSignal) -> dict[str, Floats]:
        return self._pick("layers", signal)

    def add_record(self, record: SignalRecord, tensor_signals: tuple[TensorSignal, ...] | None) -> None:
        if record.step is None:
            return
        values = [("loss", record.loss), *((f"totals/{key}", value) for key, value in record.totals.items())]
        for name, signals in record.tensors.items():
            kept = (item for item in signals.items() if tensor_signals is None or item[0] in tensor_signals)
            values += [(f"tensors/{name}/{key}", value) for key, value in kept]
        for name, signals in record.layers.items():
            values += [(f"layers/{name}/{key}", value) for key, value in signals.items()]
        self.add(record.step, values)

    def _pick(self, group: str, signal: str) -> dict[str, Floats]:
        start, end = f"{group}/", f"/{signal}"
        names = [name for name in self.names if name.startswith(start) and name.endswith(end)]
        return {name.removeprefix(start).removesuffix(end): self.column(name) for name in names}


@dataclass
class Run:
    """The contents of a run folder."""

    folder: RunFolder
    log: StepLog = field(default_factory=StepLog)
    signals: SignalLog = field(default_factory=SignalLog)
    events: list[Event] = field(default_factory=list)
    config: SavedConfig | None = None
    result: Result | None = None
    broken: int = field(default=0, kw_only=True)  # lines that could not be read
    damage: tuple[str, ...] = field(default=(), kw_only=True)  # what is damaged, in words

    def of_kind(self, *kinds: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]


def read_run(folder: str | Path, *, tensor_signals: tuple[TensorSignal, ...] | None = TENSOR_SIGNALS) -> Run:
    """Read a folder. `tensor_signals` are the signals to keep of each tensor; None keeps all."""
    paths = RunFolder(folder)
    run = Run(paths)
    log, signals, events = Lines(paths.log), Lines(paths.signals), Lines(paths.events)
    for record in log.read():
        run.log.add_record(record)
    for record in signals.read():
        run.signals.add_record(SignalRecord.from_json(record), tensor_signals)
    run.events = [Event.from_json(record) for record in events.read()]
    if not len(run.log.steps) and not len(run.signals.steps) and not run.events:
        names = ", ".join(path.name for path in (paths.log, paths.signals, paths.events))
        raise RunError(f"{folder} holds no run: {names} are empty or missing")
    run.config = paths.read_config()
    run.broken = log.broken + signals.broken + events.broken
    try:
        run.result = paths.require_result()
        run.damage = () if run.result is None else paths.compare(run.result.files)
    except RunError as error:
        run.damage = (str(error),)
    return run
