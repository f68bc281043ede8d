"""The permutation of an epoch: each place once, different per epoch and seed, the same on every machine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data.order import Ordered, permute

SEEDS = st.integers(-(2**70), 2**70)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), SEEDS, st.integers(0, 10**6))
def test_every_place_has_one_window(size, seed, epoch):
    found = permute(np.arange(size), size, seed, epoch)
    assert sorted(found.tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 2**48), SEEDS, st.data())
def test_a_place_is_found_alone_as_among_others(size, seed, data):
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    together = permute(places, size, seed, 3)
    assert [permute(places[i : i + 1], size, seed, 3)[0] for i in range(len(places))] == together.tolist()
    assert len(set(together.tolist())) == len(places)
    assert ((together >= 0) & (together < size)).all()


def test_the_order_does_not_change_between_versions():
    """A run saved last year goes on with its own windows, whatever numpy and torch have become."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == [6, 1, 8, 9, 7, 4, 3, 2, 0, 5]


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {tuple(permute(np.arange(50), 50, seed, epoch).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert tuple(range(50)) not in orders


@pytest.mark.parametrize("size", [2, 5, 16, 100])
def test_every_window_comes_to_every_place(size):
    """Counts of 400 epochs: each window is at the first place about 400 / size times, by chi-square."""
    epochs = 400
    firsts = np.bincount([permute(np.array([0]), size, 7, epoch)[0] for epoch in range(epochs)], minlength=size)
    expected = epochs / size
    # Five deviations above the mean of chi-square with size - 1 degrees of freedom.
    assert ((firsts - expected) ** 2 / expected).sum() < size - 1 + 5 * np.sqrt(2 * (size - 1))


def test_neighbours_do_not_stay_neighbours():
    found = permute(np.arange(10_000), 10_000, 1, 0)
    assert (abs(np.diff(found)) == 1).mean() < 0.002
    assert abs(np.corrcoef(found, np.arange(10_000))[0, 1]) < 0.05


def test_a_batch_that_does_not_split_is_refused():
    assert Ordered(0, 0, 3, {}).share(12) == 4
    with pytest.raises(ValueError, match=r"batch=10 does not split over world=4 processes; try batch=8"):
        Ordered(0, 0, 4, {}).share(10)
    with pytest.raises(ValueError, match=r"positive integer, got 0"):
        Ordered(0, 0, 1, {}).share(0)
    with pytest.raises(ValueError, match=r"positive integer, got 4\.0"):
        Ordered(0, 0, 1, {}).share(4.0)  # type: ignore[arg-type]


def test_a_position_of_other_batches_is_refused():
    batches = Ordered(1, 0, 1, {})
    batches.load({"seed": 1, "position": 7})
    assert batches.position == 7
    with pytest.raises(ValueError, match="the saved position is of seed=2, these batches have seed=1"):
        batches.load({"seed": 2, "position": 7})
    with pytest.raises(ValueError, match="'seed' is missing"):
        batches.load({"position": 7})
    for position in (-1, 1.5, None, "3"):
        with pytest.raises(ValueError, match="count of rows"):
            batches.load({"seed": 1, "position": position})
    assert batches.position == 7
