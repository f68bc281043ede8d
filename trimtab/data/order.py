"""The order of the samples in an epoch: a permutation that is computed, not stored.

    place 0, 1, 2, ... of epoch e  --Feistel network, keyed by seed and e-->  window

Every place of every epoch can be computed directly: nothing is shuffled in memory, one number is enough to resume, and
the order is the same on every machine and with every version of numpy and torch, whose shuffles may change.

The places form a rectangle of a x b, nearly square and hardly larger than needed. One round shifts every row by a
number that depends on the row, the next every column by a number that depends on the column. Each round is a bijection.
Results outside the places are permuted again until they are inside.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6  # four make a pseudo-random permutation (Luby and Rackoff 1988); more because small sets have short sides


def permute(places: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Permute places in 0 ... size - 1 of an epoch."""
    assert places.size == 0 or 0 <= places.min() <= places.max() < size, "a place outside would loop forever"
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = epoch_keys(seed, epoch)
    found = _feistel(places.astype(np.uint64), rows, columns, keys)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], rows, columns, keys)
    return found.astype(np.int64)


def epoch_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Numbers that depend only on seed and epoch: one per round, and one more."""
    return np.frombuffer(hashlib.sha512(f"{seed}:{epoch}".encode()).digest(), "<u8").astype(np.uint64)[: ROUNDS + 1]


class Ordered:
    """Base of endless batches: a position in the order that a seed defines, and this process's part of each batch.

    Attributes:
        position: rows returned so far, by all processes together.
    """

    def __init__(self, seed: int, rank: int, world: int, identity: dict[str, Any]) -> None:
        """`identity` is what a position belongs to: the data, the split and so on."""
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"rank must be in 0 ... world - 1, got rank={rank}, world={world}")
        self.seed, self.rank, self.world, self.position = seed, rank, world, 0
        self._identity = {**identity, "seed": seed}

    def share(self, batch: int) -> int:
        """Rows of each process in a global batch."""
        if type(batch) is not int or batch < 1:
            raise ValueError(f"batch must be a positive integer, got {batch!r}")
        if batch % self.world:
            nearest = max(round(batch / self.world), 1) * self.world
            raise ValueError(f"batch={batch} does not split over world={self.world} processes; try batch={nearest}")
        return batch // self.world

    def state(self) -> dict[str, Any]:
        """The position and what it belongs to, as JSON."""
        return {**self._identity, "position": self.position}

    def load(self, state: dict[str, Any]) -> None:
        """Continue exactly after `state`, with any number of processes."""
        for key, value in self._identity.items():
            if key not in state:
                found = ", ".join(map(repr, state))
                raise ValueError(f"not a state of these batches: {key!r} is missing, it has {found}")
            if state[key] != value:
                raise ValueError(f"the saved position is of {key}={state[key]!r}, these batches have {key}={value!r}")
        position = state.get("position")
        if type(position) is not int or position < 0:
            raise ValueError(f"the saved position must be a count of rows, got {position!r}")
        self.position = position


def _feistel(numbers: NDArray[np.uint64], rows: int, columns: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Black and Rogaway 2002, section 5: a Feistel network over any a x b instead of powers of two."""
    a, b = np.uint64(rows), np.uint64(columns)
    row, column = numbers // b, numbers % b
    for one, other in keys[:ROUNDS].reshape(-1, 2):
        column = (column + _mix(row + one) % b) % b
        row = (row + _mix(column + other) % a) % a
    numbers = row * b + column
    return numbers


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit changes half of the output bits. Overflow is intended."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x
