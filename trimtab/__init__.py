"""Trimtab: stable, low-precision, memory-lean Transformer training.

    tt.optim.StableAdamW(..., bits=8)      tt.nn.convert_linears(model, "switchback")      tt.SeqLenWarmup(...)

Rooms are imported when they are first used: `trimtab --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab import data, nn, ops, optim, recipes, schedule, train
    from trimtab.schedule import SeqLenWarmup

__version__ = "0.1.0"
__all__ = ["SeqLenWarmup", "__version__", "data", "nn", "ops", "optim", "recipes", "schedule", "train"]


def __getattr__(name: str) -> Any:
    if name == "SeqLenWarmup":
        return importlib.import_module("trimtab.schedule").SeqLenWarmup
    if name in __all__:
        return importlib.import_module(f"trimtab.{name}")
    raise AttributeError(f"trimtab has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
