"""Ctrl-C and SIGTERM, turned into a wish that is read between two steps: of one run, or of a sweep."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Asked:
    """Whether somebody asked us to stop, and how."""

    name: str | None = None


@contextmanager
def catch_signals() -> Iterator[Asked]:
    """Ctrl-C and SIGTERM are noted. A second Ctrl-C ends everything at once."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, _: Any) -> None:
        if asked.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.name = "interrupted" if number == signal.SIGINT else "terminated"

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
