"""Where the files of a sweep are: a folder, or an fsspec address (s3://..., gs://..., file://..., memory://...).

A folder is used directly. For an address, cells run in a scratch folder on this machine (in the user's cache) and are
copied when they are complete, the result file last: a cell that has one at the address is complete there. Unfinished
cells and their checkpoints stay in the scratch folder, so a killed sweep continues from them on the same machine, and
from the complete cells on any other.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trimtab.data.cache import cache_dir
from trimtab.hints import load_extra
from trimtab.runs import RunError
from trimtab.runs.folder import CELLS, CHECKPOINTS, FAILURES, FILES, RESULT, STUDY

_BESIDE = (STUDY, FAILURES, *FILES)  # files beside the cells that are read


@dataclass(frozen=True)
class Store:
    """The files of one sweep. `local` is the folder on this machine in which they are read and written."""

    local: Path
    url: str | None = None

    def pull(self) -> None:
        """Copy the study and its complete cells, without checkpoints, to this machine."""
        if self.url is None:
            return
        with _explained(self.url):
            fs, root = connect(self.url)
            files = _list(fs, root)
            if files and not {*files} & {*_BESIDE}:
                raise RunError(f"{self.url} holds {min(files)} and no {STUDY}, so it is not ours; use another address")
            complete = {_parent(name) for name in files if name.startswith(f"{CELLS}/") and _is_result(name)}
            for name in _result_last(files):
                if name not in _BESIDE and _parent(name) not in complete:
                    continue
                target = self.local / name
                # The files of a complete cell do not change.
                if "/" in name and target.exists() and target.stat().st_size == fs.size(files[name]):
                    continue
                self._get(fs, files[name], name)

    def pull_cell(self, folder: Path) -> None:
        """Copy a run that a worker on another machine has written to the address."""
        if self.url is not None:
            with _explained(self.url):
                fs, root = connect(self.join(folder))
                files = _list(fs, root)
                for name in _result_last(files):
                    if not name.startswith(f"{CHECKPOINTS}/"):
                        self._get(fs, files[name], f"{folder.as_posix()}/{name}")

    def _get(self, fs: Any, source: str, name: str) -> None:
        """Copy a file from the address; `name` is its path below `local`."""
        target = self.local / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(self.local.resolve()):
            raise RunError(f"{target.parent} is a link that leads out of {self.local}; remove it")
        temporary = target.with_name(f".{target.name}.tmp")
        fs.get_file(source, str(temporary))
        temporary.replace(target)

    def has(self, folder: Path) -> bool:
        """Whether a complete run is stored at its final place."""
        if self.url is None:
            return (self.local / folder / RESULT).exists()
        fs, root = connect(self.join(folder))
        return bool(fs.exists(f"{root}/{RESULT}"))

    def push(self, *names: str) -> None:
        """Copy files beside the cells, such as the study and the report, to the address."""
        if self.url is not None:
            fs, root = connect(self.url)
            for name in names:
                _put(fs, self.local / name, f"{root}/{name}")

    def push_cell(self, folder: Path) -> None:
        """Copy a complete run to the address; `folder` is relative."""
        if self.url is not None:
            push_run(self.local / folder, self.join(folder))

    def join(self, folder: Path) -> str:
        """The address of a folder inside."""
        return f"{(self.url or str(self.local)).rstrip('/')}/{folder.as_posix()}"


def open_store(out: str | Path) -> Store:
    """The store of a path or an address."""
    text = str(out)
    if isinstance(out, Path) or "://" not in text:
        return Store(Path(out).expanduser())
    connect(text)  # refuse a wrong address before training, not after
    return Store(cache_dir() / "lab" / hashlib.sha256(text.encode()).hexdigest()[:16], text)


def fetch(out: str | Path) -> Path:
    """A folder on this machine with everything that a reader of `out` needs."""
    store = open_store(out)
    store.pull()
    return store.local


def publish(out: str | Path, *names: str) -> None:
    """Copy files from the folder that `fetch` returned to the address; does nothing for a folder."""
    open_store(out).push(*names)


def push_run(folder: Path, url: str) -> None:
    """Copy a run folder to an address, the result file last."""
    fs, root = connect(url)
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    for name in _result_last(path.relative_to(folder).as_posix() for path in paths):
        _put(fs, folder / name, f"{root}/{name}")


def connect(url: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    fsspec = load_extra("fsspec", extra="lab", purpose=f"writing to {url}")
    with _explained(url):
        fs, root = fsspec.core.url_to_fs(url)
    return fs, str(root).rstrip("/")


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """The error of a file system in one line. Each has exceptions of its own."""
    try:
        yield
    except (OSError, RunError):
        raise
    except Exception as error:
        raise RunError(f"{url} cannot be used: {error}") from error


def _list(fs: Any, root: str) -> dict[str, str]:
    """All files under a path, by their relative names. Raises RunError if a name leads out of the path."""
    found = {name[len(root) :].strip("/"): name for name in fs.find(root)} if fs.exists(root) else {}
    for name in found:
        if ".." in PurePosixPath(name).parts or "\\" in name or ":" in name.partition("/")[0]:
            raise RunError(f"{root or 'the address'} has a file {name!r}, which leads out of its folder")
    return found


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _is_result(name: str) -> bool:
    return name.rpartition("/")[2] == RESULT


def _result_last(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (_is_result(name), name))


def _put(fs: Any, source: Path, target: str) -> None:
    fs.makedirs(target.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(source), target)
