"""Checkpoints: complete or absent, verified before they are loaded, never unpickled.

    checkpoints/step-00001000/  model.safetensors  optimizer.safetensors  state.json  manifest.json
    checkpoints/step-00001000/  shards/*.safetensors                      state.json  manifest.json     (FSDP2)

A checkpoint is written under a temporary name that starts with a dot, synced, and renamed. The manifest has the sha256
of every file. Without FSDP2 the optimizer's packed state is kept, for an exact resume. Shards are written by
torch.distributed.checkpoint and hold portable state, which any number of processes can load.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from trimtab.runs import RunError
from trimtab.runs.files import read_json, replace_json, sha256_of, sync_folder, write_json
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
BEST = -1  # in place of a step: the checkpoint with the lowest validation loss
_NAME = re.compile(r"step-(\d{8})")


class Checkpoints:
    """The folder `checkpoints` of a run."""

    def __init__(self, folder: Path, keep: int, processes: Processes) -> None:
        self.folder, self.keep, self.processes = folder, keep, processes

    def list_steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        found = [_NAME.fullmatch(path.name) for path in self.folder.glob("step-*")] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def choose(self, step: int | None) -> int:
        """The last checkpoint, that of `step`, or the best one. Raises RunError if there is none."""
        steps = self.list_steps()
        known = ", ".join(map(str, steps))
        if not steps:
            raise RunError(f"{self.folder} has no complete checkpoint; train the run again from its start")
        chosen = steps[-1] if step is None else self.best if step == BEST else step
        if chosen is None:
            raise RunError(f"{self.folder} has no best checkpoint: none was evaluated; there are {known}")
        if chosen not in steps:
            raise RunError(f"there is no checkpoint of step {chosen}; there are {known}")
        return chosen

    @property
    def best(self) -> int | None:
        """The step with the lowest validation loss."""
        return self._read_best()[0]

    def _read_best(self) -> tuple[int | None, float]:
        mark = read_json(self.folder / "best.json") or {}
        try:
            step, loss = int(mark["step"]), float(mark["validation_loss"])
        except (ValueError, KeyError, TypeError):  # an unreadable mark is no mark
            return None, math.inf
        return (step, loss) if step in self.list_steps() else (None, math.inf)

    # --- Writing

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        *,
        validation_loss: float = math.nan,
    ) -> Path:
        """Write a checkpoint; all processes call this. If one of them cannot write, all raise OSError."""
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
            write_json(temporary / "manifest.json", manifest)
            sync_folder(temporary)
            if self.path(step).exists():
                self._remove(step)
            temporary.rename(self.path(step))
            sync_folder(self.folder)
            self.mark_best(step, validation_loss)
            for old in self.list_steps()[: -self.keep]:
                if old != self.best:
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

    def mark_best(self, step: int, validation_loss: float) -> None:
        """Keep this checkpoint until another one has a lower validation loss."""
        exists = self.processes.rank == 0 and self.path(step).exists()
        if exists and validation_loss < self._read_best()[1]:
            replace_json(self.folder / "best.json", {"step": step, "validation_loss": validation_loss})

    def remove_after(self, step: int) -> None:
        """Remove later checkpoints, whose steps will be trained again, and incomplete ones of a killed process."""
        if self.processes.rank == 0:
            for later in self.list_steps():
                if later > step:
                    self._remove(later)
            for incomplete in self.folder.glob(".*-step-*"):
                shutil.rmtree(incomplete, ignore_errors=True)
        self.processes.barrier()

    def _remove(self, step: int) -> None:
        # Renamed first: a partly deleted folder must not look complete.
        removed = self.folder / f".old-step-{step:08d}"
        shutil.rmtree(removed, ignore_errors=True)
        self.path(step).rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    # --- Reading

    def verify(self, step: int) -> dict[str, Any]:
        """Check the size and sha256 of every file; returns the manifest."""
        path = self.path(step)
        others = [s for s in self.list_steps() if s != step]
        instead = f"; step {others[-1]} can be used instead" if others else "; there is no other checkpoint"
        try:
            manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
            files = manifest["files"].items()
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} has no readable manifest ({error}){instead}") from None
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {manifest.get('format')}, this version reads {FORMAT}{instead}")
        for name, entry in files:
            file = path / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing{instead}")
            if file.stat().st_size != entry["bytes"]:
                raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {entry['bytes']} were written{instead}")
            if sha256_of(file) != entry["sha256"]:
                raise CheckpointError(f"{file} is damaged: its sha256 is not the one that was written{instead}")
        return manifest

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Fill model and optimizer; returns the state that was saved with them."""
        manifest, path = self.verify(step), self.path(step)
        try:
            state: dict[str, Any] = json.loads((path / "state.json").read_text())
            groups = state["param_groups"]
            if manifest["sharded"]:
                weights, moments = read_shards(path / "shards", model, optimizer)
            else:
                weights = load_file(path / "model.safetensors")
                moments = load_file(path / "optimizer.safetensors") if optimizer is not None else {}
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path} is intact, but it is not a checkpoint: {error}") from None
        load_model(model, weights)
        if optimizer is not None:
            optimizer.load_state_dict(optimizer_state(moments, groups))
        return state


def _sync(path: Path) -> dict[str, Any]:
    """Sync a file that torch wrote; returns its entry in a manifest."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}
