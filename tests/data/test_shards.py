"""Tar shards: reading returns what was written; broken shards are refused."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data import MissingExtra, Pair, open_pairs, pack_pairs, read_shards, write_shards
from trimtab.data.pictures import draw_shapes
from trimtab.data.shards import find_shards, read_pairs

KINDS = st.sampled_from(["txt", "json", "png", "seg.png", "cls"])
SAMPLES = st.lists(st.dictionaries(KINDS, st.binary(max_size=600), min_size=1), max_size=9)


def named(samples: list[dict[str, bytes]]) -> list[dict[str, bytes]]:
    return [{"__key__": f"{i:04d}".encode(), **sample} for i, sample in enumerate(samples)]


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@settings(max_examples=40, deadline=None)
@given(samples=SAMPLES, per_shard=st.integers(1, 4))
def test_what_is_written_is_read(samples, per_shard, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    shards = write_shards(named(samples), folder, per_shard=per_shard)
    assert len(shards) == -(-len(samples) // per_shard)
    assert list(read_shards(shards)) == named(samples)
    assert sorted(folder.iterdir()) == shards


def test_the_same_samples_give_the_same_bytes(tmp_path):
    samples = named([{"txt": b"one", "cls": b"1"}, {"txt": b"two"}])
    files = [write_shards(samples, tmp_path / name)[0].read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_members_are_grouped_as_webdataset_does(tmp_path):
    """By the name up to the first dot of its last part, neighbours only, folders ignored."""
    members = {"x.y/a.txt": b"1", "x.y/a.seg.png": b"2", "b.txt": b"3", "x.y/b.txt": b"4"}
    shard = write_tar(tmp_path / "a.tar", members)
    assert list(read_shards([shard])) == [
        {"__key__": b"x.y/a", "txt": b"1", "seg.png": b"2"},
        {"__key__": b"b", "txt": b"3"},
        {"__key__": b"x.y/b", "txt": b"4"},
    ]


def test_links_and_folders_are_no_samples(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for kind, name in ((tarfile.DIRTYPE, "d"), (tarfile.SYMTYPE, "d/a.txt")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    assert list(read_shards([tmp_path / "a.tar"])) == []


def test_a_cut_shard_is_refused_wherever_it_is_cut(tmp_path):
    """tarfile alone takes one cut between two members for a shorter one."""
    whole = write_shards(named([{"txt": b"x" * 700}, {"txt": b"y" * 700}]), tmp_path / "whole")[0].read_bytes()
    used = 2 * (512 + 1024)
    for size in (0, 100, 512, 900, 1536, 1700, used - 512, used, used + 512):
        (tmp_path / "cut.tar").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.tar is not a complete tar file"):
            list(read_shards([tmp_path / "cut.tar"]))
    (tmp_path / "cut.tar").write_bytes(whole[: used + 1024])
    assert len(list(read_shards([tmp_path / "cut.tar"]))) == 2


def test_what_is_no_tar_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"text, " * 500 + bytes(1024))
    with pytest.raises(ValueError, match=r"a\.tar is not a complete tar file"):
        list(read_shards([tmp_path / "a.tar"]))
    with pytest.raises(ValueError, match=r"has a\.txt twice"):
        list(read_shards([_doubled(tmp_path / "b.tar")]))
    with pytest.raises(ValueError, match="per_shard must be at least 1, got 0"):
        write_shards([], tmp_path, per_shard=0)


def _doubled(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return path


def test_shards_are_found(tmp_path):
    for i in (8, 9, 10, 11):
        write_tar(tmp_path / f"s-{i:03d}.tar", {"a.txt": b""})
    assert [path.name for path in find_shards(str(tmp_path))] == [f"s-{i:03d}.tar" for i in (8, 9, 10, 11)]
    braces = find_shards(str(tmp_path / "s-{009..011}.tar"))
    assert [path.name for path in braces] == ["s-009.tar", "s-010.tar", "s-011.tar"]
    assert find_shards(str(tmp_path / "s-008.tar")) == [tmp_path / "s-008.tar"]
    for missing in ("s-{011..012}.tar", "t.tar"):
        with pytest.raises(ValueError, match=r"no shard at .*; give a folder"):
            find_shards(str(tmp_path / missing))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no shard at"):
        find_shards(str(tmp_path / "empty"))


@pytest.mark.parametrize("picture", ["png", "npy"])
def test_pairs_go_through_shards_unchanged(picture, tmp_path):
    if picture == "png":
        pytest.importorskip("PIL")
    drawn = open_pairs("shapes", size=16, cache=tmp_path / "cache")
    for split in ("train", "validation"):
        write_shards(pack_pairs(drawn.pairs(split), picture=picture), tmp_path / split, per_shard=100)
    assert len(list((tmp_path / "train").iterdir())) == 5
    opened = open_pairs(tmp_path / "train", size=16, cache=tmp_path / "cache")
    train = drawn.indices("train")
    assert opened.texts == [drawn.texts[i] for i in train]
    assert (opened.pixels == drawn.pixels[train]).all()


def test_pictures_of_others_are_resized_and_flattened(tmp_path):
    image = pytest.importorskip("PIL.Image")
    members = {}
    for key, mode, colour in (("a", "RGBA", (0, 0, 0, 0)), ("b", "L", 0), ("c", "RGB", (255, 0, 0))):
        for kind in ("png",) if mode == "RGBA" else ("jpg",):
            buffer = io.BytesIO()
            image.new(mode, (40, 20), colour).save(buffer, "jpeg" if kind == "jpg" else kind)
            members |= {f"{key}.{kind}": buffer.getvalue(), f"{key}.txt": f"the  {key}\n".encode()}
    found = list(read_pairs([write_tar(tmp_path / "a.tar", members)], 8))
    assert [pair.caption for pair in found] == ["the a", "the b", "the c"]
    assert [pair.concept for pair in found] == ["the a", "the b", "the c"]
    assert [pair.pixels.shape for pair in found] == [(8, 8, 3)] * 3
    assert (found[0].pixels == 255).all()  # transparent is white
    assert (found[1].pixels == 0).all()
    assert found[2].pixels.mean(axis=(0, 1)) == pytest.approx([255, 0, 0], abs=3)  # jpeg


def test_copies_in_shards_are_dropped(tmp_path):
    pairs = list(draw_shapes(8))[:4]
    write_shards(pack_pairs([*pairs, *pairs], picture="npy"), tmp_path / "shards")
    assert len(open_pairs(tmp_path / "shards", size=8, cache=tmp_path / "cache").texts) == 4
    write_shards(pack_pairs(pairs[:1] * 3, picture="npy"), tmp_path / "one")
    with pytest.raises(ValueError, match="has 1 different pairs; a contrastive loss needs at least two"):
        open_pairs(tmp_path / "one", size=8, cache=tmp_path / "cache")


def test_changed_shards_are_read_again(tmp_path):
    pairs = list(draw_shapes(8))
    for count in (4, 9):
        write_shards(pack_pairs(pairs[:count], picture="npy"), tmp_path / "shards")
        assert len(open_pairs(tmp_path / "shards", size=8, cache=tmp_path / "cache").texts) == count


def test_samples_that_are_no_pairs_are_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    pickled = buffer.getvalue()
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((9, 8, 3), np.uint8))
    for members, message in (
        ({"a.npy": b""}, r"sample a has no \.txt with its caption, only __key__, npy"),
        ({"a.txt": b"a"}, "sample a has no picture"),
        ({"a.txt": b"a", "a.npy": pickled}, "allow_pickle=False"),
        ({"a.txt": b"a", "a.npy": buffer.getvalue()}, r"not resized; got uint8 \(9, 8, 3\), size=8"),
        ({"a.txt": b"\xff", "a.npy": b""}, "invalid start byte"),
    ):
        with pytest.raises(ValueError, match=message):
            list(read_pairs([write_tar(tmp_path / "a.tar", members)], 8))


def test_a_broken_picture_is_named(tmp_path):
    pytest.importorskip("PIL")
    shard = write_tar(tmp_path / "a.tar", {"k.txt": b"a", "k.png": b"no picture"})
    with pytest.raises(ValueError, match=r"sample k: cannot decode its \.png"):
        list(read_pairs([shard], 8))


def test_without_pillow_the_error_has_the_pip_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    pair = Pair(np.zeros((8, 8, 3), np.uint8), "a", "a")
    with pytest.raises(MissingExtra, match=r"writing png needs the package PIL .*pip install 'trimtab\[clip\]'"):
        list(pack_pairs([pair]))
    shard = write_tar(tmp_path / "a.tar", {"k.txt": b"a", "k.png": b""})
    with pytest.raises(MissingExtra, match=r"a \.png picture in a shard needs the package PIL"):
        list(read_pairs([shard], 8))
    with pytest.raises(ValueError, match="packed as 'png' or 'npy', got 'gif'"):
        list(pack_pairs([pair], picture="gif"))


def test_the_concept_is_kept(tmp_path):
    pair = Pair(np.zeros((8, 8, 3), np.uint8), "a small cat", "cat")
    shards = write_shards(pack_pairs([pair], picture="npy"), tmp_path)
    assert json.loads(next(read_shards(shards))["json"]) == {"concept": "cat"}
    assert next(read_pairs(shards, 8)).concept == "cat"
