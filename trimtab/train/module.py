"""Somebody's own model and data in our loop, given as `package.file:function`.

    def build(width=64, depth=2):                      the options of the config, as keywords
        model = MyModel(width, depth)                  model(**batch) is the loss, or has it as `.loss`
        def data(split, seed):                         "train" or "validation"
            generator = torch.Generator().manual_seed(seed)
            while True:
                yield {"x": ..., "y": ...}             tensors, one batch
        return model, data                             or model, data, a hash of the data

Batches are made in a thread, so they must draw from a generator of their own, never from the global one. What `data`
returns may end: then it is asked for again, with a seed 1000 higher. A resume makes the same batches again and skips
those that were used; an object with `next(batch)`, `state()` and `load(state)` is asked to go there itself.

The function decides how many rows a batch has: `batch` and `model.context` (tokens of a row) are only for the clocks.
The validation loss is the mean of the model's own loss, in eval mode. One process.
"""

import hashlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from trimtab.nn import ConfigError
from trimtab.runs import RunError
from trimtab.schedule import LearningRate
from trimtab.train.config import ModuleConfig, ModuleRun, OptimConfig, ScheduleConfig, SeqLenConfig

SEEDS_APART = 1000  # from one pass over the data to the next


class Built(NamedTuple):
    model: nn.Module
    data: Callable[[str, int], Any]
    sha256: str


def module_run(build: str, *, steps: int = 500, batch: int = 16, options: Mapping[str, Any] | None = None) -> ModuleRun:
    """A run of somebody's own model with ordinary AdamW. The reference is checked, nothing is built."""
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
    """What `package.file:function` names. The current folder can be imported from."""
    module, colon, name = reference.partition(":")
    if not (module and colon and name.isidentifier()) or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{reference!r} is not package.file:function; try my_model:build")
    if not sys.path or sys.path[0] not in ("", os.getcwd()):
        sys.path.insert(0, os.getcwd())  # before what is installed: my own `models` is meant, not somebody's
    try:
        found = importlib.import_module(module)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and module.startswith(error.name or "\0")
        why = f"there is no module {error.name}" if missing else _said(error)  # type: ignore[attr-defined]
        raise ConfigError(f"{reference}: cannot import {module}: {why} (from {os.getcwd()})") from error
    function = getattr(found, name, None)
    if not callable(function):
        own = [key for key, value in vars(found).items() if inspect.isfunction(value) and value.__module__ == module]
        has = f"it has {', '.join(own)}" if own else "it has no functions"
        raise ConfigError(f"{reference}: {module} has no function {name}; {has}")
    result: Callable[..., Any] = function
    return result


def check_options(config: ModuleConfig) -> None:
    """The function takes these options, as far as its signature tells."""
    try:
        inspect.signature(find_function(config.build)).bind(**config.options)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in config.options.items())
        raise ConfigError(f"{config.build} cannot be called with ({given}): {error}") from None


def build_module(config: ModuleConfig) -> Built:
    """Call the function, and look at what it returns."""
    function = find_function(config.build)
    try:
        made = function(**config.options)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in config.options.items())
        raise ConfigError(f"{config.build}({given}) raised {_said(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ConfigError(f"{config.build} must return (model, data) or (model, data, hash), got {_kind(made)}")
    model, data = made[:2]
    if not isinstance(model, nn.Module) or not callable(data):
        raise ConfigError(
            f"{config.build} must return an nn.Module and a function data(split, seed), got {_kind(model)} and "
            f"{_kind(data)}"
        )
    if len(made) == 3 and not isinstance(made[2], str):
        raise ConfigError(f"{config.build}: the hash of the data must be text, got {_kind(made[2])}")
    return Built(model, data, made[2] if len(made) == 3 else _hash_source(config.build))


class ModuleBatches:
    """What `data(split, seed)` returns, as batches with a position: how many were taken."""

    def __init__(self, build: str, data: Callable[[str, int], Any], split: str, seed: int) -> None:
        self.build, self.data, self.split, self.seed = build, data, split, seed
        self.position = 0  # where the caller is; the source follows when it is asked for the next batch
        self._taken = self._passes = 0
        self._iterator: Iterator[Any] = iter(())
        self._restart()
        if self._placed:
            try:
                json.dumps(self._source.state())
            except Exception as error:
                raise ConfigError(f"{build}: state() of the {split} data is not JSON: {_said(error)}") from error

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
            if state.get(name) != getattr(self, name):
                raise ValueError(
                    f"{self.build}: the saved position is of {name} {state.get(name)!r}, not {getattr(self, name)!r}"
                )
        if self._placed and "source" in state:
            self._source.load(state["source"]["state"])
            self._taken = state["source"]["taken"]
        self.position = state["position"]

    def _take(self, batch: int) -> dict[str, Any]:
        try:
            found = self._source.next(batch) if self._placed else self._next()
        except (ConfigError, RunError):
            raise
        except Exception as error:
            raise RunError(f"{self.build}: the {self.split} data raised {_said(error)}") from error
        if not isinstance(found, Mapping):
            raise RunError(
                f"{self.build}: a batch must be a dict of tensors, as model(**batch) takes it, got {_kind(found)}"
            )
        self._taken += 1
        return dict(found)

    def _next(self) -> Any:
        """The next batch of a plain iterable; from its beginning again, with another seed, where it ends."""
        for _ in range(2):
            for found in self._iterator:
                return found
            self._passes += 1
            self._iterator = iter(self._open())
        raise RunError(f"{self.build}: data({self.split!r}, seed) has no batches")

    def _restart(self) -> None:
        self._taken, self._passes = 0, 0
        self._source = self._open()
        self._placed = all(callable(getattr(self._source, name, None)) for name in ("next", "state", "load"))
        self._iterator = iter(()) if self._placed else iter(self._source)

    def _open(self) -> Any:
        try:
            source = self.data(self.split, self.seed + SEEDS_APART * self._passes)
        except Exception as error:
            raise ConfigError(f"{self.build}: data({self.split!r}, {self.seed}) raised {_said(error)}") from error
        if not isinstance(source, Iterable) and not hasattr(source, "next"):
            raise ConfigError(f"{self.build}: data({self.split!r}, seed) must return batches, got {_kind(source)}")
        return source


def loss_of(build: str, run: nn.Module, batch: Mapping[str, Any], device: Any) -> Tensor:
    """What the model returns for a batch, which must be one number."""
    placed = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    try:
        found = run(**placed)
    except Exception as error:
        raise RunError(f"{build}: model({', '.join(batch)}) raised {_said(error)}") from error
    loss = getattr(found, "loss", found)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise RunError(
            f"{build}: model(**batch) must return the loss, one number, or have it as .loss; got {_kind(loss)}{shape}"
        )
    return loss.reshape(())


def _hash_source(reference: str) -> str:
    """Of the file that the function is in, for want of a hash of the data."""
    path = getattr(sys.modules[reference.partition(":")[0]], "__file__", None)
    return hashlib.sha256(Path(path).read_bytes() if path else b"").hexdigest()


def _said(error: Exception) -> str:
    """One line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
