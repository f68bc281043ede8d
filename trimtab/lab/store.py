"""Where a sweep's files are: a folder, or any address that fsspec knows (s3://..., gs://..., file://..., memory://...).

A folder is used as it is. For an address, cells run in a scratch folder on this machine (in the user's cache) and are
copied when they are complete, `result.json` last: a cell that has one there is whole. Unfinished cells and their
checkpoints stay in the scratch folder, so a killed sweep goes on where it stopped on the machine that it ran on, and
with whole cells on any other.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.data.cache import cache_dir
from trimtab.extras import load_extra

LAST = "result.json"


@dataclass(frozen=True)
class Store:
    """Files of one sweep. `local` is where they are read and written on this machine."""

    local: Path
    url: str | None = None

    def pull(self) -> None:
        """Get whole cells, and what lies beside them. Checkpoints stay where they are: no reader needs them."""
        if self.url is None:
            return
        fs, root = connect(self.url)
        files = _list(fs, root)
        cells = {name.rpartition("/")[0] for name in files if name.startswith("cells/") and _leaf(name) == LAST}
        wanted = [name for name in files if _is_wanted(name, cells)]
        for name in sorted(wanted, key=lambda name: (_leaf(name) == LAST, name)):
            # What belongs to a whole cell does not change any more.
            if "/" not in name or not _is_here(fs, files[name], self.local / name):
                _get(fs, files[name], self.local / name)

    def pull_cell(self, folder: Path) -> None:
        """Get a run that a worker on another machine has put there."""
        if self.url is not None:
            fs, root = connect(self.join(folder))
            for name, path in sorted(_list(fs, root).items(), key=lambda item: (item[0] == LAST, item)):
                if not name.startswith("checkpoints/"):
                    _get(fs, path, self.local / folder / name)

    def has(self, folder: Path) -> bool:
        """Whether a complete run is where it belongs."""
        if self.url is None:
            return (self.local / folder / LAST).exists()
        fs, root = connect(self.join(folder))
        return bool(fs.exists(f"{root}/{LAST}"))

    def push(self, *names: str) -> None:
        """Copy files that lie beside the cells, such as study.json and report.html."""
        if self.url is not None:
            fs, root = connect(self.url)
            for name in names:
                _put(fs, self.local / name, f"{root}/{name}")

    def push_cell(self, folder: Path) -> None:
        """Copy a complete run; `folder` is relative."""
        if self.url is not None:
            push_run(self.local / folder, self.join(folder))

    def join(self, folder: Path) -> str:
        """The address of something inside."""
        return f"{(self.url or str(self.local)).rstrip('/')}/{folder.as_posix()}"


def open_store(out: str | Path) -> Store:
    """The store of a path or an address."""
    text = str(out)
    if isinstance(out, Path) or "://" not in text:
        return Store(Path(out).expanduser())
    connect(text)  # a wrong address is better refused before the work than after it
    return Store(cache_dir() / "lab" / hashlib.sha256(text.encode()).hexdigest()[:16], text)


def fetch(out: str | Path) -> Path:
    """A folder on this machine with everything that a reader of `out` needs."""
    store = open_store(out)
    store.pull()
    return store.local


def publish(out: str | Path, *names: str) -> None:
    """Copy files from the folder that `fetch` gave to where they belong; nothing to do for a folder."""
    open_store(out).push(*names)


def push_run(folder: Path, url: str) -> None:
    """Copy a run folder to an address, `result.json` last."""
    fs, root = connect(url)
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    for path in sorted(files, key=lambda path: (path.name == LAST, path)):
        _put(fs, path, f"{root}/{path.relative_to(folder).as_posix()}")


def connect(url: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    fsspec = load_extra("fsspec", extra="lab", purpose=f"writing to {url}")
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{url} cannot be used: {error}") from None
    return fs, str(root).rstrip("/")


def _list(fs: Any, root: str) -> dict[str, str]:
    """All files under a path, by their names from there."""
    return {name[len(root) :].strip("/"): name for name in fs.find(root)} if fs.exists(root) else {}


def _leaf(name: str) -> str:
    return name.rpartition("/")[2]


def _is_wanted(name: str, cells: set[str]) -> bool:
    if not name.startswith("cells/"):
        return "/" not in name
    return "/checkpoints/" not in name and name.rpartition("/")[0] in cells


def _is_here(fs: Any, source: str, target: Path) -> bool:
    return target.exists() and target.stat().st_size == fs.size(source)


def _get(fs: Any, source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    fs.get_file(source, str(temporary))
    temporary.replace(target)


def _put(fs: Any, source: Path, target: str) -> None:
    fs.makedirs(target.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(source), target)
