"""The cache holds complete folders only, after kills, with concurrent processes, and with a full disk."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.data.corpora import write_files
from trimtab.data import cache as cache_module
from trimtab.data import cache_dir, open_corpus
from trimtab.data import corpus as corpus_module
from trimtab.data.cache import build_folder, read_meta, write_json

forked = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_files(tmp_path / "text", {f"{i}.txt": f"text {i}\n" * 50 for i in range(20)})


def fill(folder: Path) -> dict[str, Any]:
    (folder / "done").write_text("all")
    return {}


def start(target: Any, *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    process.start()
    return process


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "trimtab"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "trimtab"
    assert cache_dir(tmp_path / "mine") == tmp_path / "mine"


def test_corpora_use_it_by_default(monkeypatch, tmp_path, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    opened = open_corpus(text)
    assert all(path.is_relative_to(tmp_path / "xdg" / "trimtab") for path in opened.files)


def _open_and_report(text: Path, cache: Path, barrier: Any, queue: Any) -> None:
    barrier.wait(timeout=20)
    opened = open_corpus(text, cache=cache)
    opened.verify()
    queue.put((opened.sha256, len(opened.tokens("train")), os.getpid()))


@forked
@pytest.mark.parametrize("locks", [True, False])
def test_processes_that_start_at_once_share_one_folder(locks, text, tmp_path, monkeypatch):
    if not locks:

        def refuse(*_: Any, **__: Any) -> None:
            raise NotImplementedError("no locks here")

        monkeypatch.setattr(cache_module.FileLock, "acquire", refuse)
    context = multiprocessing.get_context("fork")
    barrier, queue, cache = context.Barrier(4), context.Queue(), tmp_path / "cache"
    processes = [start(_open_and_report, text, cache, barrier, queue) for _ in range(4)]
    found = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    assert len({(sha256, count) for sha256, count, _ in found}) == 1
    assert len({pid for *_, pid in found}) == 4
    assert [path for path in (cache / "corpora").iterdir() if path.is_dir()] == [
        next(iter(open_corpus(text, cache=cache).files)).parent
    ]


def test_the_second_waits_and_does_not_work_twice(tmp_path):
    filled: list[str] = []

    def slowly(folder: Path) -> dict[str, Any]:
        filled.append(folder.name)
        time.sleep(0.1)
        return fill(folder)

    threads = [threading.Thread(target=build_folder, args=(tmp_path / "a", slowly)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1
    assert read_meta(tmp_path / "a") == {"bytes": {"done": 3}}


def _hang(target: Path, connection: Any) -> None:
    def half(folder: Path) -> dict[str, Any]:
        (folder / "train.bin").write_bytes(b"half")
        connection.send("writing")
        time.sleep(60)
        return {}

    build_folder(target, half)


@forked
def test_a_killed_process_leaves_nothing_that_counts(tmp_path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = start(_hang, tmp_path / "a", theirs)
    assert ours.poll(20)
    assert ours.recv() == "writing"
    os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=20)
    assert not (tmp_path / "a").exists()
    assert len(list(tmp_path.glob("*.tmp"))) == 1
    build_folder(tmp_path / "a", fill)  # the lock died with its holder
    assert read_meta(tmp_path / "a") == {"bytes": {"done": 3}}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_failure_leaves_nothing(tmp_path):
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("x")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build_folder(tmp_path / "a", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]


@pytest.mark.parametrize("name", ["train.bin", "meta.json", "tokenizer.json"])
def test_a_cut_or_missing_file_is_made_again(name, text, tmp_path):
    first = open_corpus(text, cache=tmp_path / "cache")
    expected = first.tokens("train").tolist()
    file = next(iter(first.files)).parent / name
    for damage in (lambda: os.truncate(file, file.stat().st_size // 2), file.unlink):
        damage()
        again = open_corpus(text, cache=tmp_path / "cache")
        again.verify()
        assert again.tokens("train").tolist() == expected


def test_a_flipped_bit_is_found_by_verify(text, tmp_path):
    opened = open_corpus(text, cache=tmp_path)
    opened.verify()
    file = next(iter(opened.files))
    raw = bytearray(file.read_bytes())
    raw[7] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=r"train\.bin has changed: sha256 .*; delete its folder"):
        open_corpus(text, cache=tmp_path).verify()


def test_a_cache_that_cannot_be_written_is_one_clear_line(text, tmp_path):
    blocked = write_files(tmp_path, {"file": "x"}) / "file"
    for cache in (blocked, blocked / "below"):
        with pytest.raises(ValueError, match=r"cannot write the cache .*; give another folder with cache=") as raised:
            open_corpus(text, cache=cache)
        assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_clear_line(text, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ValueError, match=r"cannot write the cache .*: Permission denied; give another folder"):
        open_corpus(text, cache=tmp_path / "closed")


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(text, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module, "write_json", full)
    with pytest.raises(ValueError, match=r"cannot write the cache .*: No space left on device"):
        open_corpus(text, cache=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "corpora").iterdir()] == [".lock"]


def test_a_missing_source_file_is_not_reported_as_a_cache_error(text, tmp_path, monkeypatch):
    def vanish(*_: object) -> None:
        open(text / "gone.txt")  # noqa: SIM115

    monkeypatch.setattr(corpus_module, "_fill", vanish)
    with pytest.raises(FileNotFoundError, match=r"gone\.txt"):
        open_corpus(text, cache=tmp_path / "cache")


def test_json_is_replaced_whole(tmp_path, monkeypatch):
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ValueError, match="cannot write the cache"):
        write_json(tmp_path / "a.json", {"a": 2})
    assert cache_module.read_json(tmp_path / "a.json") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
