"""Checkpoints: complete or absent, verified before they are loaded, never unpickled.

    checkpoints/step-00001000/  model.safetensors  optimizer.safetensors  state.json  manifest.json
    checkpoints/step-00001000/  shards/*.safetensors                      state.json  manifest.json     (FSDP2)

A checkpoint is written under a temporary name that starts with a dot, synced, and renamed. The manifest has the step,
the validation loss, the sha256 of every file, and records of the run's log at that step.

Without FSDP2 the optimizer's packed state is kept, for an exact resume. Shards are written by
torch.distributed.checkpoint and hold portable state, which any number of processes can load.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from trimtab.runs import RunError
from trimtab.runs.files import (
    read_json,
    remove_temporary,
    replace_json,
    require_json,
    seal,
    sha256_of,
    sync_folder,
    write_json,
)
from trimtab.runs.records import FileRecord, as_mapping, number, whole
from trimtab.train.processes import Processes
from trimtab.train.tensors import (
    CheckpointError,
    load_model,
    optimizer_state,
    optimizer_tensors,
    plain_state,
    read_shards,
    write_shards,
    write_tensors,
)

FORMAT = 1
MANIFEST = "manifest.json"
BEST = -1  # in place of a step: the checkpoint with the lowest validation loss
_TENSORS = ("model.safetensors", "optimizer.safetensors")
_NAME = re.compile(r"step-(\d{8})")


class Checkpoints:
    """The folder `checkpoints` of a run."""

    def __init__(self, folder: Path, keep: int, processes: Processes) -> None:
        self.folder, self.keep, self.processes = folder, keep, processes

    def list_steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order. One whose manifest is damaged or of another step, as in a
        renamed folder, does not count."""
        return [step for step in self._list_names() if self._read_manifest(step) is not None]

    def _list_names(self) -> list[int]:
        found = [_NAME.fullmatch(path.name) for path in self.folder.glob("step-*")] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in found if match)

    def _read_manifest(self, step: int) -> dict[str, Any] | None:
        try:
            return self._require_manifest(step)
        except CheckpointError:
            return None

    def _require_manifest(self, step: int) -> dict[str, Any]:
        path = self.path(step) / MANIFEST
        try:
            manifest = require_json(path)
        except RunError as error:
            raise CheckpointError(str(error)) from None
        files = manifest.get("files")
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT}")
        if not isinstance(files, dict) or not all(map(_is_entry, files, files.values())):
            raise CheckpointError(f"{path} is damaged: it lists no files")
        if manifest.get("step") != step:
            raise CheckpointError(f"{path} is of step {manifest.get('step')!r}: the folder was renamed")
        return manifest

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def choose(self, step: int | None) -> int:
        """The last checkpoint, that of `step`, or the best one. Raises RunError if there is none."""
        names = self._list_names()
        if not names:
            raise RunError(f"{self.folder} has no complete checkpoint; `trimtab resume` trains the run from its start")
        chosen = names[-1] if step is None else self.best if step == BEST else step
        if chosen is None:
            raise RunError(f"{self.folder} has no best checkpoint: none was evaluated; there are {_join(names)}")
        if chosen not in names:
            raise RunError(f"there is no checkpoint of step {chosen}; there are {_join(names)}")
        return chosen

    @property
    def empty(self) -> bool:
        """Whether there is no checkpoint, complete or damaged."""
        return not self._list_names()

    @property
    def best(self) -> int | None:
        """The step with the lowest validation loss."""
        manifests = {step: self._require_manifest(step) for step in self.list_steps()}
        losses = {step: number(manifest.get("validation_loss")) for step, manifest in manifests.items()}
        # Earlier versions kept the loss in a file of its own.
        mark = read_json(self.folder / "best.json") or {}
        if mark.get("step") in losses and "validation_loss" not in manifests[mark["step"]]:
            losses[mark["step"]] = number(mark.get("validation_loss"))
        finite = [step for step, loss in losses.items() if math.isfinite(loss)]
        return min(finite, key=lambda step: losses[step], default=None)

    # --- Writing

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        *,
        validation_loss: float = math.nan,
        log: Mapping[str, FileRecord] | None = None,
    ) -> Path:
        """Write a checkpoint; all processes call this. If one of them cannot write, all raise OSError. `log` are the
        records of the run's log."""
        temporary, sharded = self.folder / f".tmp-step-{step:08d}", self.processes.sharded
        moments = optimizer.state_dict()  # portable if the parameters are sharded
        tensors = {"model": plain_state(model), "optimizer": optimizer_tensors(moments)}

        def prepare() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        def complete() -> None:
            if sharded:
                files = {f"shards/{path.name}": _sync(path) for path in sorted((temporary / "shards").iterdir())}
            else:
                paths = {part: temporary / f"{part}.safetensors" for part in tensors}
                files = {path.name: write_tensors(path, tensors[part]) for part, path in paths.items()}
            everything = {**state, "param_groups": moments["param_groups"]}
            files["state.json"] = write_json(temporary / "state.json", everything)
            manifest = {"format": FORMAT, "sharded": sharded, "step": step, "files": files}
            manifest |= {"validation_loss": _finite(validation_loss)}
            manifest |= {"log": {name: asdict(entry) for name, entry in (log or {}).items()}}
            write_json(temporary / MANIFEST, seal(manifest))
            sync_folder(temporary)
            if self.path(step).exists():
                self._remove(step)
            temporary.rename(self.path(step))
            sync_folder(self.folder)
            best = self.best
            for old in self.list_steps()[: -self.keep]:
                if old != best:
                    self._remove(old)

        try:
            self.processes.run_on_first(prepare)
            if sharded:
                write_shards(temporary / "shards", tensors)
            self.processes.run_on_first(complete)
        except OSError:
            if self.processes.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return self.path(step)

    def set_loss(self, step: int, validation_loss: float) -> None:
        """Add the validation loss to a checkpoint that was written before the evaluation."""
        manifest = self._read_manifest(step) if self.processes.rank == 0 else None
        if manifest is not None and manifest.get("validation_loss") != _finite(validation_loss):
            manifest["validation_loss"] = _finite(validation_loss)
            replace_json(self.path(step) / MANIFEST, manifest)

    def remove_after(self, step: int) -> None:
        """Remove later checkpoints, whose steps will be trained again, and incomplete ones of a killed process."""
        if self.processes.rank == 0:
            for later in self._list_names():
                if later > step:
                    self._remove(later)
            self.remove_incomplete()
        self.processes.barrier()

    def remove_incomplete(self) -> None:
        """Remove what a killed process has left. The run must be locked."""
        for incomplete in [*self.folder.glob(".tmp-step-*"), *self.folder.glob(".old-step-*")]:
            shutil.rmtree(incomplete, ignore_errors=True)
        for step in self._list_names():
            remove_temporary(self.path(step))

    def _remove(self, step: int) -> None:
        # Renamed first: a partly deleted folder must not look complete.
        removed = self.folder / f".old-step-{step:08d}"
        shutil.rmtree(removed, ignore_errors=True)
        self.path(step).rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    # --- Reading

    def verify(self, step: int) -> dict[str, Any]:
        """Check the size and sha256 of every file; returns the manifest. Raises CheckpointError, with the step of a
        checkpoint that is intact."""
        try:
            return self._verify(step)
        except CheckpointError as error:
            instead = next((other for other in reversed(self._list_names()) if other != step and self._is_ok(other)), 0)
            other = f"step {instead} can be used instead" if instead else "there is no other checkpoint that is intact"
            raise CheckpointError(f"{error}; {other}") from None

    def _verify(self, step: int) -> dict[str, Any]:
        manifest = self._require_manifest(step)
        needed = {"state.json"} if manifest.get("sharded") else {"state.json", *_TENSORS}
        shards = self.path(step) / "shards"
        needed |= {f"shards/{path.name}" for path in shards.iterdir()} if shards.is_dir() else set()
        if unknown := needed - manifest["files"].keys():  # a file that is not listed would be loaded unverified
            raise CheckpointError(f"{self.path(step) / MANIFEST} is damaged: it does not list {min(unknown)}")
        for name, entry in manifest["files"].items():
            file = self.path(step) / name
            if not file.is_file() or file.is_symlink():
                raise CheckpointError(f"{file} is missing")
            if file.stat().st_size != entry["bytes"]:
                raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {entry['bytes']} were written")
            try:
                intact = sha256_of(file) == entry["sha256"]
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
            if not intact:
                raise CheckpointError(f"{file} is damaged: its sha256 is not the one that was written")
        return manifest

    def _is_ok(self, step: int) -> bool:
        try:
            return bool(self._verify(step))
        except CheckpointError:
            return False

    def log_records(self, step: int) -> dict[str, FileRecord]:
        """What the run's log was at the checkpoint; empty for those of earlier versions."""
        log = self._require_manifest(step).get("log")
        return {name: FileRecord.from_json(entry) for name, entry in as_mapping(log).items()}

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Fill model and optimizer; returns the state that was saved with them."""
        manifest, path = self.verify(step), self.path(step)
        try:
            state: dict[str, Any] = json.loads((path / "state.json").read_text())
            groups = state["param_groups"]
            if manifest["sharded"]:
                weights, moments = read_shards(path / "shards", model, optimizer)
            else:
                weights = load_file(path / _TENSORS[0])
                moments = load_file(path / _TENSORS[1]) if optimizer is not None else {}
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path} is intact, but it is not a checkpoint: {error}") from None
        load_model(model, weights)
        if optimizer is not None:
            optimizer.load_state_dict(optimizer_state(moments, groups))
        return state


def _is_entry(name: str, entry: Any) -> bool:
    """Whether this is an entry of a manifest, and the file is in the folder of the checkpoint."""
    inside = bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts
    values = as_mapping(entry)
    return inside and isinstance(values.get("sha256"), str) and whole(values.get("bytes")) is not None


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _join(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _sync(path: Path) -> dict[str, Any]:
    """Sync a file that torch wrote; returns its entry in a manifest."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}
