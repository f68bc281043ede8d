"""Tar shards: reading returns what was written; broken shards are refused."""

import io
import json
import os
import struct
import sys
import tarfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import assert_refused
from trimtab.data import MissingExtra, Pair, open_pairs, pack_pairs, read_shards, write_shards
from trimtab.data.pictures import MOST_PIXELS, draw_shapes
from trimtab.data.shards import LONGEST_TEXT, MOST_BYTES, find_shards, read_pairs

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
        ({"a.txt": b"a", "a.npy": pickled}, r"not resized; got object \(1,\), size=8"),
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


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def read_one(folder: Path, **members: bytes) -> Pair:
    """The pair of a sample called k."""
    members = {"txt": b"a", **members}
    shard = write_tar(folder / "a.tar", {f"k.{kind}": content for kind, content in members.items()})
    return next(read_pairs([shard], 8))


def test_only_png_jpeg_and_webp_are_opened(tmp_path, monkeypatch):
    """Pillow would start Ghostscript for PostScript, whatever the name of the file."""
    image = pytest.importorskip("PIL.Image")
    plugin = pytest.importorskip("PIL.EpsImagePlugin")
    started: list[object] = []
    monkeypatch.setattr(plugin, "Ghostscript", lambda *given, **_: started.append(given))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    with assert_refused(r"sample k: cannot decode its \.png: .*a picture is PNG, JPEG, WEBP"):
        read_one(tmp_path, png=postscript)
    assert not started
    for kind in ("png", "jpeg", "webp", "gif", "bmp", "tiff", "ppm"):
        buffer = io.BytesIO()
        image.new("RGB", (8, 8)).save(buffer, kind)
        if kind in ("png", "jpeg", "webp"):
            assert read_one(tmp_path, png=buffer.getvalue()).pixels.shape == (8, 8, 3)
        else:
            with assert_refused("cannot identify image file"):
                read_one(tmp_path, png=buffer.getvalue())


@pytest.mark.parametrize(
    "size",
    [(8192, 8193), (MOST_PIXELS, 1), (1, 65536), (10_000, 10_000), (20_000, 20_000), (2**31 - 1, 2**31 - 1)],
)
def test_a_picture_with_too_many_pixels_is_refused_by_its_header(size, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(image.Image, "convert", lambda *_: pytest.fail("decoded"))
    for strict in (True, False):  # with warnings as errors, and without
        with warnings.catch_warnings():
            warnings.simplefilter("error" if strict else "always")
            limit = f"at most {MOST_PIXELS} pixels, 65535 per side"
            with assert_refused(
                rf"sample k: cannot decode its \.png: .*{size[0]}.*{limit}" if size[0] < 9e3 else limit
            ):
                read_one(tmp_path, png=png(*size))


@pytest.mark.parametrize(
    "error", [SyntaxError, struct.error, EOFError, ZeroDivisionError, ValueError, OSError, IndexError, MemoryError]
)
def test_whatever_pillow_raises_is_one_clear_line(error, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")

    def fail(*_: object) -> None:
        raise error("broken \x1b[31m\npicture")

    monkeypatch.setattr(image.Image, "convert", fail)
    with assert_refused(r"sample k: cannot decode its \.png: .*broken \\x1b\[31m\\npicture"):
        read_one(tmp_path, png=png(8, 8, bytes(8 * 25)))


def refusal(call: Callable[[], object]) -> str:
    """The message of a ValueError; any other error fails the test."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "none"


def test_damaged_pictures_are_refused_wherever_they_are_damaged(tmp_path):
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for kind in ("png", "jpeg", "webp"):
        buffer = io.BytesIO()
        image.fromarray(random.integers(0, 255, (9, 9, 3), np.uint8)).save(buffer, kind)
        whole = buffer.getvalue()
        for _ in range(60):
            raw = bytearray(whole)
            for place in random.integers(0, len(raw), 3):
                raw[place] = random.integers(256)
            cut = bytes(raw[: random.integers(1, len(raw) + 1)])
            assert refusal(lambda: read_one(tmp_path, png=cut)).startswith(("sample k: cannot decode its .png", "none"))  # noqa: B023


def array(header: str, content: bytes = b"") -> bytes:
    """An .npy file with any header."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + content


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            array("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 1000000, 3), }\n"),
            r"got uint8 \(1000000,",
        ),
        (array("{'descr': '<f8', 'fortran_order': False, 'shape': (8, 8, 3), }\n"), r"got float64 \(8, 8, 3\), size=8"),
        (array("{'descr': '|O', 'fortran_order': False, 'shape': (8, 8, 3), }\n"), "got object"),
        (array("{'descr': '|u1', 'fortran_order': False, 'shape': (8, 8, 3), }\n", b"few"), "EOF"),
        (array("{'descr': '|u1', 'fortran_order': False, 'shape': (-8, 8, 3), }\n"), "got uint8"),
        (array("(" * 5000), "not an .npy file"),
        (array("[1]"), "not an .npy file"),
        (b"\x93NUMPY\x09\x00", "not an .npy file"),
        (b"PK\x03\x04", "not an .npy file"),
        (b"\x80\x04\x95", "not an .npy file"),
        (b"", "not an .npy file"),
    ],
)
def test_an_array_is_compared_before_numpy_reserves_memory(raw, message, tmp_path):
    with assert_refused(rf"sample k: \.npy pictures are not resized; .*{message}"):
        read_one(tmp_path, npy=raw)


def test_arrays_in_any_order_are_read(tmp_path):
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    for order in ("C", "F"):
        buffer = io.BytesIO()
        np.save(buffer, np.array(pixels, order=order))
        assert (read_one(tmp_path, npy=buffer.getvalue()).pixels == pixels).all()


def claim(shard: Path, size: int, kind: bytes = tarfile.REGTYPE, name: str = "a.txt") -> Path:
    """A shard whose only member claims a size."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    shard.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    return shard


def test_a_member_is_compared_before_it_is_read(tmp_path):
    for size in (MOST_BYTES + 1, 1 << 40, 1 << 70):
        with assert_refused(rf"its member a\.txt has {size} bytes; a member has at most {MOST_BYTES}"):
            list(read_shards([claim(tmp_path / "a.tar", size)]))
    with assert_refused(r"a\.tar is not a complete tar file: unexpected end of data"):
        list(read_shards([claim(tmp_path / "a.tar", MOST_BYTES)]))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, b"Z", tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE])
@pytest.mark.parametrize("size", [-512, -1024, 1 << 40, 1 << 70])
def test_no_size_makes_tarfile_loop_or_reserve_memory(kind, size, tmp_path):
    with assert_refused(r"a\.tar is not a complete tar file|a member has at most"):
        list(read_shards([claim(tmp_path / "a.tar", size, kind)]))


def test_sparse_members_are_refused(tmp_path):
    old = claim(tmp_path / "old.tar", 1 << 36, tarfile.GNUTYPE_SPARSE)
    raw = bytearray(old.read_bytes())
    raw[386:410], raw[483:495] = b"00000000000\0" * 2, tarfile.itn(1 << 36, 12, tarfile.GNU_FORMAT)
    raw[124:136], raw[148:156] = b"00000000000\0", b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    old.write_bytes(raw)
    with tarfile.open(tmp_path / "pax.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a.txt")
        member.pax_headers = {"GNU.sparse.size": str(1 << 36), "GNU.sparse.numblocks": "0", "GNU.sparse.map": "0,0"}
        tar.addfile(member)
    for shard in (old, tmp_path / "pax.tar"):
        with assert_refused(
            rf"its member a\.txt is sparse, {1 << 36} bytes; pack the shard without tar's option --sparse"
        ):
            list(read_shards([shard]))


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.txt", "a/../../b.txt", "a/..", "..\\a.txt", "\\a.txt"])
def test_names_that_leave_the_archive_are_refused(name, tmp_path):
    with assert_refused("leads out of the archive; names are relative, without '..'"):
        list(read_shards([write_tar(tmp_path / "a.tar", {name: b""})]))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        assert list(read_shards([claim(tmp_path / "b.tar", 0, kind, name)])) == []


def test_names_that_only_look_so_are_read(tmp_path):
    members = {"./a.txt": b"1", "..b.txt": b"2", "c/d..e.txt": b"3"}
    assert len(list(read_shards([write_tar(tmp_path / "a.tar", members)]))) == 3


def test_a_member_cannot_take_the_place_of_the_key(tmp_path):
    with assert_refused("has a.__key__ twice"):
        list(read_shards([write_tar(tmp_path / "a.tar", {"a.__key__": b"b"})]))


def test_names_of_members_need_not_be_utf8(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("\udcff.txt"), io.BytesIO())
    samples = list(read_shards([tmp_path / "a.tar"]))
    assert samples == [{"__key__": b"\xff", "txt": b""}]
    assert list(read_shards(write_shards(samples, tmp_path / "b"))) == samples
    with assert_refused(r"sample \\xff has no picture"):
        list(read_pairs([tmp_path / "a.tar"], 8))


def test_damaged_shards_never_raise_anything_else(tmp_path):
    random = np.random.default_rng(0)
    with tarfile.open(tmp_path / "whole.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("a.txt", f"{'long' * 50}.txt", "ä.txt"):
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = 600, {"GNU.sparse.map": "0,1"} if name == "ä.txt" else {}
            tar.addfile(member, io.BytesIO(bytes(600)))
    whole = (tmp_path / "whole.tar").read_bytes()
    for _ in range(300):
        raw = bytearray(whole)
        block = 512 * random.integers(len(raw) // 512 - 2)
        for place in random.integers(0, 512, 2):
            raw[block + place] = random.integers(256)
        raw[block + 148 : block + 156] = b" " * 8
        raw[block + 148 : block + 156] = b"%06o\0 " % sum(raw[block : block + 512])
        (tmp_path / "a.tar").write_bytes(raw)
        assert refusal(lambda: list(read_shards([tmp_path / "a.tar"]))).startswith((f"{tmp_path}/a.tar", "none"))


@pytest.mark.parametrize(
    "described",
    [
        b"",
        b"no",
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"\xff",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"concept": ["a"]}',
        b'{"concept": {"a": 1}}',
        b'{"concept": true}',
        b'{"concept": 1.5}',
        b'{"concept": "\\ud800"}',
        b'{"concept": "' + b"x" * (LONGEST_TEXT + 1) + b'"}',
    ],
)
def test_json_of_another_shape_is_one_clear_line(described, tmp_path):
    with assert_refused(r"sample k: its \.json is not \{'concept': text\}"):
        read_one(tmp_path, npy=b"", json=described)


@pytest.mark.parametrize(
    ("described", "concept"),
    [
        ('{"concept": "cat"}', "cat"),
        ('{"concept": 0}', "0"),
        ('{"concept": ""}', "small dog"),
        ('{"concept": null}', "small dog"),
        ('{"other": [[1]]}', "small dog"),
    ],
)
def test_a_concept_is_text_or_a_number_or_missing(described, concept, tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((8, 8, 3), np.uint8))
    assert read_one(tmp_path, npy=buffer.getvalue(), txt=b"small dog", json=described.encode()).concept == concept


def test_captions_that_are_not_text_are_refused(tmp_path):
    with assert_refused(r"sample k: its \.txt is not UTF-8: invalid start byte"):
        read_one(tmp_path, npy=b"", txt=b"\xff\x1b[31m")
    with assert_refused(rf"sample k: its \.txt has {LONGEST_TEXT + 1} bytes; a caption has at most {LONGEST_TEXT}"):
        read_one(tmp_path, npy=b"", txt=b"x" * (LONGEST_TEXT + 1))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ("{0..10000000}", r"the range \{0\.\.10000000\} has more than 1000000 shards"),
        ("{0..99999999999999999999999}", "has more than 1000000 shards"),
        ("{0.." + "9" * 9999 + "}", "has more than 1000000 shards"),
        ("{" + "9" * 9999 + "..1}", "has more than 1000000 shards"),
        ("{5..2}", r"the range \{5\.\.2\} is reversed; write \{first\.\.last\}"),
        ("{0..999999}", r"no shard at .*x-3\.tar"),
    ],
)
def test_a_range_is_bounded_before_it_is_expanded(numbers, message, tmp_path, monkeypatch):
    for i in range(3):
        write_tar(tmp_path / f"x-{i}.tar", {"a.txt": b""})
    isfile, asked = os.path.isfile, []
    monkeypatch.setattr(os.path, "isfile", lambda path: asked.append(path) or isfile(path))
    with assert_refused(message):
        open_pairs(f"{tmp_path}/x-{numbers}.tar", cache=tmp_path / "cache")
    assert len(asked) <= 4
