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
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trimtab.runs import RunError
from trimtab.runs.files import read_json, replace_json, sha256_of, sync_folder, write_json
from trimtab.train.processes import Processes
from trimtab.train.tensors import read_tensors, write_tensors

FORMAT = 1
BEST = -1  # in place of a step: the checkpoint with the lowest validation loss
_NAME = re.compile(r"step-(\d{8})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used. The message names the problem and a checkpoint that can be used instead."""


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
        first, run_on_all = self.processes.rank == 0, self.processes.run_on_all
        temporary = self.folder / f".tmp-step-{step:08d}"
        try:
            run_on_all(lambda: _empty(temporary) if first else None)
            if self.processes.sharded:
                files = self._write_shards(temporary / "shards", model, optimizer)
            else:
                files = run_on_all(lambda: _write_whole(temporary, model, optimizer) if first else {})
            everything = {**state, "param_groups": optimizer_groups(optimizer)}
            run_on_all(lambda: self._complete(step, files, everything, validation_loss) if first else None)
        except OSError:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return self.path(step)

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
        best = self.best
        for old in self.list_steps()[: -self.keep]:
            if old != best:
                self._remove(old)

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

    def _write_shards(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        tensors = {f"model.{name}": x for name, x in plain_state(model).items()}
        portable = optimizer.state_dict()  # sharded parameters have portable state
        tensors |= {f"optimizer.{name}": x for name, x in optimizer_tensors(portable).items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        except CheckpointException as error:  # not an Exception; all processes raise it with the causes of each
            causes = [cause for cause, _ in error.failures.values()]
            disk = next((cause for cause in causes if isinstance(cause, OSError)), None)
            raise (disk or RuntimeError(f"the checkpoint was not written: {causes[0]}")) from None
        return self.processes.run_on_all(lambda: _list_files(folder) if self.processes.rank == 0 else {})

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
                weights = read_tensors(path / "model.safetensors")
                moments = read_tensors(path / "optimizer.safetensors") if optimizer is not None else {}
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path} is intact, but it is not a checkpoint: {error}") from None
        load_model(model, weights)
        if optimizer is not None:
            optimizer.load_state_dict(optimizer_state(moments, groups))
        return state


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_whole(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parts = {"model": plain_state(model), "optimizer": optimizer_tensors(optimizer.state_dict())}
    return {f"{name}.safetensors": write_tensors(folder / f"{name}.safetensors", x) for name, x in parts.items()}


def _list_files(folder: Path) -> dict[str, Any]:
    """The manifest entries of the shards of all processes."""
    files = sorted(folder.iterdir())
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {f"shards/{path.name}": {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in files}


# --- Models


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with the names of the model itself, without the prefixes of wrappers."""
    state = {}
    for name, x in model.state_dict().items():
        while name.startswith(("module.", "_orig_mod.")):
            name = name.split(".", 1)[1]
        state[name.replace("._orig_mod.", ".")] = x
    return state


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    mine = plain_state(model)
    missing, extra = mine.keys() - tensors.keys(), tensors.keys() - mine.keys()
    if missing or extra:
        what = f"lacks {sorted(missing)[0]}" if missing else f"has {sorted(extra)[0]}, which the model does not have"
        raise CheckpointError(f"the checkpoint {what}; was it saved by another model?")
    for name, x in mine.items():
        saved = tensors[name]
        if saved.shape != x.shape:
            raise CheckpointError(f"{name} has shape {tuple(saved.shape)} in the checkpoint, {tuple(x.shape)} here")
        with torch.no_grad():
            x.copy_(_shard_like(saved, x))


def _shard_like(saved: Tensor, x: Tensor) -> Tensor:
    """A whole tensor, sharded as `x` is."""
    if not hasattr(x, "device_mesh") or hasattr(saved, "device_mesh"):
        return saved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved.to(x.device), x.device_mesh, x.placements, src_data_rank=None)  # type: ignore[attr-defined]


# --- Optimizers: tensors and JSON apart, so that no pickle is needed


def optimizer_tensors(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{place}.{key}": x for place, entry in state_dict["state"].items() for key, x in entry.items()}


def optimizer_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.state_dict()["param_groups"]
    return [{key: list(v) if isinstance(v, tuple) else v for key, v in group.items()} for group in groups]


def optimizer_state(tensors: Mapping[str, Tensor], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict from its tensors and groups. JSON has no tuples, so lists other than these become tuples again."""
    lists = ("params", "param_names", "moments")
    state: dict[int, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        place, key = name.split(".", 1)
        state.setdefault(int(place), {})[key] = x
    restored = [
        {key: tuple(v) if isinstance(v, list) and key not in lists else v for key, v in group.items()}
        for group in groups
    ]
    return {"state": state, "param_groups": restored}


# --- Shards


def read_shards(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of model and optimizer, sharded as this process needs them."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    mine = plain_state(model)
    params = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    for full_name, entry in saved.items():
        part, name = full_name.split(".", 1)
        if part == "optimizer" and optimizer is None:
            continue
        like = mine.get(name) if part == "model" else params[int(name.split(".")[0])]
        dtype = entry.properties.dtype
        if like is not None and like.shape == entry.size:
            target = torch.zeros_like(like, dtype=like.dtype if part == "model" else dtype).detach()
        else:
            target = torch.zeros(entry.size, dtype=dtype)
        parts[part][name] = target
    targets = {f"{part}.{name}": x for part, tensors in parts.items() for name, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(targets, storage_reader=reader, no_dist=not dist.is_initialized())
    return parts["model"], parts["optimizer"]
