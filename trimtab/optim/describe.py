"""The state of an optimizer: which tensors are quantized, which are not and why, and the bytes.

    print(optimizer.describe())

Before the first step it describes the state that will be made.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.optim.optimizer import Optimizer


@dataclass(frozen=True)
class Entry:
    """The state of one parameter, over all shards."""

    name: str
    shape: tuple[int, ...]
    bits: int
    why: str
    bytes_now: int
    bytes_at_32: int


@dataclass(frozen=True)
class Description:
    optimizer: str
    entries: list[Entry]

    @property
    def bytes_now(self) -> int:
        return sum(entry.bytes_now for entry in self.entries)

    @property
    def bytes_at_32(self) -> int:
        return sum(entry.bytes_at_32 for entry in self.entries)

    def __str__(self) -> str:
        lines = [("parameter", "shape", "bits", "why", "bytes", "at 32 bits")]
        lines += [
            (e.name, "×".join(map(str, e.shape)) or "·", str(e.bits), e.why, f"{e.bytes_now:,}", f"{e.bytes_at_32:,}")
            for e in self.entries
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        layout = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<<><>>", widths, strict=True))
        return "\n".join([*(layout.format(*line) for line in lines), "", self.summary()])

    def summary(self) -> str:
        """One line: how many tensors are quantized, and the bytes saved."""
        quantized = sum(entry.bits == 8 for entry in self.entries)
        saved = 1 - self.bytes_now / self.bytes_at_32 if self.bytes_at_32 else 0.0
        return (
            f"{self.optimizer}: {quantized} of {len(self.entries)} tensors in 8 bits; "
            f"state {_readable(self.bytes_now)}, {_readable(self.bytes_at_32)} at 32 bits ({saved:.0%} saved)"
        )


def describe(optimizer: "Optimizer") -> Description:
    entries = []
    storages = [optimizer.storage_of(p, group) for group in optimizer.param_groups for p in group["params"]]
    names, kept = iter(optimizer.names), iter(storages)
    for group in optimizer.param_groups:
        moments = len(optimizer.states_of(group))
        for p in group["params"]:
            storage, extra = next(kept), optimizer.extra_bytes(p, group)
            entries.append(
                Entry(
                    name=next(names),
                    shape=tuple(p.shape),
                    bits=storage.bits,
                    why=storage.why,
                    bytes_now=moments * storage.nbytes(p.numel()) + extra,
                    bytes_at_32=moments * 4 * p.numel() + extra,
                )
            )
    return Description(type(optimizer).__name__, entries)


def _readable(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
