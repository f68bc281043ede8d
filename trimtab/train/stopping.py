"""Ctrl-C and SIGTERM as a request that a run or a sweep reads between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trimtab.runs import End


class StopRequest:
    name: End | None = None  # the reason, once there is a request


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Record Ctrl-C and SIGTERM. A second Ctrl-C raises KeyboardInterrupt at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield request
        return

    def record(number: int, _: Any) -> None:
        if request.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.name = End.INTERRUPTED if number == signal.SIGINT else End.TERMINATED

    before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
