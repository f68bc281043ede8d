"""The writer of a run folder.

Lines are appended one by one, so a killed run loses at most the end of its last line, which the next writer removes.
Lines that a full disk refuses are written with the next one. A resume truncates the log to the step it continues from;
events are kept, they are the history.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from trimtab.runs.files import RunError, replace_json
from trimtab.runs.folder import CONFIG, FORMAT, RunFolder, require_line
from trimtab.runs.records import EventKind, FileRecord, Result, StepRecord, whole


class RunLog:
    """Writes the files of one run; with `writes=False`, as on all processes but the first, it writes nothing."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.paths = RunFolder(folder)
        self._files: dict[Path, _Lines] = {}

    def move(self, folder: Path) -> None:
        """Write to another folder; nothing has been written yet."""
        self.folder, self.paths = folder, RunFolder(folder)

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

    def check_files(self) -> None:
        """Raise RunError if a file that a resume changes is a link, which may lead out of the folder, or no file."""
        for path in (self.paths.config, self.paths.result, *self._growing):
            if path.is_symlink() or (path.exists() and not path.is_file()):
                kind = "a symbolic link" if path.is_symlink() else "not a file"
                raise RunError(f"{path} is {kind}, so the run cannot be continued here; restore it from a copy")
        folders = [self.paths.checkpoints, self.paths.tensorboard]
        if self.paths.checkpoints.is_dir() and not self.paths.checkpoints.is_symlink():
            folders += self.paths.checkpoints.iterdir()
        for path in folders:
            if path.is_symlink():
                raise RunError(f"{path} is a symbolic link; link the whole folder of the run instead")

    def create(self, config: Mapping[str, Any], **facts: Any) -> None:
        """Start a new run in a free folder."""
        if self.writes:
            self.check_free()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write_config(config, **facts)

    def write_config(self, config: Mapping[str, Any], **facts: Any) -> None:
        """Write config.json. `facts`: fields of `SavedConfig`, and `torch`, its version."""
        if self.writes:
            versions = {"trimtab": metadata.version("trimtab"), "torch": facts.pop("torch", "")}
            versions |= {"python": platform.python_version(), "machine": platform.machine()}
            known = {name: value for name, value in facts.items() if value is not None}
            replace_json(self.paths.config, {"format": FORMAT, "config": config, **known, "versions": versions})

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

    def records(self) -> dict[str, FileRecord]:
        """What has been written so far, by the name of the file."""
        known = [path for path in self._growing if path in self._files or path.exists()] if self.writes else []
        return {path.name: self._open(path).record for path in known}

    def finish(self, result: Result) -> None:
        """Write the result, with a record of every file: the run is complete."""
        if self.writes:
            text = self.paths.config.read_bytes()
            config = FileRecord(text.count(b"\n"), len(text), hashlib.sha256(text).hexdigest())
            files = {CONFIG: config, **self.records()}
            self.close()
            replace_json(self.paths.result, replace(result, files=files).to_json())

    def truncate(self, step: int) -> None:
        """Remove the steps after this one, and the result: they will be trained again."""
        if not self.writes:
            return
        self.close()
        self._files = {}
        self.paths.result.unlink(missing_ok=True)
        for path in (self.paths.log, self.paths.signals):
            if not path.exists():
                continue
            kept = 0
            with open(path, "r+b", opener=_no_link) as file:
                for line in file:
                    if not line.endswith(b"\n") or (whole(require_line(line, path).get("step")) or 0) > step:
                        break
                    kept += len(line)
                file.truncate(kept)  # in place: needs no space on a full disk

    def close(self) -> None:
        """Write pending lines; `pending_error` stays if a full disk refuses them."""
        for lines in self._files.values():
            lines.close()
        self._files = {path: lines for path, lines in self._files.items() if lines.error}

    @property
    def _growing(self) -> tuple[Path, Path, Path]:
        return self.paths.log, self.paths.signals, self.paths.events

    def _append(self, path: Path, values: Mapping[str, Any]) -> None:
        if self.writes:
            self._open(path).append(values)

    def _open(self, path: Path) -> "_Lines":
        if path not in self._files:
            self._files[path] = _Lines(path)
        return self._files[path]


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append one line to a JSON-lines file that is written rarely."""
    with open(path, "a", opener=_no_link) as file:
        file.write(json.dumps(values) + "\n")


def _rounded(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {key: _rounded(value) for key, value in x.items()}
    return float(f"{x:.5g}") if isinstance(x, float) else x


def _finite(x: Any) -> Any:
    """NaN is not JSON; readers expect null where there is no number."""
    if isinstance(x, Mapping):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _no_link(path: str, flags: int) -> int:
    """Open a file that is not a link: a link could lead to a file that is not of this run."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


class _Lines:
    """A JSON-lines file that grows by whole lines."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a+b", buffering=0, opener=_no_link)  # noqa: SIM115
        self.pending, self.error, self.sha, self.lines, self.end = b"", "", hashlib.sha256(), 0, 0
        with path.open("rb") as before:
            for line in before:
                if line.endswith(b"\n"):
                    self._count(line)
        self.file.truncate(self.end)

    @property
    def record(self) -> FileRecord:
        return FileRecord(self.lines, self.end, self.sha.hexdigest())

    def append(self, values: Mapping[str, Any]) -> None:
        self.pending += json.dumps(_finite(values), allow_nan=False).encode() + b"\n"
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
        self._count(self.pending)
        self.pending, self.error = b"", ""

    def _count(self, text: bytes) -> None:
        self.sha.update(text)
        self.lines, self.end = self.lines + text.count(b"\n"), self.end + len(text)

    def close(self) -> None:
        if not self.file.closed:
            self._write()
            self.file.close()
