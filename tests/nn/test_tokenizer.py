"""Captions are encoded to rows with start and end token, and decoded again."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.nn.config import ConfigError
from trimtab.nn.tokenizer import (
    PADDING,
    UNKNOWN,
    ByteTokenizer,
    Tokenizer,
    WordTokenizer,
    find_words,
    load_tokenizer,
)

CAPTIONS = ["a red cat", "A blue cat!", "two dogs, one red"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)  # lone surrogates are no text


def both() -> list[Tokenizer]:
    return [ByteTokenizer(context=16), WordTokenizer.from_captions(CAPTIONS, context=16)]


@pytest.fixture(params=both(), ids=lambda tokenizer: tokenizer.kind)
def tokenizer(request) -> Tokenizer:
    return request.param


# --- Rows


@given(caption=TEXT, context=st.integers(3, 50))
def test_every_row_is_start_text_end_padding(caption, context):
    for tokenizer in (ByteTokenizer(context=context), WordTokenizer.from_captions([caption], context=context)):
        (row,) = tokenizer.encode(caption).tolist()
        assert len(row) == context
        assert row[0] == tokenizer.start
        end = row.index(tokenizer.end)
        assert all(0 < i < tokenizer.start for i in row[1:end])
        assert row[end + 1 :] == [PADDING] * (context - end - 1)


def test_the_ids_are_where_clip_has_them(tokenizer):
    assert (PADDING, tokenizer.start, tokenizer.end) == (0, tokenizer.vocab - 2, tokenizer.vocab - 1)
    assert ByteTokenizer(context=5).encode("é").tolist() == [[257, 0xC3 + 1, 0xA9 + 1, 258, 0]]
    words = WordTokenizer(["cat", "a"], context=6)
    assert words.encode("a dog, a cat").tolist() == [[4, 3, 1, 1, 3, 5]]


def test_several_captions_make_several_rows(tokenizer):
    rows = tokenizer.encode(iter(CAPTIONS))
    assert rows.shape == (3, 16)
    assert rows.dtype == torch.int64
    assert torch.equal(rows[1:2], tokenizer.encode(CAPTIONS[1]))
    assert tokenizer.encode([]).shape == (0, 16)


def test_trimmed_rows_end_with_the_longest_caption(tokenizer):
    rows, trimmed = tokenizer.encode(["a", "a red"]), tokenizer.encode(["a", "a red"], trim=True)
    assert torch.equal(trimmed, rows[:, : trimmed.shape[1]])
    assert trimmed[1, -1] == tokenizer.end
    assert tokenizer.encode([], trim=True).shape == (0, 16)


# --- Round trips


@given(TEXT)
def test_bytes_give_back_every_text(caption):
    tokenizer = ByteTokenizer(context=len(caption.encode()) + 3)
    assert tokenizer.decode(tokenizer.encode(caption)) == [caption]


@given(caption=TEXT, context=st.integers(3, 50))
def test_cut_bytes_are_the_longest_beginning_that_fits(caption, context):
    tokenizer = ByteTokenizer(context=context)
    (text,) = tokenizer.decode(tokenizer.encode(caption))
    assert caption.startswith(text)
    rest = caption[len(text) :]
    assert not rest or len((text + rest[0]).encode()) > context - 2


@given(st.lists(TEXT, max_size=4), st.integers(3, 50))
def test_known_words_give_back_the_caption_without_its_spacing(captions, context):
    tokenizer = WordTokenizer.from_captions(captions, context=context)
    expected = [" ".join(find_words(caption)[: context - 2]) for caption in captions]
    assert tokenizer.decode(tokenizer.encode(captions)) == expected


@given(TEXT)
def test_joined_words_are_split_into_the_same_words(caption):
    assert find_words(" ".join(find_words(caption))) == find_words(caption)


def test_unknown_words_are_read_as_unknown():
    tokenizer = WordTokenizer.from_captions(CAPTIONS, context=8)
    assert tokenizer.decode(tokenizer.encode("A  red elephant!")) == [f"a red {UNKNOWN} !"]
    assert find_words(UNKNOWN) == ["<", "unknown", ">"]  # no caption can write the token itself


def test_decoding_stops_at_the_first_end(tokenizer):
    row = tokenizer.encode("a")[0]
    row[3:6] = torch.tensor([5, tokenizer.end, 6])
    assert tokenizer.decode(row) == ["a"]
    assert tokenizer.decode([tokenizer.start, *tokenizer.split("a", 1)]) == ["a"]  # no end: all of it


# --- Vocabulary


@given(st.permutations(CAPTIONS))
def test_the_vocabulary_does_not_depend_on_the_order_of_captions(captions):
    assert WordTokenizer.from_captions(captions).words == WordTokenizer.from_captions(CAPTIONS).words


def test_frequent_words_come_first_and_rare_ones_can_stay_out():
    words = ("a", "cat", "red", "!", ",", "blue", "dogs", "one", "two")
    assert WordTokenizer.from_captions(CAPTIONS).words == words
    assert WordTokenizer.from_captions(CAPTIONS, max_words=2).words == words[:2]
    assert WordTokenizer.from_captions(CAPTIONS, min_count=2).words == words[:3]
    assert WordTokenizer.from_captions([]).vocab == 4


# --- Files


@pytest.mark.parametrize("kept", [*both(), WordTokenizer.from_captions(["çà 日本 🐈 \ud800"])])
def test_a_loaded_tokenizer_is_the_saved_one(kept, tmp_path):
    kept.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(kept)
    assert loaded.describe() == kept.describe()
    assert torch.equal(loaded.encode(CAPTIONS), kept.encode(CAPTIONS))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "is not a tokenizer"),
        ("[]", "is not a tokenizer"),
        ({"kind": "bytes"}, "is not a tokenizer.*context"),
        ({"kind": "words", "context": 8}, "is not a tokenizer.*words"),
        ({"kind": "words", "context": 8, "words": "ab"}, "is not a tokenizer"),
        ({"kind": "bytes", "context": "8"}, "is not a tokenizer.*'8'"),
        ({"kind": "bpe", "context": 8}, "kind 'bpe'.*'bytes' and 'words'"),
        ({"kind": "words", "context": 8, "words": ["a b"]}, "'a b' is not one lower-case word"),
        ({"kind": "words", "context": 8, "words": [1]}, "1 is not one"),
        ({"kind": "bytes", "context": 2}, "context=2"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(content, words, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=words):
        load_tokenizer(path)


# --- Refusals


@pytest.mark.parametrize("context", [-1, 0, 2])
def test_a_context_without_room_is_refused(context):
    with pytest.raises(ConfigError, match=f"context={context} .*try context=77"):
        ByteTokenizer(context=context)


def test_bad_vocabularies_are_refused():
    with pytest.raises(ValueError, match="'Cat' is not one lower-case word"):
        WordTokenizer(["Cat"])
    with pytest.raises(ValueError, match="'cat' is in the vocabulary more than once"):
        WordTokenizer(["cat", "a", "cat"])
    with pytest.raises(TypeError, match="put it in a list"):
        WordTokenizer.from_captions("a cat")
    with pytest.raises(ConfigError, match="max_words=-1"):
        WordTokenizer.from_captions(CAPTIONS, max_words=-1)


def test_captions_that_are_no_text_are_refused(tokenizer):
    with pytest.raises(TypeError, match="caption 1 must be a string, got bytes"):
        tokenizer.encode(["a", b"b"])
    with pytest.raises(ValueError, match="caption 1 is not valid text"):
        ByteTokenizer().encode(["a", "\ud800"])


def test_ids_of_another_vocabulary_are_refused(tokenizer):
    for wrong in (-1, tokenizer.vocab):
        with pytest.raises(ValueError, match=re.escape(f"token {wrong} is outside this vocabulary")):
            tokenizer.decode([tokenizer.start, wrong, tokenizer.end])
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \(2,\)"):
        tokenizer.decode(torch.zeros(2))
