"""Files of others: pipes, devices, circles of links, unknown homes, damaged JSON and names with control characters."""

import io
import os
import pwd
import socket
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.data.corpora import assert_refused, write_files
from trimtab.data import cache as cache_module
from trimtab.data import cache_dir, load_tokenizer, open_corpus, open_pairs, read_shards
from trimtab.data.files import hash_file

ESCAPE = "\x1b[31mred\x07"
SPECIAL = ["pipe", "socket", "device", "loop", "nowhere", "folder"]


def make_special(kind: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # the address of a socket is limited to 108 bytes
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
        os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "nowhere": "missing"}[kind])
    return path


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_read(kind, tmp_path):
    cache = tmp_path / "cache"
    text = write_files(tmp_path / "text", {"a.txt": "one two"})
    if kind != "folder":
        with assert_refused(r"text\.pipe holds no text"):
            open_corpus(make_special(kind, tmp_path / "text.pipe"), cache=cache)
        with assert_refused(r"no token file at .*x\.bin: "):
            open_corpus(make_special(kind, tmp_path / "x.bin"), cache=cache)
    special = make_special(kind, tmp_path / "special.json")
    with assert_refused(r"cannot read the tokenizer .*special\.json"):
        load_tokenizer(special)
    with assert_refused(r"cannot read .*special\.json"):
        open_corpus(text, tokenizer=f"file:{special}", cache=cache)
    with assert_refused(r"cannot read .*special\.json"):
        hash_file(special)
    shard = make_special(kind, tmp_path / "shards" / "a.tar")
    with assert_refused(r"cannot read .*a\.tar"):
        list(read_shards([shard]))
    for path in (shard, shard.parent):
        with assert_refused("no shard at"):
            open_pairs(path, cache=cache)
    nano = write_files(tmp_path / "nano", {"train.bin": b"abcd", "val.bin": b"ab"})
    for name in ("meta.json", "tokenizer.json"):
        make_special(kind, nano / name)
        with assert_refused(rf"cannot read .*{name}"):
            open_corpus(nano, cache=cache)
        (nano / name).rmdir() if kind == "folder" else (nano / name).unlink()


@pytest.mark.parametrize("kind", SPECIAL[:-1])
def test_what_is_no_file_in_a_folder_of_text_is_left_out_and_named(kind, tmp_path):
    folder = write_files(tmp_path / "text", {"a.txt": "one", "b.txt": "two"})
    make_special(kind, folder / "c.txt")
    for _ in range(2):  # the second time from the cache
        opened = open_corpus(folder, cache=tmp_path / "cache")
        assert [name.split()[0] for name in opened.skipped] == ["c.txt"]
        assert len(opened.tokens("train")) + len(opened.tokens("validation")) == 6


def test_an_unreadable_file_is_one_clear_line(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "text", {"a.txt": "one", "b.txt": "two"})
    opened = os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).endswith("b.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    for path in (folder, folder / "b.txt"):
        with assert_refused(r"cannot read .*b\.txt: Permission denied"):
            open_corpus(path, cache=tmp_path / "cache")


def test_an_unreadable_folder_is_one_clear_line(tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with assert_refused("cannot read .*: Permission denied"):
        open_corpus(tmp_path, cache=tmp_path / "cache")


def test_folders_may_be_deeper_than_the_stack(tmp_path):
    deep = tmp_path / "text"
    deep.mkdir()
    folder = os.open(deep, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    write_files(deep, {"a.txt": "one two"})
    try:
        assert len(open_corpus(deep, cache=tmp_path / "cache").tokens("train")) == 6
    finally:
        subprocess.run(["rm", "-rf", deep], check=True)  # pytest would remove it recursively


def test_a_name_that_is_too_long_is_one_clear_line(tmp_path):
    for name in ("x" * 5000, "x" * 5000 + ".bin", "x\0y"):
        with assert_refused("no corpus at|no token file at"):
            open_corpus(name, cache=tmp_path)
        with assert_refused("no pairs at|no shard at"):
            open_pairs(f"{name}.tar", cache=tmp_path)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No HOME, and no entry for the user in the system's list."""

    def unknown(user: object) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("older", [True, False])
def test_without_a_home_the_error_says_how_to_choose_a_folder(older, homeless, monkeypatch):
    if older:  # as platformdirs did before it raised RuntimeError
        monkeypatch.setattr(cache_module, "user_cache_path", lambda *_, **__: Path("~/.cache/trimtab"))
    with assert_refused(r"no home folder for the cache \(HOME=None\); set XDG_CACHE_HOME, or give cache="):
        cache_dir()
    with assert_refused("no home folder for the cache"):
        open_corpus("stdlib")
    with assert_refused("~ starts with a home folder that is unknown"):
        cache_dir("~")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/.cache")
    with assert_refused("starts with a home folder that is unknown"):
        open_pairs("shapes", size=8)
    assert not list(homeless.iterdir())


def test_a_home_that_cannot_be_written_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(write_files(tmp_path, {"file": "x"}) / "file"))
    with assert_refused(r"cannot write the cache .*; give another folder with cache=..., or set XDG_CACHE_HOME"):
        open_pairs("shapes", size=8)


def test_the_home_of_an_unknown_user_is_refused(tmp_path):
    for call in (
        lambda: open_corpus("~nobody123/x", cache=tmp_path),
        lambda: open_corpus("stdlib", cache="~nobody123/x"),
        lambda: open_pairs("shapes", cache="~nobody123/x"),
    ):
        with assert_refused("~nobody123/x starts with a home folder that is unknown; give a path without ~"):
            call()


def test_names_are_shown_without_control_characters(tmp_path):
    folder = write_files(tmp_path / ESCAPE, {"a.txt": b"\xff", "b.bin": b"abc", "c/train.bin": b"ab"})
    cache = tmp_path / "cache"
    for path in (folder / "a.txt", folder / "b.bin", folder / "c", folder / "missing"):
        with assert_refused(r"\\x1b\[31mred\\x07"):
            open_corpus(path, cache=cache)
    with assert_refused(r"\\x1b"):
        load_tokenizer(folder / "a.txt")
    with assert_refused(r"\\x1b"):
        open_pairs(folder, cache=cache)
    with assert_refused(r"\\x1b"):
        open_corpus("stdlib", cache=folder / "a.txt")
    for name, content in ((f"{ESCAPE}.txt", b"\xff"), (f"{ESCAPE}.{ESCAPE}", b""), (f"../{ESCAPE}", b"")):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        with assert_refused(r"\\x1b"):
            open_pairs(tmp_path / "a.tar", cache=cache)
    good = write_files(tmp_path / "good", {"a.txt": "one", "b.txt": "two", f"{ESCAPE}.txt": b"\xff"})
    assert open_corpus(good, cache=cache).skipped == ("\\x1b[31mred\\x07.txt (invalid start byte)",)


def test_names_that_are_not_utf8_are_names(tmp_path):
    folder = write_files(tmp_path / "text", {"a.txt": "one", "b.txt": "two"})
    for name, content in ((b"\xff.txt", b"three"), (b"\xfe.txt", b"\xff")):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(content)
    for _ in range(2):
        opened = open_corpus(folder, cache=tmp_path / "cache")
        assert opened.skipped == ("\\udcfe.txt (invalid start byte)",)
        assert {len(opened.tokens(split)) for split in ("train", "validation")} <= {3, 5, 7, 9}
