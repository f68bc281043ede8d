"""Checkpoints: complete or not there, checked before they are believed, never unpickled.

    checkpoints/step-00001000/  model.safetensors  optimizer.safetensors  state.json  manifest.json
    checkpoints/step-00001000/  shards/*.safetensors                      state.json  manifest.json     (FSDP2)

One is written under a temporary name, synced, and renamed: a name without a dot means complete. The manifest has the
sha256 of every file. Whole ones keep the optimizer's packed state, for an exact resume; shards are those of
torch.distributed.checkpoint in its safetensors form and hold portable state, which any number of processes can load.
"""

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trimtab.runs.files import replace_json, sha256_of, sync_folder, write_json
from trimtab.train.processes import Processes
from trimtab.train.tensors import read_tensors, write_tensors

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: what is wrong with it, and what can be used instead."""


class Checkpoints:
    """The folder `checkpoints` of a run."""

    def __init__(self, folder: Path, keep: int, processes: Processes) -> None:
        self.folder, self.keep, self.processes = folder, keep, processes

    def list_steps(self) -> list[int]:
        """Complete ones, oldest first."""
        found = [_NAME.fullmatch(path.name) for path in self.folder.glob("step-*")] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    @property
    def best(self) -> int | None:
        """The one with the lowest validation loss."""
        return self._read_best()[0]

    def _read_best(self) -> tuple[int | None, float]:
        try:
            mark = json.loads((self.folder / "best.json").read_text())
            step, loss = int(mark["step"]), float(mark["validation_loss"])
        except (OSError, ValueError, KeyError, TypeError):  # a mark that cannot be read marks nothing
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
        """Write one; with a validation loss it may be the best so far. All processes call this.

        Where the disk fails one of them, all raise OSError, and what was there before is still there.
        """
        first, together = self.processes.rank == 0, self.processes.together
        temporary, final = self.folder / f".tmp-step-{step:08d}", self.path(step)
        try:
            together(lambda: _empty(temporary) if first else None)
            if self.processes.sharded:
                files = self._write_shards(temporary / "shards", model, optimizer)
            else:
                files = together(lambda: _write_whole(temporary, model, optimizer) if first else {})
            everything = {**state, "param_groups": optimizer_groups(optimizer)}
            together(lambda: self._complete(step, files, everything, validation_loss) if first else None)
        except OSError:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _complete(self, step: int, files: dict[str, Any], state: dict[str, Any], validation_loss: float) -> None:
        temporary = self.folder / f".tmp-step-{step:08d}"
        files["state.json"] = write_json(temporary / "state.json", state)
        manifest = {"format": FORMAT, "sharded": self.processes.sharded, "step": step, "files": files}
        write_json(temporary / "manifest.json", manifest)
        sync_folder(temporary)
        if self.path(step).exists():
            self._remove(step)
        temporary.rename(self.path(step))
        sync_folder(self.folder)
        self.mark_best(step, validation_loss)
        self._prune()

    def mark_best(self, step: int, validation_loss: float) -> None:
        """Keep this one for as long as no other has a lower validation loss."""
        here = self.processes.rank == 0 and self.path(step).exists()
        if here and validation_loss < self._read_best()[1]:
            replace_json(self.folder / "best.json", {"step": step, "validation_loss": validation_loss})

    def forget_after(self, step: int) -> None:
        """Remove later ones, whose steps will be taken again, and what a killed process left half done."""
        if self.processes.rank == 0:
            for later in self.list_steps():
                if later > step:
                    self._remove(later)
            for litter in self.folder.glob(".*-step-*"):
                shutil.rmtree(litter, ignore_errors=True)
        self.processes.barrier()

    def _write_shards(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        tensors = {f"model.{name}": x for name, x in plain_state(model).items()}
        portable = optimizer.state_dict()  # portable by itself where parameters are sharded
        tensors |= {f"optimizer.{name}": x for name, x in optimizer_tensors(portable).items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
        except CheckpointException as error:
            # It is no Exception, and every process has it: what one of them met, all of them are told.
            causes = [cause for cause, _ in error.failures.values()]
            disk = next((cause for cause in causes if isinstance(cause, OSError)), None)
            raise (disk or RuntimeError(f"the checkpoint was not written: {causes[0]}")) from None
        return self.processes.together(lambda: _list_files(folder) if self.processes.rank == 0 else {})

    def _prune(self) -> None:
        best = self.best
        for step in self.list_steps()[: -self.keep]:
            if step != best:
                self._remove(step)

    def _remove(self, step: int) -> None:
        # Renamed first: half a deletion must not look complete.
        doomed = self.folder / f".old-step-{step:08d}"
        shutil.rmtree(doomed, ignore_errors=True)
        self.path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    # --- Reading

    def verify(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint all of whose files are what was written."""
        path = self.path(step)
        others = [s for s in self.list_steps() if s != step]
        instead = f"; step {others[-1]} can be used instead" if others else "; there is no other checkpoint"
        try:
            manifest = json.loads((path / "manifest.json").read_text())
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
            tensors = self._read(path, manifest["sharded"], model, optimizer)
            groups = state["param_groups"]
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path} holds what was written, and that is no checkpoint: {error}") from None
        load_model(model, _under("model.", tensors))
        if optimizer is not None:
            optimizer.load_state_dict(optimizer_state(_under("optimizer.", tensors), groups))
        return state

    def _read(
        self, path: Path, sharded: bool, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> dict[str, Tensor]:
        if sharded:
            return read_shards(path / "shards", model, optimizer)
        tensors = {f"model.{name}": x for name, x in read_tensors(path / "model.safetensors").items()}
        if optimizer is not None:
            read = read_tensors(path / "optimizer.safetensors").items()
            tensors |= {f"optimizer.{name}": x for name, x in read}
        return tensors


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_whole(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parts = {"model": plain_state(model), "optimizer": optimizer_tensors(optimizer.state_dict())}
    return {f"{name}.safetensors": write_tensors(folder / f"{name}.safetensors", x) for name, x in parts.items()}


def _list_files(folder: Path) -> dict[str, Any]:
    """The entries in a manifest of shards that others wrote."""
    files = sorted(folder.iterdir())
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {f"shards/{path.name}": {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in files}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


# --- Models


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict under the names of the bare model, whatever wraps it."""
    prefixes = ("module.", "_orig_mod.")
    state = {}
    for name, x in model.state_dict().items():
        while name.startswith(prefixes):
            name = name.split(".", 1)[1]
        state[name.replace("._orig_mod.", ".")] = x
    return state


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    mine = plain_state(model)
    missing, extra = mine.keys() - tensors.keys(), tensors.keys() - mine.keys()
    if missing or extra:
        what = f"lacks {sorted(missing)[0]}" if missing else f"has {sorted(extra)[0]}, which the model has not"
        raise CheckpointError(f"the checkpoint {what}; was it saved by another model?")
    for name, x in mine.items():
        saved = tensors[name]
        if saved.shape != x.shape:
            raise CheckpointError(f"{name} has shape {tuple(saved.shape)} in the checkpoint, {tuple(x.shape)} here")
        with torch.no_grad():
            x.copy_(_like(saved, x))


def _like(saved: Tensor, x: Tensor) -> Tensor:
    """A whole tensor as the shards of another."""
    if not hasattr(x, "device_mesh") or hasattr(saved, "device_mesh"):
        return saved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved.to(x.device), x.device_mesh, x.placements, src_data_rank=None)  # type: ignore[attr-defined]


# --- Optimizers: tensors and numbers apart, so that neither needs a pickle


def optimizer_tensors(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{place}.{key}": x for place, entry in state_dict["state"].items() for key, x in entry.items()}


def optimizer_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.state_dict()["param_groups"]
    return [{key: list(v) if isinstance(v, tuple) else v for key, v in group.items()} for group in groups]


def optimizer_state(tensors: Mapping[str, Tensor], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        place, key = name.split(".", 1)
        state.setdefault(int(place), {})[key] = x
    keep_lists = ("params", "param_names", "moments")
    return {
        "state": state,
        "param_groups": [
            {key: tuple(v) if isinstance(v, list) and key not in keep_lists else v for key, v in group.items()}
            for group in groups
        ],
    }


# --- Shards


def read_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every tensor cut as this process needs it."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    mine = plain_state(model)
    params = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    targets: dict[str, Tensor] = {}
    for name, entry in saved.items():
        size = entry.size  # type: ignore[union-attr]
        if name.startswith("model."):
            like = mine.get(name.removeprefix("model."))
        elif optimizer is not None:
            like = params[int(name.split(".")[1])]
        else:
            continue
        if like is not None and like.shape == size:
            dtype = like.dtype if name.startswith("model.") else entry.properties.dtype  # type: ignore[union-attr]
            targets[name] = torch.zeros_like(like, dtype=dtype).detach()
        else:
            targets[name] = torch.zeros(size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(targets, storage_reader=reader, no_dist=not dist.is_initialized())
    return targets
