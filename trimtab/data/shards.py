"""webdataset shards: tar files in which adjacent members with the same base name are one sample.

    000000.tar:   00000.png  00000.txt  00000.json   00001.png  00001.txt  00001.json  ...

Read and written with the standard library. Members are read into memory, never unpacked to disk, never executed or
unpickled. What a header claims is compared with a limit before memory is reserved for it.
"""

import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from trimtab.data.files import open_file, show
from trimtab.data.pictures import Pair, check_array, find_concept, read_picture
from trimtab.hints import load_extra

PICTURES = ("png", "jpg", "jpeg", "webp")  # decoded by Pillow
ENDING = 1024  # zero bytes at the end of every POSIX tar file
MOST_SHARDS = 1_000_000  # of a range: a billion pairs in shards of the usual size
LONGEST_NUMBER = 100  # digits; int() refuses thousands of them
MOST_BYTES = 1 << 28  # of a member: 256 MB, the largest picture uncompressed
LONGEST_TEXT = 1 << 16  # bytes of a caption, characters of a concept; CLIP reads 77 tokens
Sample = dict[str, bytes]  # by extension; "__key__" is the base name


class Described(TypedDict, total=False):
    """The part of a sample's `.json` that is used."""

    concept: Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)] | int | None  # an int: the number of a class


def find_shards(path: str) -> list[Path]:
    """The tar files of a folder, of `name-{000..017}.tar`, or the one given, sorted by name."""
    braces = re.fullmatch(r"(.*)\{([0-9]+)\.\.([0-9]+)\}(.*)", path)
    if braces:
        shards: Iterable[Path] = _expand_range(*braces.groups())
    else:
        shards = sorted(Path(path).glob("*.tar")) if os.path.isdir(path) else [Path(path)]
    found = []
    for shard in shards or [Path(path)]:  # an empty folder is no shard either
        if not os.path.isfile(shard):
            raise ValueError(f"no shard at {show(shard)}; give a folder of .tar files or one of them")
        found.append(shard)
    return found


def read_shards(shards: Iterable[str | Path]) -> Iterator[Sample]:
    """All samples of the shards in order, as bytes by extension."""
    for shard in map(Path, shards):
        with open_file(shard) as file:
            _check_ending(file, shard)
            yield from _group(_members(file, shard), shard)


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
        caption = _caption(sample)
        concept = _concept(sample) or find_concept(caption)
        yield Pair(_decode(sample, size), caption, concept)


def _expand_range(before: str, first: str, last: str, after: str) -> Iterator[Path]:
    digits = max(len(first), len(last))
    count = int(last) - int(first) + 1 if digits <= LONGEST_NUMBER else MOST_SHARDS + 1
    if not 1 <= count <= MOST_SHARDS:
        wrong = "is reversed" if count < 1 else f"has more than {MOST_SHARDS} shards"
        raise ValueError(f"the range {show(f'{{{first}..{last}}}')} {wrong}; write {{first..last}}, as in {{000..017}}")
    return (Path(f"{before}{i:0{len(first)}d}{after}") for i in range(int(first), int(last) + 1))


def _caption(sample: Sample) -> str:
    raw = sample.get("txt")
    if raw is None:
        raise ValueError(f"sample {_key(sample)} has no .txt with its caption, only {show(', '.join(sorted(sample)))}")
    if len(raw) > LONGEST_TEXT:
        raise ValueError(f"sample {_key(sample)}: its .txt has {len(raw)} bytes; a caption has at most {LONGEST_TEXT}")
    try:
        return " ".join(raw.decode().split())
    except UnicodeDecodeError as error:
        raise ValueError(f"sample {_key(sample)}: its .txt is not UTF-8: {error.reason}") from error


def _concept(sample: Sample) -> str:
    """The concept in the `.json`, or "" if there is none."""
    try:
        concept = msgspec.json.decode(sample.get("json", b"{}"), type=Described).get("concept")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"sample {_key(sample)}: its .json is not {{'concept': text}}: {show(error)}") from error
    return "" if concept is None else str(concept)


def _decode(sample: Sample, size: int) -> NDArray[np.uint8]:
    kind = next((kind for kind in (*PICTURES, "npy") if kind in sample), None)
    if kind is None:
        kinds = ", ".join((*PICTURES, "npy"))
        raise ValueError(f"sample {_key(sample)} has no picture ({kinds}), only {show(', '.join(sorted(sample)))}")
    file = io.BytesIO(sample[kind])
    if kind == "npy":
        try:
            check_array(file, (size, size, 3))
            file.seek(0)
            return np.asarray(np.load(file, allow_pickle=False), np.uint8)
        except ValueError as error:
            reason = f".npy pictures are not resized; {show(error)}, size={size}"
            raise ValueError(f"sample {_key(sample)}: {reason}") from error
    image = load_extra("PIL.Image", extra="clip", purpose=f"a .{kind} picture in a shard")
    try:
        return read_picture(image, file, size)
    except ValueError as error:
        raise ValueError(f"sample {_key(sample)}: cannot decode its .{kind}: {error}") from error


def _key(sample: Sample) -> str:
    return show(sample["__key__"].decode(errors="backslashreplace"))


def _group(members: Iterable[tuple[str, bytes]], shard: Path) -> Iterator[Sample]:
    """Group adjacent members whose names are equal up to the first dot of the file name."""
    sample: Sample = {}
    for path, content in members:
        folder, _, name = path.rpartition("/")
        stem, _, kind = name.partition(".")
        key = f"{folder}/{stem}".lstrip("/").encode(errors="surrogateescape")  # names need not be UTF-8
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        sample.setdefault("__key__", key)
        if kind in sample:
            raise ValueError(f"{show(shard)} has {show(path)} twice")
        sample[kind] = content
    if sample:
        yield sample


def _members(file: BinaryIO, shard: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the regular files in a tar file."""
    with _complete(shard):
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115, the caller closes the file
    while True:
        with _complete(shard):
            member = tar.next()
            if member is not None and member.size < 0:  # tarfile would go back and read the same members forever
                raise tarfile.TarError(f"a member has {member.size} bytes")
        if member is None:
            return
        if not member.isfile():
            continue
        name = f"{show(shard)}: its member {show(member.name)}"
        parts = re.split(r"[/\\]", member.name)
        if not parts[0] or ".." in parts:
            raise ValueError(f"{name} leads out of the archive; names are relative, without '..'")
        if member.issparse():
            raise ValueError(f"{name} is sparse, {member.size} bytes; pack the shard without tar's option --sparse")
        if member.size > MOST_BYTES:
            raise ValueError(f"{name} has {member.size} bytes; a member has at most {MOST_BYTES}")
        with _complete(shard):
            content = tar.extractfile(member)
            assert content is not None, "isfile() is true"
            raw = content.read()
        yield member.name, raw


@contextmanager
def _complete(shard: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged header raises many classes besides TarError
        raise ValueError(f"{show(shard)} is not a complete tar file: {show(error)}") from error


def _check_ending(file: BinaryIO, shard: Path) -> None:
    """Check the zeros at the end: tarfile accepts a file that was cut between two members."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - ENDING, 0))
    if size < ENDING or any(file.read()):
        raise ValueError(f"{show(shard)} is not a complete tar file: its end is missing ({size} bytes)")
    file.seek(0)


def _write(samples: list[Sample], shard: Path) -> Path:
    work = shard.with_name(f"{shard.name}.tmp")
    with tarfile.open(work, "w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            for kind in sorted(set(sample) - {"__key__"}):
                member = tarfile.TarInfo(f"{sample['__key__'].decode(errors='surrogateescape')}.{kind}")
                member.size = len(sample[kind])
                tar.addfile(member, io.BytesIO(sample[kind]))
    work.replace(shard)
    return shard
