"""A classification task that downloads nothing: from which module of Python's standard library do 64 bytes come?

    window of bytes --embed--> Transformer encoder --mean over the window--> one of MODULES

A subject of studies as a user would write one, in plain PyTorch: `trimtab.lab.classification:build`. Every fifth piece
of 1024 bytes of every module is held out for validation.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Single files of every Python version since 3.10, of 37 to 144 kB in 3.11.
MODULES = ("argparse", "doctest", "pickletools", "socket", "statistics", "tarfile", "turtle", "typing")
WINDOW, ROWS = 64, 32
PIECE, HELD_OUT = 1024, 5  # bytes; one of so many pieces
HEAD_WIDTH = 16

Batch = dict[str, Tensor]


class Classifier(nn.Module):
    """Pre-norm Transformer encoder over bytes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(WINDOW, width) * width**-0.5)
        block = nn.TransformerEncoderLayer(
            width, max(width // HEAD_WIDTH, 1), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, len(MODULES))
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, window: Tensor, module: Tensor) -> Tensor:
        """The cross entropy of the right module."""
        states = self.blocks(self.embedding(window) + self.positions)
        return F.cross_entropy(self.head(states.mean(dim=1)), module)


def build(width: int = 64, depth: int = 2) -> tuple[Classifier, object, str]:
    """The model, its data, and the hash of the data."""
    return Classifier(width, depth), batches, hashlib.sha256(b"".join(_read(name) for name in MODULES)).hexdigest()


def batches(split: str, seed: int) -> Iterator[Batch]:
    """Random windows, of all modules equally often."""
    texts = _split(split)
    generator = torch.Generator().manual_seed(2 * seed + (split == "validation"))
    while True:
        module = torch.randint(len(MODULES), (ROWS,), generator=generator)
        places = torch.rand(ROWS, generator=generator)
        rows = []
        for label, place in zip(module.tolist(), places.tolist(), strict=True):
            start = int(place * (len(texts[label]) - WINDOW))
            rows.append(texts[label][start : start + WINDOW])
        yield {"window": torch.stack(rows).long(), "module": module}


@cache
def _split(split: str) -> list[Tensor]:
    """The bytes of every module in this split."""
    found = []
    for name in MODULES:
        text = torch.frombuffer(bytearray(_read(name)), dtype=torch.uint8)
        pieces = [(i % HELD_OUT == HELD_OUT - 1, piece) for i, piece in enumerate(text.split(PIECE))]
        found.append(torch.cat([piece for held_out, piece in pieces if held_out == (split == "validation")]))
    return found


def _read(name: str) -> bytes:
    path = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
    if not path.is_file():
        raise ValueError(f"this Python has no source of {name} in {path.parent}; use one with its standard library")
    return path.read_bytes()
