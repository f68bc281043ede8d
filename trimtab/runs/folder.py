"""The files of a run folder and of a study folder: their names, their format, and what is in them.

    config.json     the config, its sha256, the parameters, versions; FORMAT
    log.jsonl       one StepRecord per step
    signals.jsonl   one SignalRecord per watched step that is recorded
    events.jsonl    one Event per alarm, skipped step, evaluation, checkpoint, resume; the end
    checkpoints/    trimtab.train.checkpoint
    result.json     Result, with counts and hashes of the files above; written last: the run is complete

A study folder holds study.json, failures.jsonl (one Failure per failed attempt) and run folders under cells/.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.runs.files import RunError, open_file, require_json
from trimtab.runs.records import Event, FileRecord, Json, Result, as_mapping, as_text, flatten, whole
from trimtab.screen import printable

FORMAT = 2  # of run folders. 1: no number in config.json; schedules repeat `batch` and `model.context` as their ends
CONFIG, LOG, SIGNALS, EVENTS, RESULT = "config.json", "log.jsonl", "signals.jsonl", "events.jsonl", "result.json"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
FILES = (CONFIG, LOG, EVENTS, SIGNALS, RESULT)
STUDY, FAILURES, CELLS = "study.json", "failures.jsonl", "cells"
_TAIL_BYTES, _PIECE_BYTES = 1 << 16, 1 << 20


@dataclass(frozen=True)
class SavedConfig:
    """config.json: the config as JSON, and the facts that are saved with it."""

    format: int
    config: Json
    params: int | None
    sha256: str  # of the data
    versions: dict[str, str]
    continue_from: int | None = None  # a step: a resume from there was started and has not removed later steps yet
    forced: int | None = None  # the step of the last resume with --force: earlier checkpoints may not fit the config

    @property
    def newer(self) -> bool:
        """Written by a later version of Trimtab, in a format that this one may misread."""
        return self.format > FORMAT

    @property
    def values(self) -> Json:
        """The config by dotted names, such as "optim.lr", to be shown."""
        found = flatten(self.config)
        return {printable(name): printable(x) if isinstance(x, str) else x for name, x in found.items()}


class RunFolder:
    """The paths of a run folder, and its small files read back."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config, self.log, self.signals, self.events, self.result, self.checkpoints, self.tensorboard = (
            self.path / name for name in (CONFIG, LOG, SIGNALS, EVENTS, RESULT, CHECKPOINTS, TENSORBOARD)
        )

    @property
    def complete(self) -> bool:
        """Whether the run has ended by itself: its result can be read."""
        return self.read_result() is not None

    @property
    def intact(self) -> bool:
        """Whether the run is complete and its files are those that it wrote."""
        return self.complete and not self.damage()

    def damage(self) -> tuple[str, ...]:
        """How the files of a complete run differ from those that it wrote. Empty for runs of older versions."""
        result = self.read_result()
        return () if result is None else self.compare(result.files)

    def compare(self, files: Mapping[str, FileRecord], *, prefix: bool = False) -> tuple[str, ...]:
        """How files of this folder differ from their records; with `prefix`, how their beginnings do."""
        known = [(name, entry) for name, entry in files.items() if name in FILES]
        return tuple(filter(None, (describe_difference(self.path / n, entry, prefix=prefix) for n, entry in known)))

    def read_config(self) -> SavedConfig | None:
        """None if config.json is missing or damaged."""
        try:
            return self.require_config(newer=True)
        except RunError:
            return None

    def require_config(self, *, newer: bool = False) -> SavedConfig:
        """The config. Raises RunError if it is missing or damaged, or, without `newer`, if a later version wrote it:
        then the run can be reported, but not continued or loaded."""
        if not os.path.lexists(self.config):
            raise RunError(f"{self.path} holds no run (there is no {CONFIG})")
        data = require_json(self.config)
        if not isinstance(data.get("config"), dict):
            raise RunError(f"{self.config} is damaged: it is not the config of a run")
        versions = {as_text(key): as_text(value) for key, value in as_mapping(data.get("versions")).items()}
        sha256, params = as_text(data.get("sha256")), whole(data.get("params"))
        marks = whole(data.get("continue_from")), whole(data.get("forced"))
        format_ = whole(data.get("format")) or 1
        saved = SavedConfig(format_, data["config"], params, sha256, versions, *marks)
        if saved.newer and not newer:
            raise RunError(
                f"{self.path} was written by a newer Trimtab (format {saved.format}, this version reads up to "
                f"{FORMAT}): its logs can be reported, but it cannot be resumed or loaded. Upgrade trimtab"
            )
        return saved

    def read_result(self) -> Result | None:
        """None if the run is not complete, or if its result is damaged."""
        try:
            return self.require_result()
        except RunError:
            return None

    def require_result(self) -> Result | None:
        """None if the run is not complete. Raises RunError if its result is damaged."""
        if not os.path.lexists(self.result):
            return None
        data = require_json(self.result)
        if "why" not in data:
            raise RunError(f"{self.result} is damaged: it is not the result of a run")
        return Result.from_json(data)

    def read_events(self) -> Iterator[Event]:
        for record in read_lines(self.events):
            yield Event.from_json(record)

    def read_last_step(self) -> Json | None:
        """The last complete line of the log, read from its end."""
        try:
            with open_file(self.log) as file:
                file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
                lines = file.read().split(b"\n")
        except OSError:
            return None
        found = map(parse_line, reversed(lines[:-1]))  # what follows the last line end is incomplete
        return next((record for record in found if record is not None), None)


def read_lines(path: Path) -> Iterator[Json]:
    """The objects of a JSON-lines file that must be intact; an unfinished last line is left out."""
    with open_file(path) as file:
        for line in file:
            if line.endswith(b"\n"):
                yield require_line(line, path)


def describe_difference(path: Path, entry: FileRecord, *, prefix: bool = False) -> str:
    """How a file differs from its record, in words; "" if it does not."""
    sha, lines, size = hashlib.sha256(), 0, 0
    try:
        with open_file(path) as file:
            while piece := file.read(min(_PIECE_BYTES, entry.bytes - size) if prefix else _PIECE_BYTES):
                sha.update(piece)
                lines, size = lines + piece.count(b"\n"), size + len(piece)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    if lines != entry.lines:
        return f"{path.name} has {lines} lines, and the run wrote {entry.lines}"
    same = size == entry.bytes and sha.hexdigest() == entry.sha256
    return "" if same else f"{path.name} is not what the run wrote: its sha256 differs"


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
