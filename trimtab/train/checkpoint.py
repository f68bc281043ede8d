"""Checkpoints: complete or not there, checked before they are believed, never unpickled.

    checkpoints/step-00001000/  model.safetensors  optimizer.safetensors  state.json  manifest.json
    checkpoints/step-00001000/  shards/*.safetensors                      state.json  manifest.json     (FSDP2)

One is written under a temporary name, synced, and renamed: a name without a dot means complete. The manifest has the
sha256 of every file. Whole ones keep the optimizer's packed state, for an exact resume; shards are those of
torch.distributed.checkpoint in its safetensors form and hold portable state, which any number of processes can load.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.train.files import read_tensors as _read_tensors
from trimtab.train.files import replace_json, sha256_of, sync_folder, write_json, write_tensors
from trimtab.train.processes import Processes

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
        """The step whose validation loss was lowest, if it was saved."""
        path = self.folder / "best.json"
        return json.loads(path.read_text())["step"] if path.is_file() else None

    # --- Writing

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        *,
        best: float | None = None,
    ) -> Path:
        """Write one; `best` is its validation loss if that is the lowest so far. All processes call this."""
        first = self.processes.rank == 0
        temporary, final = self.folder / f".tmp-step-{step:08d}", self.path(step)
        if first:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        self.processes.barrier()
        try:
            files = dict[str, Any]()
            if self.processes.sharded:
                files = self._write_shards(temporary / "shards", model, optimizer)
            elif first:
                files["model.safetensors"] = write_tensors(temporary / "model.safetensors", plain_state(model))
                files["optimizer.safetensors"] = write_tensors(
                    temporary / "optimizer.safetensors", optimizer_tensors(optimizer.state_dict())
                )
            if first:
                files["state.json"] = write_json(
                    temporary / "state.json", {**state, "param_groups": optimizer_groups(optimizer)}
                )
                manifest = {"format": FORMAT, "sharded": self.processes.sharded, "step": step, "files": files}
                write_json(temporary / "manifest.json", manifest)
                sync_folder(temporary)
                shutil.rmtree(final, ignore_errors=True)
                temporary.rename(final)
                sync_folder(self.folder)
        except OSError:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if first:
            if best is not None:
                replace_json(self.folder / "best.json", {"step": step, "validation_loss": best})
            self._prune()
        self.processes.barrier()
        return final

    def _write_shards(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        tensors = {f"model.{name}": x for name, x in plain_state(model).items()}
        portable = optimizer.state_dict()  # portable by itself where parameters are sharded
        tensors |= {f"optimizer.{name}": x for name, x in optimizer_tensors(portable).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
        self.processes.barrier()
        if self.processes.rank != 0:
            return {}
        files = sorted(folder.iterdir())
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return {f"shards/{path.name}": {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in files}

    def _prune(self) -> None:
        steps, best = self.list_steps(), self.best
        for step in steps[: -self.keep]:
            if step != best:
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
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        if manifest["sharded"]:
            tensors = read_shards(path / "shards", model, optimizer)
        else:
            tensors = {f"model.{name}": x for name, x in _read_tensors(path / "model.safetensors").items()}
            if optimizer is not None:
                read = _read_tensors(path / "optimizer.safetensors").items()
                tensors |= {f"optimizer.{name}": x for name, x in read}
        load_model(model, _under("model.", tensors), self.processes)
        if optimizer is not None:
            saved = optimizer_state(_under("optimizer.", tensors), state["param_groups"])
            optimizer.load_state_dict(saved)
        return state


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


def load_model(model: nn.Module, tensors: Mapping[str, Tensor], processes: Processes) -> None:
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
