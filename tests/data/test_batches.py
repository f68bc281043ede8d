"""Batches of text: every window once per epoch, parts of processes add up, the position is the only state."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import assert_same
from tests.data.corpora import counting
from trimtab.data import TextBatches

SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=12)


def starts(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["tokens"][:, 0].tolist()


@settings(max_examples=50, deadline=None)
@given(tokens=st.integers(2, 200), context=st.integers(1, 20), seed=st.integers(0, 9), size=st.integers(1, 9))
def test_every_window_of_an_epoch_appears_exactly_once(tokens, context, seed, size):
    context = min(context, tokens - 1)
    batches = TextBatches(counting(tokens), context=context, seed=seed)
    rows: list[int] = []
    while len(rows) < 3 * batches.windows:
        rows += starts(batches.next(size))
    for epoch in range(3):
        found = sorted(rows[epoch * batches.windows : (epoch + 1) * batches.windows])
        shift = found[0]
        assert found == [shift + i * context for i in range((tokens - 1) // context)]
        assert 0 <= shift <= (tokens - 1) % context
        assert epoch or shift == 0


@settings(max_examples=50, deadline=None)
@given(tokens=st.integers(30, 99), context=st.integers(1, 20))
def test_every_token_is_a_target_once(tokens, context):
    batches = TextBatches(counting(tokens), context=context, seed=3)
    targets = batches.next(batches.windows)["targets"].flatten().tolist()
    assert sorted(targets) == list(range(1, 1 + batches.windows * context))


def test_later_epochs_reach_the_tail():
    """100 tokens, windows of 30: the first epoch leaves out nine, the others take turns."""
    batches = TextBatches(counting(100), context=30, seed=0)
    last = [int(batches.next(batches.windows)["targets"].max()) for _ in range(60)]
    assert last[0] == 90
    assert set(last) == set(range(90, 100))


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, more=SIZES, seed=st.integers(0, 99), context=st.integers(1, 8))
def test_resuming_at_any_point_changes_nothing(sizes, more, seed, context):
    corpus = counting(60)
    whole = TextBatches(corpus, context=context, seed=seed)
    for size in sizes:
        whole.next(size)
    resumed = TextBatches(corpus, context=context, seed=seed)
    resumed.load(json.loads(json.dumps(whole.state())))
    for size in more:
        expected, got = whole.next(size), resumed.next(size)
        assert_same(got["tokens"], expected["tokens"])
        assert_same(got["targets"], expected["targets"])
    assert resumed.state() == whole.state()


@settings(max_examples=50, deadline=None)
@given(world=st.integers(1, 6), shares=st.lists(st.integers(1, 4), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_the_parts_of_all_processes_are_the_batch(world, shares, seed):
    corpus = counting(50)
    alone = TextBatches(corpus, context=4, seed=seed)
    ranks = [TextBatches(corpus, context=4, seed=seed, rank=rank, world=world) for rank in range(world)]
    for share in shares:
        whole = alone.next(share * world)
        parts = [rank.next(share * world) for rank in ranks]
        assert all(part["tokens"].shape == (share, 4) for part in parts)
        for key in ("tokens", "targets"):
            assert_same(torch.cat([part[key] for part in parts]), whole[key])
    assert all(rank.state() == alone.state() for rank in ranks)


@settings(max_examples=50, deadline=None)
@given(batch=st.integers(1, 40), world=st.integers(2, 8))
def test_a_batch_that_does_not_split_is_refused_and_moves_nothing(batch, world):
    batches = TextBatches(counting(50), context=4, seed=0, rank=world - 1, world=world)
    if batch % world == 0:
        assert len(batches.next(batch)["tokens"]) == batch // world
        return
    with pytest.raises(ValueError, match=f"batch={batch} does not split over world={world}"):
        batches.next(batch)
    assert batches.position == 0


def test_another_number_of_processes_can_resume():
    corpus = counting(80)
    two = TextBatches(corpus, context=4, seed=5, rank=1, world=2)
    two.next(6)
    alone = TextBatches(corpus, context=4, seed=5)
    alone.next(6)
    three = [TextBatches(corpus, context=4, seed=5, rank=rank, world=3) for rank in range(3)]
    for rank in three:
        rank.load(two.state())
    assert_same(torch.cat([rank.next(9)["tokens"] for rank in three]), alone.next(9)["tokens"])


def test_targets_are_the_next_tokens():
    batch = TextBatches(counting(1000), context=16, seed=0).next(8)
    assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
    assert batch["tokens"].shape == batch["targets"].shape == (8, 16)
    assert batch["tokens"].is_contiguous()
    assert batch["targets"].is_contiguous()
    assert_same(batch["targets"], batch["tokens"] + 1)


def test_the_caller_may_write_to_a_batch():
    corpus = counting(40)
    batches = TextBatches(corpus, context=4, seed=0)
    batch = batches.next(4)
    batch["tokens"].fill_(-1)
    assert (batch["targets"] >= 0).all()
    assert (np.asarray(corpus.tokens("train")) == np.arange(40)).all()


def test_the_order_does_not_touch_the_generators_of_others():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    numpy_before = np.random.get_state()[1].tolist()
    TextBatches(counting(40), context=4, seed=0).next(4)
    assert_same(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before


def test_seeds_change_the_order_and_nothing_else():
    corpus = counting(400)
    orders = [starts(TextBatches(corpus, context=4, seed=seed).next(99)) for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "of seed=0, these batches have seed=1"),
        ({"context": 5}, "of context=4"),
        ({"split": "validation"}, "of split='train'"),
    ],
)
def test_a_state_of_other_batches_is_refused(change, message):
    state = TextBatches(counting(90), "train", context=4, seed=0).state()
    other = TextBatches(counting(90), **({"split": "train", "context": 4, "seed": 0} | change))
    with pytest.raises(ValueError, match=message):
        other.load(state)
    with pytest.raises(ValueError, match="of corpus="):
        TextBatches(counting(90, name="other"), context=4, seed=0).load(state)


def test_a_corpus_shorter_than_the_context_is_refused():
    assert TextBatches(counting(65), context=64, seed=0).windows == 1
    with pytest.raises(ValueError, match=r"train split of counting has 64 tokens, shorter .*; try context=63 or less"):
        TextBatches(counting(64), context=64, seed=0)
    with pytest.raises(ValueError, match=r"has 0 tokens.*give a longer text"):
        TextBatches(counting(1), "validation", context=64, seed=0)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank, world):
    with pytest.raises(ValueError, match=f"got rank={rank}, world={world}"):
        TextBatches(counting(9), context=4, seed=0, rank=rank, world=world)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="context must be a positive integer, got 0"):
        TextBatches(counting(9), context=0, seed=0)
    with pytest.raises(ValueError, match="unknown split 'test'; try one of train, validation"):
        TextBatches(counting(9), "test", context=1, seed=0)
