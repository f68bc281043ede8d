"""The order of an epoch: a permutation computed, not stored.

    place 0, 1, 2, ... of epoch e  --Feistel network, keyed by seed and e-->  window

Any place of any epoch is found at once: nothing is shuffled in memory, resuming is one number, and the order is the
same on every machine and with every version of numpy and torch, whose shuffles are not promised to stay.

The places are laid out in a rectangle of a x b, nearly square and hardly larger than needed. One round shifts every row
by a number that depends on the row, the next every column by a number that depends on the column: nothing is lost, and
after a few rounds nothing is where it was. What lands outside the places is fed in again until it does not.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6  # four make a pseudo-random permutation (Luby and Rackoff 1988); small sets have short sides


def permute(places: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where the given places of an epoch (each in 0 ... size - 1) lie: all of them together are 0 ... size - 1."""
    assert places.size == 0 or 0 <= places.min() <= places.max() < size, "a place outside would be fed in for ever"
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = epoch_keys(seed, epoch)
    found = _feistel(places.astype(np.uint64), rows, columns, keys)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], rows, columns, keys)
    return found.astype(np.int64)


def epoch_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Numbers that depend on seed and epoch and nothing else: one per round, and one to spare."""
    return np.frombuffer(hashlib.sha512(f"{seed}:{epoch}".encode()).digest(), "<u8").astype(np.uint64)[: ROUNDS + 1]


def check_share(batch: int, world: int) -> int:
    """Rows of each process, or why the global batch does not split."""
    if type(batch) is not int or batch < 1:
        raise ValueError(f"batch must be a positive integer, got {batch!r}")
    if batch % world:
        nearest = max(round(batch / world), 1) * world
        raise ValueError(f"batch={batch} does not split over world={world} processes; try batch={nearest}")
    return batch // world


def check_rank(rank: int, world: int) -> None:
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"rank must be in 0 ... world - 1, got rank={rank}, world={world}")


def read_position(state: dict[str, object], expected: dict[str, object]) -> int:
    """The position in a saved state, after comparing everything else in it with what is open now."""
    for key, value in expected.items():
        if key not in state:
            raise ValueError(f"not a state of these batches: {key!r} is missing, it has {', '.join(map(repr, state))}")
        if state[key] != value:
            raise ValueError(f"the saved position is of {key}={state[key]!r}, these batches have {key}={value!r}")
    position = state.get("position")
    if type(position) is not int or position < 0:
        raise ValueError(f"the saved position must be a count of rows, got {position!r}")
    return position


def _feistel(numbers: NDArray[np.uint64], rows: int, columns: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Black and Rogaway 2002, section 5: a Feistel network over any a x b instead of powers of two."""
    a, b = np.uint64(rows), np.uint64(columns)
    row, column = numbers // b, numbers % b
    for one, other in keys[:ROUNDS].reshape(-1, 2):
        column = (column + _mix(row + one) % b) % b
        row = (row + _mix(column + other) % a) % a
    return row * b + column


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every bit in changes half of the bits out. Overflow is meant."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
