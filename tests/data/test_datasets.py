"""Hugging Face datasets as corpora, without a network."""

import sys

import pytest

from tests.data.corpora import documents
from trimtab.data import MissingExtra, open_corpus

ROWS = [f"story {i}" for i in range(80)]


@pytest.fixture
def library(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library = pytest.importorskip("datasets")
    library.disable_progress_bars()
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return library


def parts(corpus) -> list[list[str]]:
    return [[d.decode() for d in documents(corpus.tokens(split), 256)] for split in ("train", "validation")]


def test_rows_are_documents_split_by_their_hash(library, tmp_path):
    library.Dataset.from_dict({"text": [*ROWS, "", None], "n": list(range(82))}).save_to_disk(tmp_path / "data")
    corpus = open_corpus(f"hf:{tmp_path / 'data'}", cache=tmp_path / "cache")
    train, validation = parts(corpus)
    assert sorted(train + validation) == sorted(ROWS)
    assert 1 <= len(validation) <= 20
    again = open_corpus(f"hf:{tmp_path / 'data'}", cache=tmp_path / "cache")
    assert again.sha256 == corpus.sha256
    corpus.verify()


@pytest.mark.parametrize("name", ["validation", "test"])
def test_the_datasets_own_split_is_kept(name, library, tmp_path):
    tables = {split: library.Dataset.from_dict({"text": rows}) for split, rows in (("train", ROWS), (name, ["held"]))}
    library.DatasetDict(tables).save_to_disk(tmp_path / "data")
    corpus = open_corpus(f"hf:{tmp_path / 'data'}", cache=tmp_path / "cache")
    assert parts(corpus) == [ROWS, ["held"]]


def test_another_text_is_another_corpus(library, tmp_path):
    for name, rows in (("a", ROWS), ("b", ROWS[::-1])):
        library.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / name)
    hashes = {open_corpus(f"hf:{tmp_path / name}", cache=tmp_path / "cache").sha256 for name in "ab"}
    assert len(hashes) == 2


def test_files_are_loaded_by_name(library, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.txt").write_text("\n".join(ROWS))
    corpus = open_corpus(f"hf:{tmp_path / 'folder'}", cache=tmp_path / "cache")
    train, validation = parts(corpus)
    assert sorted(train + validation) == sorted(ROWS)


def test_what_cannot_be_used_is_refused(library, tmp_path):
    library.Dataset.from_dict({"words": ["a"]}).save_to_disk(tmp_path / "columns")
    library.DatasetDict({"all": library.Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "splits")
    library.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "small")
    for name, message in {
        "columns": "has the columns words but no 'text'",
        "splits": "has the splits all but no train",
        "small": "too little text to split",
        "nowhere/at-all": "cannot load the dataset",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_corpus(f"hf:{tmp_path / name}", cache=tmp_path / "cache")


def test_without_the_extra_the_error_has_the_pip_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"'hf:x' needs the package datasets .*pip install 'trimtab\[hf\]'"):
        open_corpus("hf:x", cache=tmp_path)
