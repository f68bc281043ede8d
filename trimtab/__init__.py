"""Trimtab: stable, low-precision, memory-lean Transformer training.

    tt.optim.StableAdamW(..., bits=8)      tt.nn.convert_linears(model, "switchback")      tt.SeqLenWarmup(...)

Sub-packages are imported at their first use, so that `trimtab --help` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab import analysis, data, lab, nn, ops, optim, recipes, report, runs, schedule, train, watch
    from trimtab.schedule import SeqLenWarmup
    from trimtab.watch import Watch

    __version__: str

__all__ = [
    "SeqLenWarmup",
    "Watch",
    "__version__",
    "analysis",
    "data",
    "lab",
    "nn",
    "ops",
    "optim",
    "recipes",
    "report",
    "runs",
    "schedule",
    "train",
    "watch",
]
_SHORTCUTS = {"SeqLenWarmup": "trimtab.schedule", "Watch": "trimtab.watch"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _read_version()
    if name in _SHORTCUTS:
        return getattr(importlib.import_module(_SHORTCUTS[name]), name)
    if name in __all__:
        return importlib.import_module(f"trimtab.{name}")
    raise AttributeError(f"trimtab has no {name!r}; it has {', '.join(__all__)}")


def _read_version() -> str:
    """The version that was installed. Read on request, because `importlib.metadata` takes 20 ms to import."""
    from importlib import metadata

    try:
        return metadata.version("trimtab")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # imported from a folder that was never installed


def __dir__() -> list[str]:
    return __all__
