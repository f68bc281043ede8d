"""The files of a run folder and of a study folder: their names, their format, and what is in them.

    config.json     the config, its sha256, the parameters, versions; FORMAT
    log.jsonl       one StepRecord per step
    signals.jsonl   one SignalRecord per watched step that is recorded
    events.jsonl    one Event per alarm, skipped step, evaluation, checkpoint, resume; the end
    checkpoints/    trimtab.train.checkpoint
    result.json     Result, written last: a folder that has it holds a complete run

A study folder holds study.json, failures.jsonl (one Failure per failed attempt) and run folders under cells/.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.runs.files import RunError, read_json
from trimtab.runs.records import Event, Json, Result, as_mapping, flatten, whole

FORMAT = 2  # of run folders. 1: no number in config.json; schedules repeat `batch` and `model.context` as their ends
CONFIG, LOG, SIGNALS, EVENTS, RESULT = "config.json", "log.jsonl", "signals.jsonl", "events.jsonl", "result.json"
CHECKPOINTS = "checkpoints"
FILES = (CONFIG, LOG, EVENTS, SIGNALS, RESULT)
STUDY, FAILURES, CELLS = "study.json", "failures.jsonl", "cells"
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class SavedConfig:
    """config.json: the config as JSON, and the facts that are saved with it."""

    format: int
    config: Json
    params: int | None
    sha256: str  # of the data
    versions: dict[str, str]

    @property
    def newer(self) -> bool:
        """Written by a later version of Trimtab, in a format that this one may misread."""
        return self.format > FORMAT

    @property
    def values(self) -> Json:
        """The config by dotted names, such as "optim.lr"."""
        return flatten(self.config)


class RunFolder:
    """The paths of a run folder, and its small files read back."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config, self.log, self.signals, self.events, self.result, self.checkpoints = (
            self.path / name for name in (CONFIG, LOG, SIGNALS, EVENTS, RESULT, CHECKPOINTS)
        )

    @property
    def complete(self) -> bool:
        return self.result.exists()

    def read_config(self) -> SavedConfig | None:
        """None if config.json is missing or is not a config."""
        data = read_json(self.config)
        if data is None or not isinstance(data.get("config"), dict):
            return None
        versions = {str(key): str(value) for key, value in as_mapping(data.get("versions")).items()}
        sha256, params = str(data.get("sha256") or ""), whole(data.get("params"))
        return SavedConfig(whole(data.get("format")) or 1, data["config"], params, sha256, versions)

    def require_config(self) -> SavedConfig:
        """The config, to continue or load the run. Raises RunError if that is not possible."""
        saved = self.read_config()
        if saved is None and not self.config.exists():
            raise RunError(f"{self.path} holds no run (there is no {CONFIG})")
        if saved is None:
            raise RunError(f"{self.config} is not a config of a run")
        if saved.newer:
            raise RunError(
                f"{self.path} was written by a newer Trimtab (format {saved.format}, this version reads up to "
                f"{FORMAT}): its logs can be reported, but it cannot be resumed or loaded. Upgrade trimtab"
            )
        return saved

    def read_result(self) -> Result | None:
        data = read_json(self.result)
        return None if data is None else Result.from_json(data)

    def read_events(self) -> Iterator[Event]:
        for record in read_lines(self.events):
            yield Event.from_json(record)

    def read_last_step(self) -> Json | None:
        """The last complete line of the log, read from its end."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
                lines = file.read().split(b"\n")
        except OSError:
            return None
        found = map(parse_line, reversed(lines[:-1]))  # what follows the last line end is incomplete
        return next((record for record in found if record is not None), None)


def read_lines(path: Path) -> Iterator[Json]:
    """The objects of a JSON-lines file that must be intact; an unfinished last line is left out."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield require_line(line, path)


def parse_line(line: str | bytes) -> Json | None:
    """The object of a line of JSON; None if the line holds anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def require_line(line: str | bytes, path: Path) -> Json:
    record = parse_line(line)
    if record is None:
        raise RunError(f"{path} has a line that is not a JSON object: {line[:80]!r}")
    return record


def is_run(names: Any) -> bool:
    """Whether a folder with these file names is a run folder."""
    return CONFIG in names or LOG in names
