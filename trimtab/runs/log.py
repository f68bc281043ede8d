"""The writer of a run folder.

Lines are appended one by one, so a killed run loses at most the end of its last line, which the next writer removes.
Lines that a full disk refuses are written with the next one. A resume truncates the log to the step it continues from;
events are kept, they are the history.
"""

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from trimtab.runs.files import RunError, replace_json
from trimtab.runs.folder import FORMAT, RunFolder, require_line
from trimtab.runs.records import EventKind, Result, StepRecord


class RunLog:
    """Writes the files of one run; with `writes=False`, as on all processes but the first, it writes nothing."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.paths = RunFolder(folder)
        self._files: dict[Path, _Lines] = {}

    def check_free(self) -> None:
        """Raise RunError if the folder cannot hold a new run."""
        folder = self.folder
        try:
            if self.paths.config.exists():
                raise RunError(f"{folder} already holds a run; `trimtab resume {folder}`, or use another --out")
            if folder.exists() and any(path.name[0] != "." for path in folder.iterdir()):
                raise RunError(f"{folder} is not empty and holds no run; use another --out")
            nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not nearest.is_dir():
                raise RunError(f"cannot write to {folder}: {nearest} is not a folder")
            if not os.access(nearest, os.W_OK | os.X_OK):
                raise RunError(f"cannot write to {folder}: no permission to write in {nearest}")
        except OSError as error:
            raise RunError(f"cannot write to {folder}: {error.strerror}") from None

    def create(self, config: Mapping[str, Any], **facts: Any) -> None:
        """Start a new run in a free folder."""
        if self.writes:
            self.check_free()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write_config(config, **facts)

    def write_config(self, config: Mapping[str, Any], **facts: Any) -> None:
        """Write config.json. `facts`: `sha256` of the data and `params`; `torch`, its version."""
        if self.writes:
            versions = {"trimtab": metadata.version("trimtab"), "torch": facts.pop("torch", "")}
            versions |= {"python": platform.python_version(), "machine": platform.machine()}
            replace_json(self.paths.config, {"format": FORMAT, "config": config, **facts, "versions": versions})

    def step(self, record: StepRecord) -> None:
        self._append(self.paths.log, record.to_json())

    def signals(self, record: Mapping[str, Any]) -> None:
        """Write a watcher's record, with five digits: a model has hundreds of these numbers per step."""
        self._append(self.paths.signals, _rounded(record))

    def event(self, kind: EventKind, /, **values: Any) -> None:
        self._append(self.paths.events, {"event": kind.value, "time": round(time.time(), 3), **values})

    @property
    def pending_error(self) -> str | None:
        """Why lines have not been written yet, if some are pending."""
        return next((lines.error for lines in self._files.values() if lines.error), None)

    def finish(self, result: Result) -> None:
        if self.writes:
            replace_json(self.paths.result, result.to_json())

    def truncate(self, step: int) -> None:
        """Remove the steps after this one, and the result: they will be trained again."""
        if not self.writes:
            return
        self.close()
        self.paths.result.unlink(missing_ok=True)
        for path in (self.paths.log, self.paths.signals):
            if not path.exists():
                continue
            kept = 0
            with path.open("r+b") as file:
                for line in file:
                    if not line.endswith(b"\n") or require_line(line, path)["step"] > step:
                        break
                    kept += len(line)
                file.truncate(kept)  # in place: needs no space on a full disk

    def close(self) -> None:
        for lines in self._files.values():
            lines.close()
        self._files = {}

    def _append(self, path: Path, values: Mapping[str, Any]) -> None:
        if self.writes:
            if path not in self._files:
                self._files[path] = _Lines(path)
            self._files[path].append(values)


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append one line to a JSON-lines file that is written rarely."""
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def _rounded(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {key: _rounded(value) for key, value in x.items()}
    return float(f"{x:.5g}") if isinstance(x, float) else x


class _Lines:
    """A JSON-lines file that grows by whole lines."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a+b", buffering=0)
        self.pending, self.error = b"", ""
        self.file.seek(0)
        self.end = self.file.read().rfind(b"\n") + 1
        self.file.truncate(self.end)

    def append(self, values: Mapping[str, Any]) -> None:
        # NaN is not JSON; readers expect null where there is no number.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self.pending += json.dumps(clean).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        rest = memoryview(self.pending)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            self.error = error.strerror or str(error)
            with contextlib.suppress(OSError):
                self.file.truncate(self.end)
            return
        self.end += len(self.pending)
        self.pending, self.error = b"", ""

    def close(self) -> None:
        self._write()
        self.file.close()
