"""Files of others: only regular files are opened, JSON is checked while it is decoded, names are shown escaped.

A name may lead to a pipe, which would block, to a device, which may never end, or in a circle. Whatever cannot be read
is a ValueError in one line.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from trimtab.screen import printable

_PIECE = 1 << 20  # bytes
LONGEST = 500  # characters of a name or a reason in a message; a name in a tar file can have millions
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

T = TypeVar("T")


def show(text: object) -> str:
    """The text in one line, with control characters as visible escapes: they would control a terminal."""
    line = str(text)
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
    return printable(line)


def expand_home(path: str | Path) -> Path:
    """Replace a leading `~` or `~name`."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{show(path)} starts with a home folder that is unknown; give a path without ~") from None


def not_a_file(path: Path) -> str:
    """Why a path is not a regular file; "" if it is one."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        return getattr(error, "strerror", None) or str(error)
    return "" if kind == stat.S_IFREG else f"it is {KINDS.get(kind, 'something else')}, not a file"


@contextmanager
def open_file(path: Path, what: str = "") -> Iterator[BinaryIO]:
    """Open a regular file to read it. An OSError, also one while it is read, becomes a ValueError with the path."""
    try:
        wrong = not_a_file(path)
        if wrong:
            raise OSError(errno.EINVAL, wrong)
        with open(path, "rb", opener=_no_wait) as file:
            yield file
    except OSError as error:
        raise ValueError(f"cannot read {what}{show(path)}: {error.strerror or error}") from error


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open_file(path) as file:
        while chunk := file.read(_PIECE):
            digest.update(chunk)
    return digest.hexdigest()


def require_json(path: Path, kind: type[T], what: str) -> T:
    """Decode a JSON file into a type. ValueError if it cannot be read, is not JSON or has another shape."""
    with open_file(path, f"the {what} ") as file:
        try:
            return msgspec.json.decode(file.read(), type=kind)
        except (ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{show(path)} is not a {what}: {show(error)}") from error


def _no_wait(path: str, flags: int) -> int:
    # If the file was replaced by a pipe after the check, opening it must not wait for a writer.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
