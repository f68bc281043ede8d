"""A run on disk: what it was told, what happened at every step, and what came out.

    config.json     the full config, versions, the corpus' sha256
    log.jsonl       one object per step
    events.jsonl    skips, evaluations, checkpoints, resumes, the end
    checkpoints/    checkpoint.py
    result.json     written last: its presence means the run is complete

Lines are appended and flushed one by one, so a killed run keeps all but perhaps half of its last line; a resume cuts
the log back to the step it goes on from.
"""

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

from trimtab.train.config import RunConfig, from_json, to_json
from trimtab.train.files import replace_json


class RunError(RuntimeError):
    """A run folder that cannot be used as asked."""


class RunLog:
    """The files of one run. Only the first process writes; the others have one that does nothing."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self._log: IO[str] | None = None
        self._events: IO[str] | None = None

    def create(self, config: RunConfig, **facts: Any) -> None:
        """Start a new run; refuses a folder that holds another one."""
        if not self.writes:
            return
        if (self.folder / "config.json").exists():
            raise RunError(f"{self.folder} holds a run already; `trimtab resume {self.folder}`, or take another --out")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise RunError(f"{self.folder} is not empty and holds no run; take another --out")
            replace_json(self.folder / "config.json", {"config": to_json(config), "versions": versions(), **facts})
        except OSError as error:
            raise RunError(f"cannot write to {self.folder}: {error.strerror}") from None

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
        if self.writes:
            self._log = self._log or (self.folder / "log.jsonl").open("a")
            _append(self._log, values)

    def event(self, kind: str, **values: Any) -> None:
        if self.writes:
            self._events = self._events or (self.folder / "events.jsonl").open("a")
            _append(self._events, {"event": kind, "time": round(time.time(), 3), **values})

    def finish(self, **result: Any) -> None:
        if self.writes:
            replace_json(self.folder / "result.json", result)

    def cut_back(self, step: int) -> None:
        """Forget the steps after this one: they will be taken again."""
        path = self.folder / "log.jsonl"
        if not self.writes or not path.exists():
            return
        kept = [line for line in read_lines(path) if line["step"] <= step]
        temporary = path.with_name(".log.jsonl.tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        (self.folder / "result.json").unlink(missing_ok=True)

    def close(self) -> None:
        for file in (self._log, self._events):
            if file is not None:
                file.close()
        self._log = self._events = None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; a last line that a killed process left unfinished is not one."""
    with path.open() as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    raise RunError(f"{path} has a line that is not JSON: {line[:80]!r}") from None


def versions() -> dict[str, str]:
    return {
        "trimtab": metadata.version("trimtab"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _append(file: IO[str], values: Mapping[str, Any]) -> None:
    # A NaN is not JSON; null is what readers expect where there is no number.
    clean = {
        key: None if (isinstance(v, float) and v != v) or v in (float("inf"), -float("inf")) else v
        for key, v in values.items()
    }
    file.write(json.dumps(clean) + "\n")
    file.flush()
