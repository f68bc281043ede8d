"""Prepare batches ahead in a thread.

    thread:   next -> [batch, state after it] -> queue (depth) -> next -> ...
    caller:   next() returns the oldest; state() is the state after the batch returned last

The thread assumes that the next batch has the size of the last one. If not, as during batch-size warm-up, prepared
batches are dropped and the source returns to the caller's position.
"""

import threading
import time
from collections import deque
from types import TracebackType
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
        self._ready: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()
        self._error: BaseException | None = None
        self._size, self._busy, self._closed = batch, False, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="trimtab-prefetch", daemon=True)
        self._thread.start()

    def next(self, batch: int) -> dict[str, Any]:
        """The next batch. Raises the source's exception for this batch; calling again retries it."""
        begun = time.perf_counter()
        with self._changed:
            if self._closed:
                raise ValueError("this prefetcher is closed; create a new one")
            if batch != self._size:
                self._rewind(self._state, batch)
            self._changed.wait_for(lambda: self._ready or self._error is not None)
            if not self._ready:
                error, self._error = self._error, None
                assert error is not None
                self._rewind(self._state, None)
                raise error
            prepared, self._state = self._ready.popleft()
            self.waited_s += time.perf_counter() - begun
            self._changed.notify_all()
        return prepared

    def state(self) -> dict[str, Any]:
        """The position of the caller, not of the prepared batches."""
        return dict(self._state)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        with self._changed:
            self._rewind(state, self._size)
            self._state = dict(state)

    def close(self) -> None:
        """Stop the thread and put the source at the caller's position. Closing again has no effect."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.batches.load(self._state)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _rewind(self, state: dict[str, Any], size: int | None) -> None:
        """Drop prepared batches and load a state into the source. The caller holds the lock."""
        self._size = None
        self._changed.wait_for(lambda: not self._busy)
        self.dropped += len(self._ready)
        self._ready.clear()
        self._error = None
        self.batches.load(state)
        self._size = size
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_work)
                if self._closed:
                    return
                size = self._size
                assert size is not None
                self._busy = True
            item, error = None, None
            try:
                item = self.batches.next(size), self.batches.state()
            except BaseException as raised:  # raised again in the caller, also KeyboardInterrupt
                error = raised
            with self._changed:
                self._busy = False
                if item is not None:
                    self._ready.append(item)
                self._error = error
                self._changed.notify_all()

    def _may_work(self) -> bool:
        return self._closed or (self._size is not None and self._error is None and len(self._ready) < self.depth)
