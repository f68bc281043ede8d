"""The order of an epoch: a permutation computed, not stored.

    place 0, 1, 2, ... of epoch e  --Feistel network, keyed by seed and e-->  window

Any place of any epoch is found at once: nothing is shuffled in memory, resuming is one number, and the order is the
same on every machine and with every version of numpy and torch, whose shuffles are not promised to stay.

A Feistel network permutes the numbers of an even count of bits; a result that is too large is fed in again until it
fits, which it does at least once in four tries, so the rest is permuted too.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6  # four make a pseudo-random permutation (Luby and Rackoff 1988); the halves of small sets are short


def permute(places: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where the given places of an epoch (each in 0 ... size - 1) lie: all of them together are 0 ... size - 1."""
    half = max((size - 1).bit_length() + 1, 2) // 2
    keys = epoch_keys(seed, epoch)
    found = _feistel(places.astype(np.uint64), half, keys)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], half, keys)
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


def _feistel(numbers: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = numbers >> shift, numbers & mask
    for key in keys[:ROUNDS]:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << shift | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every bit in changes half of the bits out. Overflow is meant."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
