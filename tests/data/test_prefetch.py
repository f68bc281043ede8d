"""The prefetcher gives the batches, positions and errors of its source, in the same order."""

import gc
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import assert_same
from tests.data.corpora import counting
from trimtab.data import Prefetcher, TextBatches

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def text(seed: int = 0) -> TextBatches:
    return TextBatches(counting(90), context=4, seed=seed)


class Slow:
    """Batches that take their time, and fail on request."""

    def __init__(self, seconds: float = 0.0, fails_at: int | None = None) -> None:
        self.seconds, self.fails_at, self.position = seconds, fails_at, 0

    def next(self, batch: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        if self.position == self.fails_at:
            raise OSError(f"no batch {self.position}")
        self.position += 1
        return {"number": self.position}

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, depth=st.integers(1, 4), first=st.none() | st.integers(1, 5))
def test_batches_and_positions_are_those_of_the_source(sizes, depth, first):
    """Also when the size changes from call to call, which the thread cannot know."""
    plain = text()
    with Prefetcher(text(), depth, batch=first) as ahead:
        assert ahead.state() == plain.state()
        for size in sizes:
            assert_same(ahead.next(size)["tokens"], plain.next(size)["tokens"])
            assert ahead.state() == plain.state()


@settings(max_examples=20, deadline=None)
@given(before=SIZES, after=SIZES)
def test_resuming_behind_a_prefetcher_changes_nothing(before, after):
    with Prefetcher(text(), 3) as ahead, Prefetcher(text(), 2, batch=4) as resumed:
        for size in before:
            ahead.next(size)
        resumed.next(2)
        resumed.load(ahead.state())
        assert resumed.state() == ahead.state()
        for size in after:
            assert_same(resumed.next(size)["tokens"], ahead.next(size)["tokens"])


def test_batches_are_made_while_the_caller_works():
    """Making one takes 10 ms and a step 30: only the first is waited for."""
    with Prefetcher(Slow(0.01)) as ahead:
        ahead.next(1)
        first = ahead.waited_s
        assert first > 0.009
        for _ in range(8):
            time.sleep(0.03)
            ahead.next(1)
        # A source without a thread would have made the caller wait 80 ms; half of it is for a loaded machine.
        assert ahead.waited_s - first < 0.04


def test_the_first_batch_can_be_ready_too():
    with Prefetcher(Slow(0.1), batch=1) as ahead:
        time.sleep(0.3)
        ahead.next(1)
        assert ahead.waited_s < 0.05


def test_waiting_is_measured():
    with Prefetcher(Slow(0.02)) as ahead:
        begun = time.perf_counter()
        for _ in range(5):
            ahead.next(1)
        assert 0.08 < ahead.waited_s < time.perf_counter() - begun


def test_no_more_than_depth_are_prepared():
    source = Slow()
    with Prefetcher(source, depth=3, batch=1) as ahead:
        for expected in (3, 4):
            time.sleep(0.15)  # for as many as it likes
            assert source.position == expected
            ahead.next(1)


def test_batches_of_a_wrong_size_are_counted():
    with Prefetcher(Slow(), depth=2, batch=1) as ahead:
        time.sleep(0.15)
        assert ahead.next(2)["number"] == 1
        assert ahead.dropped == 2


def test_an_error_is_raised_at_its_batch_and_can_be_retried():
    source = Slow(fails_at=2)
    with Prefetcher(source, depth=4) as ahead:
        assert [ahead.next(1)["number"] for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="no batch 2"):
                ahead.next(1)
            assert ahead.state() == {"position": 2}
        source.fails_at = None
        assert ahead.next(1)["number"] == 3


def test_a_refused_batch_is_refused_here_too():
    with Prefetcher(TextBatches(counting(90), context=4, seed=0, world=2)) as ahead:
        with pytest.raises(ValueError, match="batch=3 does not split"):
            ahead.next(3)
        assert len(ahead.next(4)["tokens"]) == 2


def test_a_refused_state_leaves_the_position():
    plain = text()
    with Prefetcher(text()) as ahead:
        ahead.next(2), plain.next(2)
        with pytest.raises(ValueError, match="of seed=1"):
            ahead.load(text(seed=1).state())
        assert ahead.state() == plain.state()
        assert_same(ahead.next(2)["tokens"], plain.next(2)["tokens"])


def test_closing_ends_the_thread_and_resets_the_source():
    source = Slow()
    ahead = Prefetcher(source, depth=3, batch=1)
    assert ahead.next(1)["number"] == 1
    thread = next(thread for thread in threading.enumerate() if thread.name == "trimtab-prefetch")
    ahead.close()
    ahead.close()
    assert not thread.is_alive()
    assert source.position == 1
    with pytest.raises(ValueError, match="this prefetcher is closed"):
        ahead.next(1)


def test_a_source_that_never_returns_does_not_delay_the_end_of_the_program():
    code = """
import time
from trimtab.data import Prefetcher
class Hangs:
    def next(self, batch): time.sleep(600)
    def state(self): return {}
    def load(self, state): pass
ahead = Prefetcher(Hangs(), batch=1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_thread_ends_when_the_prefetcher_is_collected():
    ahead = Prefetcher(Slow(), batch=1)
    thread = next(thread for thread in threading.enumerate() if thread.name == "trimtab-prefetch")
    del ahead
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_depth_must_be_positive():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        Prefetcher(Slow(), depth=0)
