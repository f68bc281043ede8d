"""Corpora: lossless, split by hash, identified by sha256, refused with one line."""

import hashlib
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import documents, write_files
from trimtab.data import TextBatches, open_corpus
from trimtab.data import corpus as corpus_module
from trimtab.data import sources as sources_module
from trimtab.data.sources import cut_pieces, find_files

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_the_standard_library_is_a_corpus(shared):
    begun = time.perf_counter()
    first = open_corpus(cache=shared)
    assert time.perf_counter() - begun < 5
    assert first.name == "stdlib"
    assert (first.vocab, first.end) == (257, 256)
    # 8 to 15 MB on the Pythons we know, a tenth of it held out.
    train, validation = first.tokens("train"), first.tokens("validation")
    assert 4e6 < len(train) < 3e7
    assert 0.02 < len(validation) / len(train) < 0.25
    assert "def " in first.decode(train[:20_000])
    assert isinstance(train, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        train[0] = 1


def test_from_the_cache_it_opens_at_once(shared):
    first = open_corpus(cache=shared)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        again = open_corpus(cache=shared)
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.2
    assert again.sha256 == first.sha256
    again.verify()


def test_a_second_opening_reads_no_text(tmp_path, cache, monkeypatch):
    folder = write_files(tmp_path / "text", {"a.txt": "one\n", "b.txt": "two\n"})
    open_corpus(folder, cache=cache)

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(sources_module, "_inspect", refuse)
    assert len(open_corpus(folder, cache=cache).tokens("train")) == 4


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXT, min_size=2, max_size=8).filter(lambda texts: sum(map(bool, texts)) >= 2))
def test_packing_loses_nothing(texts, tmp_path_factory):
    """Every document is there, byte for byte, with one end between two and no padding."""
    folder = tmp_path_factory.mktemp("text")
    write_files(folder, {f"{i}.txt": text for i, text in enumerate(texts)})
    opened = open_corpus(folder, cache=folder / ".cache")
    train, validation = (opened.tokens(split) for split in ("train", "validation"))
    found = [*documents(train, 256), *documents(validation, 256)]
    assert sorted(found) == sorted(text.encode() for text in texts if text)
    assert len(train) + len(validation) == sum(len(text.encode()) for text in texts) + len(found) - 2


@settings(max_examples=40, deadline=None)
@given(text=TEXT.filter(bool))
def test_a_file_is_cut_between_characters(text, tmp_path_factory):
    folder = write_files(tmp_path_factory.mktemp("text"), {"a.txt": text})
    opened = open_corpus(folder / "a.txt", cache=folder / ".cache")
    parts = [opened.tokens(split).astype(np.uint8).tobytes().decode() for split in ("train", "validation")]
    assert "".join(parts) == text
    assert opened.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_a_file_gives_its_last_tenth_from_the_beginning_of_a_line(tmp_path, cache):
    lines = "".join(f"line {i}\n" for i in range(1000))
    opened = open_corpus(write_files(tmp_path, {"a.txt": lines}) / "a.txt", cache=cache)
    assert opened.decode(opened.tokens("validation")).startswith("line 90")
    assert len(opened.tokens("validation")) == pytest.approx(len(lines) / 10, abs=10)


@settings(deadline=None)
@given(text=TEXT, cuts=st.lists(st.integers(1, 7), max_size=40))
def test_pieces_are_whole_characters_and_make_the_text(text, cuts):
    raw, chunks = text.encode(), []
    for cut in cuts:
        chunks.append(raw[:cut])
        raw = raw[cut:]
    pieces = list(cut_pieces([*chunks, raw]))
    assert "".join(piece.decode() for piece in pieces) == text
    assert all(pieces)


def test_long_documents_are_read_by_pieces(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(sources_module, "PIECE", 10)
    monkeypatch.setattr(corpus_module, "PIECES_AT_ONCE", 3)
    texts = {f"{i}.txt": "α" * 3 * i + f"\nline of {i} and no end " * i for i in range(1, 9)}
    opened = open_corpus(write_files(tmp_path / "text", texts), cache=cache)
    found = [*documents(opened.tokens("train"), 256), *documents(opened.tokens("validation"), 256)]
    assert sorted(found) == sorted(text.encode() for text in texts.values())


def sides(folder: Path, cache: Path) -> tuple[set[bytes], set[bytes]]:
    opened = open_corpus(folder, cache=cache)
    return tuple(set(documents(opened.tokens(split), 256)) for split in ("train", "validation"))  # type: ignore[return-value]


def test_a_file_stays_on_its_side_when_others_come(tmp_path, cache):
    folder = write_files(tmp_path / "text", {f"{i}.txt": f"text {i}" for i in range(60)})
    train, validation = sides(folder, cache)
    assert 1 <= len(validation) <= 15
    write_files(folder, {f"0/more/{i}.md": f"more {i}" for i in range(60)})
    more_train, more_validation = sides(folder, cache)
    assert train < more_train
    assert validation < more_validation


def test_copies_are_on_the_same_side(tmp_path, cache):
    folder = write_files(tmp_path / "text", {f"{i}.txt": f"text {i % 20}" for i in range(60)})
    train, validation = sides(folder, cache)
    assert not train & validation
    assert len(train) + len(validation) == 20


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_few_files_have_both_sides(count, tmp_path, cache):
    for trial in range(12):
        folder = write_files(tmp_path / f"{trial}", {f"{i}.txt": f"text {i} {trial}" for i in range(count)})
        train, validation = sides(folder, cache)
        assert len(train) + len(validation) == count
        assert train
        assert validation


def test_a_folder_may_bring_its_own_split(tmp_path, cache):
    named = {"wiki/train.a.txt": "one", "train.b.txt": "two", "valid.txt": "three", "test.txt": "never"}
    folder = write_files(tmp_path / "text", named)
    assert sides(folder, cache) == ({b"one", b"two"}, {b"three"})


def test_the_sha256_is_that_of_sha256sum(tmp_path, cache):
    folder = write_files(tmp_path / "text", {"a.txt": "one", "B.txt": "two", "sub/c.txt": "three"})
    command = "sha256sum B.txt a.txt sub/c.txt | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert open_corpus(folder, cache=cache).sha256 == printed.split()[0]


def test_a_changed_file_is_read_again(tmp_path, cache):
    folder = write_files(tmp_path / "text", {"a.txt": "one", "b.txt": "two"})
    first = open_corpus(folder, cache=cache)
    write_files(folder, {"a.txt": "uno!"})
    second = open_corpus(folder, cache=cache)
    assert first.sha256 != second.sha256
    assert len(second.tokens("train")) + len(second.tokens("validation")) == 7


def test_files_that_are_not_text_are_left_out_and_named(tmp_path, cache):
    files = {"a.txt": "one", "b.txt": "two", "c.png": b"\x89PNG\r\n\x1a\n", "d.dat": b"a\0b", ".hidden": "no"}
    opened = open_corpus(write_files(tmp_path / "text", files), cache=cache)
    assert [name.split()[0] for name in opened.skipped] == ["c.png", "d.dat"]
    assert "zero byte" in opened.skipped[1]
    assert open_corpus(tmp_path / "text", cache=cache).skipped == opened.skipped


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": ""}, r"holds no text \(empty\)"),
        ({"a.bin.txt": b"\xff\xfe\0h\0i"}, r"holds no text \(not UTF-8 text: a\.bin\.txt \(has a zero byte\)\)"),
        ({"a.txt": b"caf\xe9"}, r"holds no text \(not UTF-8 text: a\.txt \(unexpected end of data\)\)"),
        ({"a.txt": b"\xe9 caf"}, r"holds no text \(not UTF-8 text: a\.txt \(invalid continuation byte\)\)"),
        ({".hidden": "x"}, "is an empty folder; put text files in it, or use 'stdlib'"),
    ],
)
def test_no_text_is_refused_and_nothing_written(files, message, tmp_path, cache):
    folder = write_files(tmp_path / "text", files)
    for path in (folder, *(folder / name for name in files if not name.startswith("."))):
        with pytest.raises(ValueError, match=message if path == folder else "holds no text"):
            open_corpus(path, cache=cache)
    assert not cache.exists()


def test_an_unknown_name_is_refused(tmp_path, cache):
    with pytest.raises(ValueError, match="no corpus at stdlb: give 'stdlib', a text file"):
        open_corpus("stdlb", cache=cache)
    with pytest.raises(ValueError, match=r"no token file at .*x\.bin"):
        open_corpus(tmp_path / "x.bin", cache=cache)


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match=r"this Python has no sources .* give a file"):
        open_corpus()


def test_the_corpus_gives_batches(tmp_path, cache):
    folder = write_files(tmp_path / "text", {"a.txt": "hello world, " * 50})
    opened = open_corpus(folder / "a.txt", cache=cache)
    batch = TextBatches(opened, "validation", context=8, seed=0).next(2)
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        assert opened.decode([*tokens, targets[-1]]) in "hello world, " * 3
        assert tokens[1:] == targets[:-1]


def test_the_fingerprint_changes_with_size_time_and_name(tmp_path):
    folder = write_files(tmp_path, {"a.txt": "one", "b.txt": "two"})
    marks = [find_files(folder).fingerprint]
    write_files(folder, {"a.txt": "one more"})
    marks.append(find_files(folder).fingerprint)
    (folder / "b.txt").rename(folder / "c.txt")
    marks.append(find_files(folder).fingerprint)
    assert len(set(marks)) == 3
