"""A run on disk: what it was told, what happened at every step, and what came out.

    config.json     the full config, versions, the corpus' sha256
    log.jsonl       one object per step
    signals.jsonl   what the watcher saw, every few steps
    events.jsonl    alarms, skips, evaluations, checkpoints, resumes, the end
    checkpoints/    checkpoint.py
    result.json     written last: its presence means the run is complete

Lines are appended one by one, so a killed run keeps all but perhaps half of its last line, which the next to write cuts
off. Lines that a full disk does not take wait for the next one. A resume cuts the log back to the step it goes on from;
events stay, they are the history.
"""

import contextlib
import errno
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trimtab.train.config import RunConfig, from_json, to_json
from trimtab.runs.files import replace_json


class RunError(RuntimeError):
    """A run folder that cannot be used as asked."""


class RunLog:
    """The files of one run. Only the first process writes; the others have one that does nothing."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self._files: dict[str, _Lines] = {}

    def check_free(self) -> None:
        """Refuse a folder that cannot hold a new run, before any work is done for it."""
        folder = self.folder
        try:
            if (folder / "config.json").exists():
                raise RunError(f"{folder} holds a run already; `trimtab resume {folder}`, or take another --out")
            if folder.exists() and any(folder.iterdir()):
                raise RunError(f"{folder} is not empty and holds no run; take another --out")
            nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not nearest.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
            if not os.access(nearest, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"no permission to write in {nearest}")
        except OSError as error:
            raise RunError(f"cannot write to {folder}: {error.strerror}") from None

    def create(self, config: RunConfig, **facts: Any) -> None:
        """Start a new run in a folder that is free."""
        if not self.writes:
            return
        there = self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.write_config(config, **facts)
        except OSError:
            if not there:
                self.folder.rmdir()
            raise

    def write_config(self, config: RunConfig, **facts: Any) -> None:
        if self.writes:
            replace_json(self.folder / "config.json", {"config": to_json(config), **facts, "versions": versions()})

    def read_config(self) -> tuple[RunConfig, dict[str, Any]]:
        """The config of a run, and the facts that were saved with it."""
        path = self.folder / "config.json"
        try:
            data = json.loads(path.read_text())
            return from_json(data.pop("config")), data
        except FileNotFoundError:
            raise RunError(f"{self.folder} holds no run (there is no config.json)") from None
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is not a config of ours: {error}") from None

    def step(self, **values: Any) -> None:
        self._append("log.jsonl", values)

    def signals(self, record: Mapping[str, Any]) -> None:
        self._append("signals.jsonl", _short(record))

    def event(self, event: str, /, **values: Any) -> None:
        self._append("events.jsonl", {"event": event, "time": round(time.time(), 3), **values})

    @property
    def trouble(self) -> str | None:
        """Why lines are waiting to be written, if some are."""
        return next((lines.trouble for lines in self._files.values() if lines.trouble), None)

    def finish(self, **result: Any) -> None:
        if self.writes:
            replace_json(self.folder / "result.json", result)

    def cut_back(self, step: int) -> None:
        """Forget the steps after this one: they will be taken again."""
        if not self.writes:
            return
        self.close()
        (self.folder / "result.json").unlink(missing_ok=True)
        for path in (self.folder / "log.jsonl", self.folder / "signals.jsonl"):
            if path.exists():
                _cut_back(path, step)

    def close(self) -> None:
        for lines in self._files.values():
            lines.close()
        self._files = {}

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        if self.writes:
            if name not in self._files:
                self._files[name] = _Lines(self.folder / name)
            self._files[name].append(values)


def _cut_back(path: Path, step: int) -> None:
    kept = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or _parse(line, path)["step"] > step:
                break
            kept += len(line)
        file.truncate(kept)  # in place: it needs no room on a full disk


def _short(x: Any) -> Any:
    """Five digits of every number: nobody reads more of a signal, and a model has hundreds of them."""
    if isinstance(x, Mapping):
        return {key: _short(value) for key, value in x.items()}
    return float(f"{x:.5g}") if isinstance(x, float) else x


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; a last line that a killed process left unfinished is not one."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield _parse(line, path)


def _parse(line: str | bytes, path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(line)
    except ValueError:
        raise RunError(f"{path} has a line that is not JSON: {line[:80]!r}") from None
    return result


def versions() -> dict[str, str]:
    return {
        "trimtab": metadata.version("trimtab"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


class _Lines:
    """A .jsonl file that only grows, by whole lines."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a+b", buffering=0)
        self.waiting, self.trouble = b"", ""
        self.file.seek(0)
        self.end = self.file.read().rfind(b"\n") + 1
        self.file.truncate(self.end)

    def append(self, values: Mapping[str, Any]) -> None:
        # A NaN is not JSON; null is what readers expect where there is no number.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self.waiting += json.dumps(clean).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        rest = memoryview(self.waiting)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            self.trouble = error.strerror or str(error)
            with contextlib.suppress(OSError):
                self.file.truncate(self.end)
            return
        self.end += len(self.waiting)
        self.waiting, self.trouble = b"", ""

    def close(self) -> None:
        self._write()
        self.file.close()
