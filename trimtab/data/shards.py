"""webdataset shards: tar files in which adjacent members with the same base name are one sample.

    000000.tar:   00000.png  00000.txt  00000.json   00001.png  00001.txt  00001.json  ...

Read and written with the standard library. Members are read into memory, never unpacked to disk, never executed or
unpickled.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from trimtab.data.pictures import Pair, find_concept, read_picture
from trimtab.hints import load_extra

PICTURES = ("png", "jpg", "jpeg", "webp")  # decoded by Pillow
ENDING = 1024  # zero bytes at the end of every POSIX tar file
Sample = dict[str, bytes]  # by extension; "__key__" is the base name


def find_shards(path: str) -> list[Path]:
    """The tar files of a folder, of `name-{000..017}.tar`, or the one given, sorted by name."""
    braces = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", path)
    if braces:
        before, first, last, after = braces.groups()
        shards = [Path(f"{before}{i:0{len(first)}d}{after}") for i in range(int(first), int(last) + 1)]
    else:
        shards = sorted(Path(path).glob("*.tar")) if Path(path).is_dir() else [Path(path)]
    missing = [shard for shard in shards if not shard.is_file()]
    if missing or not shards:
        raise ValueError(f"no shard at {missing[0] if missing else path}; give a folder of .tar files or one of them")
    return shards


def read_shards(shards: Iterable[str | Path]) -> Iterator[Sample]:
    """All samples of the shards in order, as bytes by extension."""
    for shard in map(Path, shards):
        _check_ending(shard)
        try:
            with tarfile.open(shard, "r:") as tar:
                yield from _group(tar, shard)
        except tarfile.TarError as error:
            raise ValueError(f"{shard} is not a complete tar file: {error}") from error


def write_shards(samples: Iterable[Sample], folder: str | Path, *, per_shard: int = 1000) -> list[Path]:
    """Write shards of `per_shard` samples; the last may be smaller. Equal samples give equal bytes."""
    if per_shard < 1:
        raise ValueError(f"per_shard must be at least 1, got {per_shard}; 1000 is the default")
    Path(folder).mkdir(parents=True, exist_ok=True)
    shards: list[Path] = []
    samples = iter(samples)
    while group := list(islice(samples, per_shard)):
        shards.append(_write(group, Path(folder) / f"{len(shards):06d}.tar"))
    return shards


def pack_pairs(pairs: Iterable[Pair], *, picture: str = "png") -> Iterator[Sample]:
    """Samples for `write_shards`: the picture as "png" (needs Pillow) or "npy", caption, and the concept as JSON."""
    if picture not in ("png", "npy"):
        raise ValueError(f"pictures are packed as 'png' or 'npy', got {picture!r}")
    image = load_extra("PIL.Image", extra="clip", purpose="writing png") if picture == "png" else None
    for number, pair in enumerate(pairs):
        buffer = io.BytesIO()
        if image is None:
            np.save(buffer, pair.pixels)
        else:
            image.fromarray(pair.pixels).save(buffer, "png")
        concept = json.dumps({"concept": pair.concept})
        named = {"__key__": f"{number:08d}".encode(), picture: buffer.getvalue()}
        yield {**named, "txt": pair.caption.encode(), "json": concept.encode()}


def read_pairs(shards: Iterable[str | Path], size: int) -> Iterator[Pair]:
    """Pairs of shards: a picture and `.txt`; the concept comes from `.json`, or else from the caption."""
    for sample in read_shards(shards):
        key = sample["__key__"].decode()
        if "txt" not in sample:
            raise ValueError(f"sample {key} has no .txt with its caption, only {', '.join(sorted(sample))}")
        caption = " ".join(sample["txt"].decode().split())
        described = json.loads(sample["json"]) if "json" in sample else {}
        yield Pair(_decode(sample, size), caption, str(described.get("concept") or find_concept(caption)))


def _decode(sample: Sample, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    key = sample["__key__"].decode()
    kind = next((kind for kind in PICTURES if kind in sample), None)
    if kind is not None:
        image = load_extra("PIL.Image", extra="clip", purpose=f"a .{kind} picture in a shard")
        try:
            return read_picture(image, io.BytesIO(sample[kind]), size)
        except OSError as error:
            raise ValueError(f"sample {key}: cannot decode its .{kind}: {error}") from error
    if "npy" not in sample:
        raise ValueError(f"sample {key} has no picture ({', '.join((*PICTURES, 'npy'))}), only {sorted(sample)}")
    pixels = np.load(io.BytesIO(sample["npy"]), allow_pickle=False)
    if pixels.shape != (size, size, 3) or pixels.dtype != np.uint8:
        raise ValueError(f"sample {key}: .npy pictures are not resized; got {pixels.dtype} {pixels.shape}, size={size}")
    return np.asarray(pixels, np.uint8)


def _group(tar: tarfile.TarFile, shard: Path) -> Iterator[Sample]:
    """Group adjacent members whose names are equal up to the first dot of the file name."""
    sample: Sample = {}
    for member in tar:
        if not member.isfile():
            continue
        folder, _, name = member.name.rpartition("/")
        stem, _, kind = name.partition(".")
        key = f"{folder}/{stem}".lstrip("/").encode()
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        if kind in sample:
            raise ValueError(f"{shard} has {member.name} twice")
        content = tar.extractfile(member)
        assert content is not None, "isfile() is true"
        sample |= {"__key__": key, kind: content.read()}
    if sample:
        yield sample


def _check_ending(shard: Path) -> None:
    """Check the zeros at the end: tarfile accepts a file that was cut between two members."""
    with open(shard, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(size - ENDING, 0))
        if size < ENDING or any(file.read()):
            raise ValueError(f"{shard} is not a complete tar file: its end is missing ({size} bytes)")


def _write(samples: list[Sample], shard: Path) -> Path:
    work = shard.with_name(f"{shard.name}.tmp")
    with tarfile.open(work, "w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            for kind in sorted(set(sample) - {"__key__"}):
                member = tarfile.TarInfo(f"{sample['__key__'].decode()}.{kind}")
                member.size = len(sample[kind])
                tar.addfile(member, io.BytesIO(sample[kind]))
    work.replace(shard)
    return shard
