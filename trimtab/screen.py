"""Text for a terminal: escaped, and written to a standard output that a run does not depend on."""

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def printable(text: str) -> str:
    """The text with control characters as visible escapes such as \\x1b: they would control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Screen(io.TextIOBase):
    """A text stream that drops its text after the first error, such as a full disk or a closed pipe; `error` is that
    error. Characters that the stream cannot encode are written as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        safe = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._attempt(lambda: self.stream.write(safe))
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, work: Callable[[], Any]) -> None:
        try:
            if self.error is None:
                work()
        except OSError as error:
            self.error = error
        except ValueError as error:  # the stream was closed
            self.error = OSError(str(error))

    def isatty(self) -> bool:
        return self.error is None and not self.stream.closed and self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    @property
    def buffer(self) -> Any:
        return self.stream.buffer


def open_console() -> "Console":
    """A console on standard output, for the progress of a run."""
    from rich.console import Console

    out: Any = sys.stdout if isinstance(sys.stdout, Screen) else Screen(sys.stdout)
    return Console(file=out)
