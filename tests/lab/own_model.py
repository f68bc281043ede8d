"""Somebody's own model and data, as a user would write them: a small regression with dropout."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.nn.tap import tap


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [4] + [width] * depth
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - y).square().mean()


def batches(split: str, seed: int, count: int | None = None) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed + 7_000_000 * (split == "validation"))
    while count is None or count > 0:
        x = torch.randn(8, 4, generator=generator)
        yield {"x": x, "y": 0.5 * x.sum(dim=1, keepdim=True)}
        count = None if count is None else count - 1


def build(width: int = 8, depth: int = 1) -> Any:
    return Net(width, depth), batches


def build_finite(width: int = 8, depth: int = 1) -> Any:
    """Five batches, and it says what its data is."""
    return Net(width, depth), lambda split, seed: list(batches(split, seed, 5)), "five batches"


class Placed:
    """Batches that know where they are."""

    def __init__(self, split: str, seed: int) -> None:
        self.split, self.seed, self.at = split, seed, 0

    def next(self, batch: int) -> dict[str, Tensor]:
        self.at += 1
        x = torch.randn(batch, 4, generator=torch.Generator().manual_seed(self.seed * 1000 + self.at))
        return {"x": x, "y": 0.5 * x.sum(dim=1, keepdim=True)}

    def state(self) -> dict[str, Any]:
        return {"at": self.at}

    def load(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def build_placed(width: int = 8, depth: int = 1) -> Any:
    return Net(width, depth), Placed


class Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Wrapped(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return Output(super().forward(x, y))


def build_wrapped(width: int = 8, depth: int = 1) -> Any:
    return Wrapped(width, depth), batches


class Attending(nn.Module):
    """One attention layer over four numbers, with its logits tapped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(1, width), Attention(width), nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.attention(self.embed(x[..., None]))).mean(dim=1) - y).square().mean()


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        logits = tap(q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5, "attention.logits")
        return (logits.softmax(dim=-1) @ v)[:, 0]


def build_attending(width: int = 8, depth: int = 1) -> Any:
    return Attending(width), batches


class Tokens(nn.Module):
    """Reads whole rows: what is cut would be missed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        assert input_ids.shape == (4, 32), f"rows of {input_ids.shape}"
        return (self.weight * input_ids.float()).mean()


def build_tokens() -> Any:
    return Tokens(), lambda split, seed: [{"input_ids": torch.ones(4, 32, dtype=torch.long)}]


def raises(**options: Any) -> Any:
    raise KeyError(f"no such thing\nsecond line {options}")


def returns_none() -> None:
    return None


def returns_text() -> Any:
    return "model", "data"


def raises_in_data() -> Any:
    def data(split: str, seed: int) -> Iterator[dict[str, Tensor]]:
        yield from batches(split, seed, 2 if split == "train" else None)
        raise OSError("the disk is gone")

    return Net(8, 1), data


def raises_in_model() -> Any:
    return Net(8, 1), lambda split, seed: [{"x": torch.zeros(2, 5), "y": torch.zeros(2, 1)}]


def returns_logits() -> Any:
    return nn.Bilinear(2, 2, 3), lambda split, seed: [{"input1": torch.zeros(2, 2), "input2": torch.zeros(2, 2)}]


def has_no_batches() -> Any:
    return Net(8, 1), lambda split, seed: []


def has_tuples() -> Any:
    return Net(8, 1), lambda split, seed: [(torch.zeros(2, 4), torch.zeros(2, 1))]


NUMBER = 3
