"""nanoGPT's token files can be read, and nanoGPT can read ours."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import assert_refused, write_files
from trimtab.data import TextBatches, open_corpus
from trimtab.data import token_files as token_files_module


def write_tokens(path: Path, ids: list[int], dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(ids, dtype).tofile(path)
    return path


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    """What nanoGPT's prepare.py leaves: two files and a pickle."""
    write_tokens(tmp_path / "nano" / "train.bin", [*range(100), 50256])
    write_tokens(tmp_path / "nano" / "val.bin", [5, 6, 7])
    return tmp_path / "nano"


def test_a_folder_of_nanogpt_opens(nano, tmp_path):
    corpus = open_corpus(nano, cache=tmp_path / "cache")
    assert corpus.tokens("train").tolist() == [*range(100), 50256]
    assert corpus.tokens("validation").tolist() == [5, 6, 7]
    assert isinstance(corpus.tokens("train"), np.memmap)
    assert (corpus.vocab, corpus.end) == (50257, 50256)
    lines = "".join(
        f"{hashlib.sha256((nano / name).read_bytes()).hexdigest()}  {name}\n" for name in ("train.bin", "val.bin")
    )
    assert corpus.sha256 == hashlib.sha256(lines.encode()).hexdigest()
    corpus.verify()
    assert TextBatches(corpus, context=50, seed=0).next(2)["tokens"].shape == (2, 50)


def test_a_single_file_gives_its_last_tenth(tmp_path):
    file = write_tokens(tmp_path / "a.bin", list(range(95)))
    corpus = open_corpus(file, cache=tmp_path / "cache")
    assert corpus.tokens("train").tolist() == list(range(86))
    assert corpus.tokens("validation").tolist() == list(range(86, 95))
    assert corpus.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (corpus.vocab, corpus.end) == (95, None)


def test_the_results_of_a_full_read_are_cached(nano, tmp_path, monkeypatch):
    first = open_corpus(nano, cache=tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(token_files_module, "hash_file", None)  # calling it would fail
        assert open_corpus(nano, cache=tmp_path / "cache").sha256 == first.sha256
    write_tokens(nano / "val.bin", [5, 6, 8, 9])
    assert open_corpus(nano, cache=tmp_path / "cache").sha256 != first.sha256


def test_a_pickle_beside_it_is_never_opened(nano, tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    (nano / "meta.pkl").write_bytes(pickle.dumps(Malicious()))
    open_corpus(nano, cache=tmp_path / "cache")
    assert not (tmp_path / "harm").exists()
    pickle.loads((nano / "meta.pkl").read_bytes())
    assert (tmp_path / "harm").exists()  # it would have been


def test_a_folder_of_the_cache_is_such_a_folder(tmp_path):
    text = write_files(tmp_path / "text", {f"{i}.txt": f"text {i}" for i in range(9)})
    first = open_corpus(text, cache=tmp_path / "cache")
    folder = next(iter(first.files)).parent
    again = open_corpus(folder, cache=tmp_path / "cache")
    assert again.tokens("validation").tolist() == first.tokens("validation").tolist()
    assert (again.vocab, again.end) == (257, 256)
    assert again.decode(again.encode("hello")) == "hello"
    # Without our tokenizer nanoGPT still reads it.
    assert np.fromfile(folder / "train.bin", np.uint16).tolist() == first.tokens("train").tolist()


def test_wide_tokens_are_announced_in_meta_json(tmp_path):
    write_tokens(tmp_path / "a.bin", [1, 100_000, 3], "<u4")
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint32"}))
    assert open_corpus(tmp_path / "a.bin", cache=tmp_path / "cache").vocab == 100_001
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "float32"}))
    with pytest.raises(ValueError, match="has dtype 'float32'; tokens are uint16 or uint32"):
        open_corpus(tmp_path / "a.bin", cache=tmp_path / "cache")


def test_the_largest_id_is_found_in_any_part(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files_module, "CHUNK", 7)
    for place in (0, 6, 7, 29):
        file = write_tokens(tmp_path / f"{place}.bin", [1] * place + [99] + [1] * (29 - place))
        assert open_corpus(file, cache=tmp_path / "cache").vocab == 100


def test_tokens_that_do_not_fit_are_refused(nano, tmp_path):
    (tmp_path / "bytes.json").write_text('{"kind": "bytes"}')
    with pytest.raises(ValueError, match="has token 50256, outside the tokenizer's vocabulary of 257"):
        open_corpus(nano, tokenizer=f"file:{tmp_path / 'bytes.json'}", cache=tmp_path / "cache")
    (tmp_path / "wide.json").write_text('{"kind": "ids", "vocab": 128256}')
    with pytest.raises(ValueError, match=r"a vocabulary of 128256 does not fit uint16 tokens; .*uint32"):
        open_corpus(nano, tokenizer=f"file:{tmp_path / 'wide.json'}", cache=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"holds tokens, which tokenizer='bpe:300' cannot change"):
        open_corpus(nano, tokenizer="bpe:300", cache=tmp_path / "cache")


def test_broken_files_are_refused(tmp_path):
    write_files(tmp_path, {"odd.bin": b"abc", "empty.bin": b"", "alone/train.bin": b"ab"})
    for name, message in {
        "odd.bin": r"has 3 bytes, not a multiple of 2 \(uint16\)",
        "empty.bin": "is empty; a token file is raw uint16",
        "alone": r"has train\.bin but no val\.bin",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_corpus(tmp_path / name, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"3",
        b"null",
        b'"uint16"',
        b'{"dtype": 3}',
        b'{"dtype": null}',
        b"{",
        b"\xff",
        b'{"dtype":' * 100_000,
    ],
)
def test_a_damaged_meta_json_is_one_clear_line_with_its_name(raw, nano, tmp_path):
    (nano / "meta.json").write_bytes(raw)
    with assert_refused(r"nano/meta\.json is not a description of tokens: "):
        open_corpus(nano, cache=tmp_path / "cache")
    (nano / "meta.json").write_bytes(b'{"dtype": "\\u001b[31m"}')
    with assert_refused(r"nano/meta\.json has dtype '\\x1b\[31m'; tokens are uint16 or uint32"):
        open_corpus(nano, cache=tmp_path / "cache")


def test_a_meta_json_without_dtype_is_of_uint16(nano, tmp_path):
    (nano / "meta.json").write_text('{"vocab_size": 65, "stoi": {"a": [1]}}')
    assert open_corpus(nano, cache=tmp_path / "cache").tokens("train").dtype == np.uint16
