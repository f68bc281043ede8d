"""Tokenizers are lossless, have an end token, and refuse wrong input."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import assert_refused, write_files
from trimtab.data import MissingExtra, load_tokenizer, open_corpus
from trimtab.data import corpus as corpus_module
from trimtab.data.tokenizers import BPE, Bytes, Ids, TextTokenizer, check_spec, train_bpe

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LEARN = [b"the cat sat on the mat, the dog sat on the log\n" * 20, "größer als ein Bär\n".encode() * 9]


@pytest.fixture(scope="module")
def bpe() -> BPE:
    pytest.importorskip("tokenizers")
    return train_bpe(LEARN, 280)


@settings(deadline=None)
@given(TEXT)
def test_bytes_decode_to_the_encoded_text(text):
    ids = Bytes().encode(text)
    assert Bytes().decode(ids) == text
    assert ids == list(text.encode())


@settings(deadline=None)
@given(TEXT)
def test_bpe_decodes_to_the_encoded_text(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert all(0 <= i < bpe.vocab and i != bpe.end for i in ids)


def test_bpe_learns_from_the_text(bpe):
    assert bpe.vocab == 280
    assert bpe.end == 279
    assert len(bpe.encode("the cat sat on the mat")) < 10
    assert train_bpe([b"abc"], 4096).vocab < 262  # nothing left to merge


def test_bpe_is_the_same_every_time(bpe):
    assert train_bpe(LEARN, 280).describe() == bpe.describe()


def test_bpe_learns_from_the_beginning_of_a_long_text(bpe, monkeypatch):
    monkeypatch.setattr("trimtab.data.tokenizers.LEARN_BYTES", len(LEARN[0]) + 1)
    assert train_bpe([*LEARN, b"never seen " * 99], 280).describe() == bpe.describe()


def test_ends_are_shown_between_documents(bpe):
    for tokenizer in (Bytes(), bpe):
        ids = [*tokenizer.encode("one"), tokenizer.end, *tokenizer.encode("two"), tokenizer.end]
        assert tokenizer.decode(ids) == "one<|end|>two<|end|>"
    assert Bytes().decode([0xC3, 256, 0xA4]) == "\ufffd<|end|>\ufffd"


def test_an_end_written_in_a_document_is_text(bpe):
    """Otherwise a document could end itself."""
    foreign = bpe.describe()["tokenizer"]
    ending = {"id": 279, "content": "<|endoftext|>", "special": True}
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = BPE({**foreign, "added_tokens": [{**ending, **rest}]})
    assert (tokenizer.end, tokenizer.vocab) == (279, 280)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert 279 not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


@pytest.mark.parametrize("make", [lambda _: Bytes(), lambda bpe: bpe, lambda _: Ids(50257)])
def test_tokenizers_are_saved_and_loaded(make, bpe, tmp_path):
    tokenizer: TextTokenizer = make(bpe)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (type(loaded), loaded.vocab, loaded.end) == (type(tokenizer), tokenizer.vocab, tokenizer.end)
    assert loaded.describe() == tokenizer.describe()


def test_a_tokenizer_of_hugging_face_can_be_named(bpe, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(bpe.describe()["tokenizer"]))
    write_files(tmp_path / "text", {"a.txt": "the cat sat on the mat, " * 30})
    corpus = open_corpus(tmp_path / "text", tokenizer=f"file:{tmp_path / 't.json'}", cache=tmp_path / "cache")
    assert corpus.vocab == 280
    assert corpus.tokens("train")[:4].tolist() == bpe.encode("the cat sat on the mat, ")[:4]


@settings(max_examples=15, deadline=None)
@given(texts=st.lists(TEXT.filter(lambda text: text and "\0" not in text), min_size=2, max_size=5))
def test_packing_with_bpe_loses_nothing(bpe, texts, tmp_path_factory):
    folder = write_files(tmp_path_factory.mktemp("text"), {f"{i}.txt": text for i, text in enumerate(texts)})
    corpus = open_corpus(folder, tokenizer="bpe:270", cache=folder / ".cache")
    found: list[str] = []
    for split in ("train", "validation"):
        parts: list[list[int]] = [[]]
        for i in corpus.tokens(split).tolist():
            parts.append([]) if i == corpus.end else parts[-1].append(i)
        found += [corpus.decode(part) for part in parts]
    assert sorted(found) == sorted(texts)


def test_a_bpe_is_learned_once_per_text(bpe, tmp_path, monkeypatch):
    folder = write_files(tmp_path / "text", {"train.txt": "one two " * 40, "valid.txt": "unseen words " * 5})
    first = open_corpus(folder, tokenizer="bpe:270", cache=tmp_path / "cache")
    # Learned from the training split: validation has no say in the vocabulary.
    assert len(first.encode("one two")) < len(first.encode("unseen"))

    def refuse(*_: object) -> None:
        raise AssertionError("learned again")

    monkeypatch.setattr(corpus_module, "make_tokenizer", refuse)
    again = open_corpus(folder, tokenizer="bpe:270", cache=tmp_path / "cache")
    assert again.tokenizer.describe() == first.tokenizer.describe()
    # The same text elsewhere is the same text.
    moved = open_corpus(folder.rename(tmp_path / "moved"), tokenizer="bpe:270", cache=tmp_path / "cache")
    assert moved.sha256 == first.sha256
    with pytest.raises(AssertionError, match="learned again"):
        open_corpus(tmp_path / "moved", tokenizer="bpe:271", cache=tmp_path / "cache")


def test_a_large_vocabulary_is_kept_in_wide_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(Bytes, "vocab", 2**16 + 1)
    monkeypatch.setattr(Bytes, "end", 2**16)
    folder = write_files(tmp_path / "text", {f"{i}.txt": f"text {i}" for i in range(9)})
    tokens = open_corpus(folder, cache=tmp_path / "cache").tokens("train")
    assert tokens.dtype.itemsize == 4
    assert tokens.max() == 2**16


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("byte", "unknown tokenizer 'byte'; try 'bytes', 'bpe:4096' or 'file:tokenizer.json'"),
        ("bpe", "unknown tokenizer 'bpe'"),
        ("bpe:4k", "unknown tokenizer 'bpe:4k'"),
        ("file:", "unknown tokenizer 'file:'"),
        ("bpe:1048577", "is larger than any vocabulary; try 'bpe:1048576' or less"),
        ("bpe:" + "9" * 9999, "is larger than any vocabulary"),
        ("bpe:256", "has no room for 256 bytes and an end token; try 'bpe:257'"),
    ],
)
def test_a_bad_spec_is_refused_before_anything_is_read(spec, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        open_corpus("stdlib", tokenizer=spec, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_without_the_extra_the_error_has_the_pip_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"'bpe:4096' needs the package tokenizers .*pip install 'trimtab\[hf\]'"):
        check_spec("bpe:4096")
    with pytest.raises(ValueError, match="byte-pair encoding needs the package tokenizers"):
        BPE({})
    with pytest.raises(ImportError):
        open_corpus("stdlib", tokenizer="bpe:4096", cache=tmp_path)


def test_foreign_ids_and_files_are_refused(bpe, tmp_path):
    for tokenizer in (Bytes(), bpe):
        for bad in (tokenizer.vocab, -1):
            with pytest.raises(ValueError, match=f"token {bad} is outside this vocabulary of {tokenizer.vocab}"):
                tokenizer.decode([bad])
    with pytest.raises(ValueError, match="came without a tokenizer; open them with tokenizer='file:"):
        Ids(10).encode("a")
    with pytest.raises(ValueError, match="came without a tokenizer"):
        Ids(10).decode([1])
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "none.json")
    write_files(tmp_path, {"a.json": "[1]", "b.json": '{"kind": "words"}', "c.json": '{"model": {"type": "?"}}'})
    for name in ("a.json", "b.json"):
        with pytest.raises(ValueError, match="is not a tokenizer"):
            load_tokenizer(tmp_path / name)
    with pytest.raises(ValueError, match=r"not a tokenizer\.json of the package tokenizers"):
        load_tokenizer(tmp_path / "c.json")


DAMAGED = [
    b"",
    b"[]",
    b"3",
    b"null",
    b"{}",
    b"\xff",
    b"[" * 100_000,
    b'{"model":' * 100_000,
    b'{"model": null}',
    b'{"model": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"kind": "bpe"}',
    b'{"kind": "bpe", "tokenizer": 3}',
    b'{"kind": "ids"}',
    b'{"kind": "ids", "vocab": "3"}',
    b'{"kind": "ids", "vocab": true}',
    b'{"kind": "ids", "vocab": -1}',
    b'{"kind": "ids", "vocab": 99999999999999999999999}',
    b'{"kind": ["bytes"]}',
    b'{"kind": "\x1b[31m"}',
    b'{"model": {"type": "\\u001b[31m\\n"}}',
    b"\x80\x04\x95\x00",
]


@pytest.mark.parametrize("raw", DAMAGED)
def test_a_damaged_tokenizer_is_one_clear_line_with_its_name(raw, tmp_path):
    pytest.importorskip("tokenizers")
    text = write_files(tmp_path / "text", {"a.txt": "one two"})
    nano = write_files(tmp_path / "nano", {"train.bin": b"abcd", "val.bin": b"ab", "tokenizer.json": raw})
    for call in (
        lambda: load_tokenizer(nano / "tokenizer.json"),
        lambda: open_corpus(text, tokenizer=f"file:{nano / 'tokenizer.json'}", cache=tmp_path / "cache"),
        lambda: open_corpus(nano, cache=tmp_path / "cache"),
    ):
        with assert_refused(r"nano/tokenizer\.json is not a tokenizer"):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"continuing_subword_prefix": "####"},
            r"t\.json is not a tokenizer\.json of the package tokenizers: ",
        ),  # panics
        ({"vocab": {"a": 2**32 - 1}, "merges": []}, r"t\.json has the id 4294967295; a tokenizer\.json has ids below"),
    ],
)
def test_a_hostile_tokenizer_is_one_clear_line(change, message, bpe, tmp_path):
    described = bpe.describe()["tokenizer"]
    (tmp_path / "t.json").write_text(json.dumps({**described, "model": {**described["model"], **change}}))
    with assert_refused(message):
        load_tokenizer(tmp_path / "t.json")


def test_a_tokenizer_that_cannot_encode_is_one_clear_line(tmp_path):
    library = pytest.importorskip("tokenizers")
    library.Tokenizer(library.models.WordLevel({"one": 0}, unk_token="?")).save(str(tmp_path / "t.json"))
    text = write_files(tmp_path / "text", {"a.txt": "one two"})
    with assert_refused("the tokenizer cannot encode this text; try 'bytes': "):
        open_corpus(text, tokenizer=f"file:{tmp_path / 't.json'}", cache=tmp_path / "cache")


def test_ids_may_have_gaps(bpe, tmp_path):
    described = bpe.describe()["tokenizer"]
    described["model"]["vocab"]["t"] = 999
    (tmp_path / "t.json").write_text(json.dumps(described))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.vocab, tokenizer.end) == (1001, 1000)
    assert tokenizer.decode(tokenizer.encode("t q")) == "t q"
