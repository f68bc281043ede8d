"""What a run writes: one record per step, per watched step, per event, and one for the end.

Reading is tolerant: a number that is missing, null or of another type is NaN (None for a whole number), unknown keys
are ignored, and an unknown event or end reason keeps its text. Old and interrupted runs can always be read. Text is
made `printable`, because it may come from somebody else's folder and is shown on a terminal.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

from trimtab.screen import printable

Json = dict[str, Any]

# Signals of a tensor and of a layer. `trimtab.watch` computes them; a test compares the names.
TensorSignal = Literal["rms", "grad_rms", "param_rms", "update_rms", "ratio", "eps_share"]
_Rounding = Literal["input_error", "weight_error", "grad_error"]  # of 8-bit matrix products
LayerSignal = Literal["logit_max", "entropy", "q_norm", "k_norm", "cosine", "out_rms", "out_max", _Rounding]


class End(StrEnum):
    """Why a run ended."""

    DONE = "done"  # all steps or tokens were trained
    NOT_FINITE = "not finite"  # too many steps in a row, or the last validation loss
    DIVERGED = "diverged"  # the loss stayed above `diverged_at` times the first one
    INTERRUPTED = "interrupted"  # Ctrl-C
    TERMINATED = "terminated"  # SIGTERM
    NOT_SAVED = "not saved"  # all steps were trained, but the last checkpoint or the log could not be written

    @property
    def resumable(self) -> bool:
        """The run is not complete, and `resume` continues it."""
        return self in (End.INTERRUPTED, End.TERMINATED, End.NOT_SAVED)


class EventKind(StrEnum):
    """What a line of the events file reports."""

    EVALUATED = "evaluated"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_FAILED = "checkpoint failed"
    SKIPPED = "skipped"
    ALARM = "alarm"
    ROLLED_BACK = "rolled back"
    NOT_ROLLED_BACK = "not rolled back"
    RESUMED = "resumed"
    FORCED = "forced"
    STOPPED = "stopped"
    DONE = "done"


@dataclass(kw_only=True)
class Clock:
    """Counters since the start of the run."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    warmup_steps: int | None = None  # when the learning rate reached its peak; the decay counts from there
    warmup_tokens: int | None = None


@dataclass(kw_only=True)
class StepRecord(Clock):
    """One training step."""

    step_seconds: float
    loss: float
    lr: float
    length: int
    batch: int
    grad_norm: float
    rms_max: float | None = None  # largest RMS_t of the step, if the optimizer measures it

    def to_json(self) -> Json:
        values = dict(self.__dict__)
        if self.rms_max is None:
            del values["rms_max"]
        return values


@dataclass(frozen=True)
class SignalRecord:
    """The watcher's measurements at one step: by tensor, by layer, and over the whole model."""

    step: int | None
    loss: float
    tensors: dict[str, dict[str, float]]
    layers: dict[str, dict[str, float]]
    totals: dict[str, float]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "SignalRecord":
        tensors, layers = (
            {printable(name): _numbers(signals) for name, signals in as_mapping(record.get(group)).items()}
            for group in ("tensors", "layers")
        )
        step, loss = whole(record.get("step")), number(record.get("loss"))
        return cls(step, loss, tensors, layers, _numbers(record.get("totals")))


@dataclass(frozen=True)
class AlarmRecord:
    """The fields of an alarm, as `trimtab.watch.Alarm` writes them."""

    kind: str
    where: str
    signal: str
    value: float
    usual: tuple[float, float]
    advice: str

    @property
    def skips(self) -> bool:
        """The watcher's action on an alarm: it skipped the step."""
        return (self.kind, self.signal) == ("action", "skip")


@dataclass(frozen=True)
class Event:
    """One line of the events file. `values` has the fields that only some kinds have."""

    kind: str  # an EventKind, or text that this version does not know
    time: float
    step: int | None
    loss: float  # of an evaluation
    reason: str
    values: Json = field(default_factory=dict)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Event":
        return cls(
            as_text(record.get("event")),
            number(record.get("time")),
            whole(record.get("step")),
            number(record.get("loss")),
            as_text(record.get("reason")),
            {key: value for key, value in record.items() if key not in ("event", "time", "step", "loss", "reason")},
        )

    @property
    def alarm(self) -> AlarmRecord:
        usual = self.values.get("usual")
        low, high = (*(usual if isinstance(usual, list) else ()), None, None)[:2]
        kind, where, signal, advice = (as_text(self.values.get(key)) for key in ("kind", "where", "signal", "advice"))
        return AlarmRecord(kind, where, signal, number(self.values.get("value")), (number(low), number(high)), advice)


@dataclass(frozen=True)
class FileRecord:
    """A file as a run wrote it, or the beginning of it."""

    lines: int
    bytes: int
    sha256: str

    @classmethod
    def from_json(cls, record: Any) -> "FileRecord":
        values = as_mapping(record)
        lines, size = (whole(values.get(key)) or 0 for key in ("lines", "bytes"))
        return cls(lines, size, as_text(values.get("sha256")))


@dataclass(kw_only=True)
class Result(Clock):
    """How a run ended. Its file is written last: a folder that has it holds a complete run."""

    why: End | str  # text: a reason that this version does not know
    validation_loss: float | None = None  # the best one
    skipped: int = 0
    waited_s: float = 0.0
    compilations: int | None = None
    most_compilations: int | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)  # what the run wrote; empty in older versions

    def to_json(self) -> Json:
        values = asdict(self) | {"why": str(self.why)}
        return {k: v for k, v in values.items() if v is not None or "compilations" not in k}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Result":
        why, loss = as_text(record.get("why")), number(record.get("validation_loss"))
        values: Json = {key: whole(record.get(key)) or 0 for key in ("step", "samples", "tokens", "skipped")}
        values |= {key: number(record.get(key)) for key in ("seconds", "waited_s")}
        for key in ("warmup_steps", "warmup_tokens", "compilations", "most_compilations"):
            values[key] = whole(record.get(key))
        values["validation_loss"] = loss if math.isfinite(loss) else None
        files = as_mapping(record.get("files"))
        values["files"] = {str(name): FileRecord.from_json(entry) for name, entry in files.items()}
        return cls(why=next((end for end in End if end == why), why), **values)


@dataclass(frozen=True)
class Failure:
    """A cell of a study that failed: which one, when, and the error."""

    cell: str
    time: float
    error: str

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Failure":
        error = as_text(record.get("error")) or "no reason given"
        return cls(as_text(record.get("cell")), number(record.get("time")), error)


# --- JSON of unknown origin


def as_text(value: Any) -> str:
    """One line of text; "" in place of None."""
    return "" if value is None else printable(str(value))


def as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Json:
    """Nested values by dotted name, such as "optim.lr"."""
    flat: Json = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def whole(value: Any) -> int | None:
    """A whole number of 64 bits."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan


def _numbers(values: Any) -> dict[str, float]:
    return {printable(key): number(value) for key, value in as_mapping(values).items()}
