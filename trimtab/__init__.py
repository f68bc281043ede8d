"""Trimtab: stable, low-precision, memory-lean Transformer training."""

from trimtab import nn, ops, optim

__version__ = "0.1.0"
__all__ = ["__version__", "nn", "ops", "optim"]
