"""A user-defined model and data in the training loop, given as `package.file:function`.

    def build(width=64, depth=2):                      the options of the config, as keywords
        model = MyModel(width, depth)                  model(**batch) is the loss, or has it as `.loss`
        def data(split, seed):                         "train" or "validation"
            generator = torch.Generator().manual_seed(seed)
            while True:
                yield {"x": ..., "y": ...}             tensors, one batch
        return model, data                             or model, data, a hash of the data

Batches are made in a thread, so they need their own random generator. If the iterable ends, `data` is called again
with a seed that is 1000 higher. A resume makes the batches again and skips those that were used; an object with
`next(batch)`, `state()` and `load(state)` is positioned directly.

The function decides how many rows a batch has: `batch` and `model.context` (tokens of a row) are only for the clocks.
The validation loss is the mean of the model's own loss, in eval mode. One process.
"""

import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from trimtab.nn import ConfigError
from trimtab.runs import RunError
from trimtab.schedule import LearningRate
from trimtab.train.config import ModuleConfig, ModuleRun, OptimConfig, ScheduleConfig, SeqLenConfig

SEED_STRIDE = 1000  # between two passes over the data


class Built(NamedTuple):
    model: nn.Module
    data: Callable[[str, int], Any]
    sha256: str


def module_run(build: str, *, steps: int = 500, batch: int = 16, options: Mapping[str, Any] | None = None) -> ModuleRun:
    """The default config for a user-defined model, with AdamW. Imports the function but does not call it."""
    find_function(build)
    lr = LearningRate(kind="cosine", warmup=max(steps // 20, 1), floor=1e-5)
    return ModuleRun(
        model=ModuleConfig(build=build, options=dict(options or {})),
        optim=OptimConfig(name="adamw", lr=1e-3, bits=32),
        schedule=ScheduleConfig(lr=lr, seqlen=SeqLenConfig(multiple=1)),
        steps=steps,
        batch=batch,
        eval_every=max(steps // 4, 1),
        eval_batches=8,
        checkpoint_every=100,
        keep=1,
        threads=1,
    )


def find_function(reference: str) -> Callable[..., Any]:
    """Import `package.file:function`, from the current folder first. Other modules that it imports are found there
    last, so that a file in the current folder cannot replace one of Python's modules."""
    module, colon, name = reference.partition(":")
    if not (module and colon and name.isidentifier()) or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{reference!r} is not package.file:function; try my_model:build")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = _import(module, here)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and module.startswith(error.name or "\0")
        why = f"there is no module {error.name}" if missing else _describe(error)  # type: ignore[attr-defined]
        raise ConfigError(f"{reference}: cannot import {module}: {why} (from {here})") from error
    function: Callable[..., Any] | None = getattr(found, name, None)
    if not callable(function):
        own = [key for key, value in vars(found).items() if inspect.isfunction(value) and value.__module__ == module]
        has = f"it has {', '.join(own)}" if own else "it has no functions"
        raise ConfigError(f"{reference}: {module} has no function {name}; {has}")
    return function


def _import(module: str, folder: str) -> types.ModuleType:
    package = module.partition(".")[0]
    spec = PathFinder.find_spec(package, [folder]) if package not in sys.modules else None
    if spec is not None and spec.loader is not None:
        made = sys.modules[package] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(made)
        except BaseException:
            del sys.modules[package]
            raise
    return importlib.import_module(module)


def check_options(config: ModuleConfig) -> None:
    """Raise ConfigError if the signature of the function does not accept the options."""
    try:
        inspect.signature(find_function(config.build)).bind(**config.options)
    except TypeError as error:
        raise ConfigError(f"{config.build} cannot be called with ({_arguments(config)}): {error}") from None


def build_module(config: ModuleConfig) -> Built:
    """Call the function and check what it returns."""
    function = find_function(config.build)
    try:
        made = function(**config.options)
    except Exception as error:
        raise ConfigError(f"{config.build}({_arguments(config)}) raised {_describe(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ConfigError(f"{config.build} must return (model, data) or (model, data, hash), got {_kind(made)}")
    model, data, *hashes = made
    if not isinstance(model, nn.Module) or not callable(data):
        got = f"{_kind(model)} and {_kind(data)}"
        raise ConfigError(f"{config.build} must return an nn.Module and a function data(split, seed), got {got}")
    if hashes and not isinstance(hashes[0], str):
        raise ConfigError(f"{config.build}: the hash of the data must be text, got {_kind(hashes[0])}")
    return Built(model, data, hashes[0] if hashes else _hash_source(config.build))


class ModuleBatches:
    """The batches of `data(split, seed)`, with a position that can be saved."""

    def __init__(self, build: str, data: Callable[[str, int], Any], split: str, seed: int) -> None:
        self.build, self.data, self.split, self.seed = build, data, split, seed
        self.position = 0  # batches that the caller has used; the source follows at the next batch
        self._restart()
        if self._placed:
            try:
                json.dumps(self._source.state())
            except Exception as error:
                raise ConfigError(f"{build}: state() of the {split} data is not JSON: {_describe(error)}") from error

    def next(self, batch: int) -> dict[str, Any]:
        if self._taken > self.position:
            self._restart()
        while self._taken < self.position:
            self._take(batch)
        self.position += 1
        return self._take(batch)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"position": self.position, "split": self.split, "seed": self.seed}
        if self._placed:
            state["source"] = {"taken": self._taken, "state": self._source.state()}
        return state

    def load(self, state: dict[str, Any]) -> None:
        for name in ("split", "seed"):
            old, new = state.get(name), getattr(self, name)
            if old != new:
                raise ValueError(f"{self.build}: the saved position is of {name} {old!r}, not {new!r}")
        if self._placed and "source" in state:
            self._source.load(state["source"]["state"])
            self._taken = state["source"]["taken"]
        self.position = state["position"]

    def _take(self, batch: int) -> dict[str, Any]:
        try:
            found = self._source.next(batch) if self._placed else next(self._iterator)
        except (ConfigError, RunError):
            raise
        except Exception as error:
            raise RunError(f"{self.build}: the {self.split} data raised {_describe(error)}") from error
        if not isinstance(found, Mapping):
            raise RunError(f"{self.build}: a batch must be a dict of tensors for model(**batch), got {_kind(found)}")
        self._taken += 1
        return dict(found)

    def _restart(self) -> None:
        self._taken = 0
        self._source: Any = self._open(self.seed)
        self._placed: bool = all(callable(getattr(self._source, name, None)) for name in ("next", "state", "load"))
        if not self._placed and not isinstance(self._source, Iterable):
            got = _kind(self._source)
            raise ConfigError(f"{self.build}: data({self.split!r}, seed) must return batches, got {got}")
        self._iterator = self._repeat(self._source)

    def _repeat(self, source: Iterable[Any]) -> Iterator[Any]:
        """The batches of an iterable; at its end it is opened again with another seed."""
        for seed in itertools.count(self.seed + SEED_STRIDE, SEED_STRIDE):
            before = self._taken
            yield from source
            if self._taken == before:
                raise RunError(f"{self.build}: data({self.split!r}, seed) has no batches")
            source = self._open(seed)

    def _open(self, seed: int) -> Any:
        try:
            return self.data(self.split, seed)
        except Exception as error:
            raise ConfigError(f"{self.build}: data({self.split!r}, {seed}) raised {_describe(error)}") from error


def compute_loss(build: str, run: nn.Module, batch: Mapping[str, Any], device: Any) -> Tensor:
    """The loss of a batch, which must be one number."""
    placed = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    try:
        found = run(**placed)
    except Exception as error:
        raise RunError(f"{build}: model({', '.join(batch)}) raised {_describe(error)}") from error
    loss = getattr(found, "loss", found)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = _kind(loss) + (f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else "")
        raise RunError(f"{build}: model(**batch) must return the loss, one number, or have it as .loss; got {got}")
    return loss.reshape(())


def _hash_source(reference: str) -> str:
    """The hash of the function's file, if the function returns no hash of the data."""
    path = getattr(sys.modules[reference.partition(":")[0]], "__file__", None)
    return hashlib.sha256(Path(path).read_bytes() if path else b"").hexdigest()


def _arguments(config: ModuleConfig) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in config.options.items())


def _describe(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
