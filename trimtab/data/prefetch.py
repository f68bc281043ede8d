"""Prepare batches ahead in a thread.

    thread:   next -> [batch, state after it] -> queue (depth) -> next -> ...
    caller:   next() returns the oldest; state() is the state after the batch returned last

The thread assumes that the next batch has the size of the last one. If not, as during batch-size warm-up, prepared
batches are dropped and the source returns to the caller's position.
"""

import time
import weakref
from collections import deque
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol


class Batches(Protocol):
    """A source that can be prefetched, such as `TextBatches` and `PairBatches`."""

    def next(self, batch: int) -> dict[str, Any]: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


class Prefetcher:
    """The same batches in the same order, prepared `depth` ahead. Do not use the source until `close`.

    Args:
        depth: number of batches kept ready.
        batch: size of the first batch, to prepare it before the first `next`.

    Attributes:
        waited_s: seconds that the caller has waited in `next`.
        dropped: number of batches prepared in the wrong size.
    """

    def __init__(self, batches: Batches, depth: int = 2, *, batch: int | None = None) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}; 2 is the default")
        self.batches, self.depth = batches, depth
        self.waited_s, self.dropped = 0.0, 0
        self._state = batches.state()
        self._size, self._closed = batch, False
        self._prepared: deque[Future[tuple[dict[str, Any], dict[str, Any]]]] = deque()
        self._requests: SimpleQueue[tuple[Future[Any], int] | None] = SimpleQueue()  # None ends the thread
        # A daemon, unlike the threads of an executor: a source that never returns does not delay exit.
        self._thread = Thread(target=_prepare, args=(batches, self._requests), name="trimtab-prefetch", daemon=True)
        self._thread.start()
        self._end_thread = weakref.finalize(self, self._requests.put, None)
        self._fill()

    def next(self, batch: int) -> dict[str, Any]:
        """The next batch. Raises the source's exception for this batch; calling again retries it."""
        begun = time.perf_counter()
        if self._closed:
            raise ValueError("this prefetcher is closed; create a new one")
        if batch != self._size:
            self._rewind(self._state)
            self._size = batch
        self._fill()
        error = self._prepared[0].exception()
        if error is not None:
            self._rewind(self._state)
            raise error
        prepared, self._state = self._prepared.popleft().result()
        self.waited_s += time.perf_counter() - begun
        self._fill()
        return prepared

    def state(self) -> dict[str, Any]:
        """The position of the caller, not of the prepared batches."""
        return dict(self._state)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        size = self._size
        self._rewind(state)
        self._state, self._size = dict(state), size
        self._fill()

    def close(self) -> None:
        """Stop the thread and put the source at the caller's position. Closing again has no effect."""
        if not self._closed:
            self._closed = True
            for future in self._prepared:
                future.cancel()
            self._end_thread()
            self._thread.join()
            self.batches.load(self._state)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        while self._size is not None and len(self._prepared) < self.depth:
            self._prepared.append(Future())
            self._requests.put((self._prepared[-1], self._size))

    def _rewind(self, state: dict[str, Any]) -> None:
        """Drop prepared batches and load a state into the source. The size of the next batch is then unknown."""
        self._size = None
        for future in self._prepared:
            future.cancel()
        wait(self._prepared)
        self.dropped += sum(not future.cancelled() and future.exception() is None for future in self._prepared)
        self._prepared.clear()
        self.batches.load(state)


def _prepare(batches: Batches, requests: "SimpleQueue[tuple[Future[Any], int] | None]") -> None:
    """The thread. It has no reference to the prefetcher, which can therefore be collected without `close`."""
    while (request := requests.get()) is not None:
        future, size = request
        if future.set_running_or_notify_cancel():
            try:
                future.set_result((batches.next(size), batches.state()))
            except BaseException as error:
                future.set_exception(error)
