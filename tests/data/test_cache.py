"""The cache holds complete folders only, after kills, with concurrent processes, and with a full disk."""

import errno
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.corpora import write_files
from trimtab.data import cache as cache_module
from trimtab.data import cache_dir, open_corpus, open_pairs
from trimtab.data import corpus as corpus_module
from trimtab.data.cache import Meta, build_folder, read_meta, write_json
from trimtab.data.files import hash_file

forked = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_files(tmp_path / "text", {f"{i}.txt": f"text {i}\n" * 50 for i in range(20)})


def fill(folder: Path) -> dict[str, Any]:
    (folder / "done").write_text("all")
    return {}


def load(folder: Path) -> Meta | None:
    return read_meta(folder, Meta)


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

    threads = [threading.Thread(target=build_folder, args=(tmp_path / "a", slowly, load)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1
    assert load(tmp_path / "a")["files"]["done"]["bytes"] == 3


def _hang(target: Path, connection: Any) -> None:
    def half(folder: Path) -> dict[str, Any]:
        (folder / "train.bin").write_bytes(b"half")
        connection.send("writing")
        time.sleep(60)
        return {}

    build_folder(target, half, load)


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
    build_folder(tmp_path / "a", fill, load)  # the lock died with its holder
    assert load(tmp_path / "a")["files"]["done"]["bytes"] == 3
    assert not list(tmp_path.glob("*.tmp"))


def test_a_failure_leaves_nothing(tmp_path):
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("x")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build_folder(tmp_path / "a", fail, load)
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


def test_a_flipped_bit_is_found_when_the_file_is_opened_or_by_verify(text, tmp_path):
    opened = open_corpus(text, cache=tmp_path)
    opened.verify()
    file = next(iter(opened.files))
    raw = bytearray(file.read_bytes())
    raw[7] ^= 1
    stat = file.stat()
    file.write_bytes(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a faulty disk would do it
    with pytest.raises(ValueError, match=r"train\.bin has changed: sha256 .*; delete its folder"):
        open_corpus(text, cache=tmp_path).verify()
    os.utime(file)
    open_corpus(text, cache=tmp_path).verify()  # it was made again


def test_a_copy_of_the_cache_is_used_as_it_is(text, tmp_path):
    opened = open_corpus(text, cache=tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copyfile)  # with other times
    file = tmp_path / "two" / next(iter(opened.files)).relative_to(tmp_path / "one")
    before = file.stat()
    open_corpus(text, cache=tmp_path / "two").verify()
    assert file.stat() == before


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
    assert cache_module.read_json(tmp_path / "a.json", dict[str, int]) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def seal(**values: Any) -> bytes:
    return json.dumps({**values, "checksum": cache_module._checksum(values)}).encode()


SHAPES = {
    "empty": b"",
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "object": b"{}",
    "text": b'"text"',
    "lists": seal(files=[], sha256=1, skipped=2, vocab="3", dtype=[], texts={}),
    "texts": seal(files={"a": "b"}, sha256="../..", text_sha256="x", dtype="uint16", texts=[["a"]]),
    "other-texts": seal(files={}, sha256="0" * 64, texts=[["a", "b"], ["c", "d"]], skipped=[None]),
    "deep-list": b"[" * 100_000,
    "deep-object": b'{"files":' * 100_000,
    "not-utf8": b'{"sha256": "\xff"}',
    "pickle": pickle.dumps({"sha256": "0" * 64, "bytes": {}}),
}


def replace_by(kind: str, path: Path) -> None:
    """Replace a file of the cache."""
    size = path.stat().st_size
    path.unlink()
    if kind in SHAPES:
        path.write_bytes(SHAPES[kind])
    elif kind == "same-size":
        path.write_bytes(b"[" + b" " * (size - 2) + b"]")
    elif kind == "folder":
        write_files(path, {"file": "x", "below/file": "y"})
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "loop" else path.with_name("copy"))


@pytest.mark.parametrize("kind", [*SHAPES, "same-size", "folder", "pipe", "loop"])
def test_json_of_another_shape_is_made_again(kind, text, tmp_path):
    """In every JSON file of the cache: of text, of token files and of pairs."""
    cache = tmp_path / "cache"
    nano = write_files(tmp_path / "nano", {"train.bin": b"abcd", "val.bin": b"ab"})

    def opened() -> list[Any]:
        corpora = [open_corpus(path, cache=cache) for path in (text, nano)]
        pairs = open_pairs("shapes", size=8, cache=cache)
        for corpus in corpora:
            corpus.verify()
        found = [(corpus.sha256, corpus.vocab, corpus.tokens("train").tolist()) for corpus in corpora]
        return [*found, pairs.sha256, pairs.texts, np.array(pairs.pixels).tobytes()]

    expected = opened()
    files = sorted(cache.rglob("*.json"))
    assert [file.name for file in files if len(file.stem) < 20] == ["meta.json", "tokenizer.json", "meta.json"]
    assert len(files) == 5
    for file in files:
        content = re.sub(rb'"(mtime_ns|checksum)": .*', b"", file.read_bytes())
        replace_by(kind, file)
        assert opened() == expected
        assert file.is_file()
        assert not file.is_symlink()
        assert re.sub(rb'"(mtime_ns|checksum)": .*', b"", file.read_bytes()) == content
    assert not list(cache.rglob("*.tmp"))


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "link", "empty"])
@pytest.mark.parametrize("name", ["train.bin", "pixels.npy"])
def test_what_is_no_file_is_made_again(kind, name, text, tmp_path):
    cache = tmp_path / "cache"
    for _ in range(2):
        tokens = open_corpus(text, cache=cache).tokens("train").tolist()
        pixels = np.array(open_pairs("shapes", size=8, cache=cache).pixels).tobytes()
        file = next(cache.rglob(name))
        shutil.copy(file, file.with_name("copy"))  # for the link: the same bytes, but not in this folder
        replace_by(kind, file)
    assert open_corpus(text, cache=cache).tokens("train").tolist() == tokens
    assert np.array(open_pairs("shapes", size=8, cache=cache).pixels).tobytes() == pixels
    assert not list(cache.rglob("*.tmp"))


@pytest.mark.parametrize("kind", ["file", "pipe", "loop"])
def test_a_folder_of_the_cache_replaced_by_something_else_is_made_again(kind, text, tmp_path):
    tokens = open_corpus(text, cache=tmp_path / "cache").tokens("train").tolist()
    folder = next(path for path in (tmp_path / "cache" / "corpora").iterdir() if path.is_dir())
    shutil.rmtree(folder)
    folder.write_bytes(b"x")
    if kind != "file":
        replace_by(kind, folder)
    assert open_corpus(text, cache=tmp_path / "cache").tokens("train").tolist() == tokens
    assert sorted(path.suffix for path in folder.parent.iterdir()) == ["", ".lock"]


def test_names_in_the_cache_do_not_lead_out_of_it(text, tmp_path):
    """A size or a folder that a damaged file names elsewhere is never looked at."""
    cache, outside = tmp_path / "cache", write_files(tmp_path, {"outside": "secret"}) / "outside"
    expected = open_corpus(text, cache=cache)
    folder = next(iter(expected.files)).parent
    meta, listing = folder / "meta.json", next((cache / "listings").iterdir())
    for name in (str(outside), "../../../outside", "link"):
        described = json.loads(meta.read_text())
        (folder / "link").symlink_to(outside)
        del described["checksum"]
        mark = {"bytes": 6, "mtime_ns": outside.stat().st_mtime_ns, "sha256": hash_file(outside)}
        meta.write_bytes(seal(**described | {"files": {**described["files"], name: mark}}))
        assert read_meta(folder, Meta) is None
        open_corpus(text, cache=cache)
        assert set(read_meta(folder, Meta)["files"]) == {"train.bin", "validation.bin", "tokenizer.json"}  # type: ignore[index]
    shutil.copytree(folder, tmp_path / f"{'0' * 30}-bytes-v{corpus_module.FORMAT}")
    for sha256 in (f"../../{'0' * 58}", f"{expected.sha256}\n", expected.sha256.upper(), 3):
        listing.write_bytes(seal(sha256=sha256, skipped=[]))
        again = open_corpus(text, cache=cache)
        assert again.sha256 == expected.sha256
        assert list(again.files) == list(expected.files)


@pytest.mark.parametrize(
    "change",
    [
        lambda pixels: pixels.reshape(-1, 4, 16, 3),
        lambda pixels: pixels.view(np.int8),
        lambda pixels: pixels[1:],
    ],
)
def test_pixels_of_another_shape_are_drawn_again(change, tmp_path):
    """Of the right size, so that only the header of the array tells."""
    expected = np.array(open_pairs("shapes", size=8, cache=tmp_path).pixels)
    file = next(tmp_path.rglob("pixels.npy"))
    size = file.stat().st_size
    np.save(file, change(expected))
    with open(file, "ab") as padded:
        padded.write(bytes(size - file.stat().st_size))
    assert (open_pairs("shapes", size=8, cache=tmp_path).pixels == expected).all()


def test_garbage_in_place_of_pixels_is_drawn_again(tmp_path):
    expected = np.array(open_pairs("shapes", size=8, cache=tmp_path).pixels)
    file = next(tmp_path.rglob("pixels.npy"))
    file.write_bytes(pickle.dumps([1]).ljust(file.stat().st_size, b"("))
    assert (open_pairs("shapes", size=8, cache=tmp_path).pixels == expected).all()
