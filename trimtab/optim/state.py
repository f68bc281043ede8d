"""How the moments of one parameter are kept: a byte per value and a scale per block, or float32.

    bits=8     exp_avg_codes   uint8, shaped like the parameter        exp_avg_absmax   float32, one per block
    bits=32    exp_avg         float32, shaped like the parameter

What a byte means is the `codebook`: "quadratic" (trimtab/ops/quadratic.py) or a table of trimtab/ops/codebook.py. An
update never asks: it is the same kernel for all. Small tensors and exempted ones keep 32 bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trimtab.ops.blockwise import count_blocks, dequantize_blockwise, quantize_blockwise
from trimtab.ops.codebook import Name, load_codebook
from trimtab.ops.quadratic import decode_moments, encode_moments
from trimtab.ops.sharding import flat
from trimtab.ops.step import Code

Coding = Literal["quadratic"] | Name
CODINGS = ("quadratic", *get_args(Name))


@dataclass(frozen=True)
class Storage:
    """How one parameter's moments are kept, and why so. The reason does not make two of them different."""

    bits: int
    block: int
    codebook: Coding
    why: str = field(default="", compare=False)

    @property
    def code(self) -> Code:
        """The kernels' word for it."""
        return "quadratic" if self.codebook == "quadratic" else "codebook"

    def books(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The signed and the unsigned table; some table where the code needs none."""
        name: Name = "dynamic-symmetric" if self.codebook == "quadratic" else self.codebook
        return load_codebook(name, signed=True).to(device), load_codebook(name, signed=False).to(device)

    def nbytes(self, numel: int) -> int:
        """Bytes of one moment of this many values."""
        return 4 * numel if self.bits == 32 else numel + 4 * count_blocks(numel, self.block)


def choose_storage(numel: int, group: Mapping[str, Any], exempt: str | None) -> Storage:
    """`numel` is that of the whole parameter, so that every process decides alike about its shard."""
    block, codebook, smallest = group["block"], group["codebook"], group["min_8bit_size"]
    if group["bits"] == 32:
        return Storage(32, block, codebook, "bits=32")
    if exempt is not None:
        return Storage(32, block, codebook, exempt)
    if group["skip_zeros"]:  # the values of a block share a scale: none of them could stay exactly what it was
        return Storage(32, block, codebook, "skip_zeros")
    if numel < smallest:
        return Storage(32, block, codebook, f"smaller than min_8bit_size={smallest}")
    return Storage(8, block, codebook, "bits=8")


def new_moment(like: Tensor, name: str, storage: Storage, *, signed: bool, value: float = 0.0) -> dict[str, Tensor]:
    """A moment that is `value` everywhere, in the memory order of the parameter."""
    if storage.bits == 32:
        return {name: torch.full_like(like, value, dtype=torch.float32)}
    quadratic = storage.codebook == "quadratic"
    zero = 127 if signed and not quadratic else 0
    codes = torch.full_like(like, 255 if value else zero, dtype=torch.uint8)
    scale = value**0.5 if quadratic else value  # the quadratic code keeps the root of a second moment
    absmax = torch.full((count_blocks(like.numel(), storage.block),), scale, dtype=torch.float32, device=like.device)
    return {f"{name}_codes": codes, f"{name}_absmax": absmax}


def decode(
    entry: Mapping[str, Any], names: Sequence[str], signed: Sequence[bool], storage: Storage
) -> dict[str, Tensor]:
    """The moments in float32: the tensors themselves at 32 bits, new ones at 8."""
    if storage.bits == 32 or not names:
        return {name: entry[name] for name in names}
    codes = [entry[f"{name}_codes"] for name in names]
    decoded = decode_flat([flat(c) for c in codes], [entry[f"{name}_absmax"] for name in names], signed, storage)
    return {name: _shape_like(x, c) for name, x, c in zip(names, decoded, codes, strict=True)}


def encode(moments: Mapping[str, Tensor], signed: Sequence[bool], storage: Storage) -> dict[str, Tensor]:
    """Keep float32 moments as the storage says. What was decoded comes back as the same codes."""
    if storage.bits == 32 or not moments:
        return dict(moments)
    stored = encode_flat([flat(x) for x in moments.values()], signed, storage)
    entry: dict[str, Tensor] = {}
    for (name, x), (codes, absmax) in zip(moments.items(), stored, strict=True):
        entry |= {f"{name}_codes": _shape_like(codes, x), f"{name}_absmax": absmax}
    return entry


def decode_flat(
    codes: Sequence[Tensor], absmax: Sequence[Tensor], signed: Sequence[bool], storage: Storage
) -> list[Tensor]:
    """Codes of one stretch of whole blocks, in memory order, to float32."""
    if storage.codebook == "quadratic":
        return decode_moments(codes, absmax, signed, storage.block)
    signed_book, unsigned_book = storage.books(codes[0].device)
    return [
        dequantize_blockwise(c, a, signed_book if is_signed else unsigned_book, block=storage.block)
        for c, a, is_signed in zip(codes, absmax, signed, strict=True)
    ]


def encode_flat(
    moments: Sequence[Tensor], signed: Sequence[bool], storage: Storage, *, step: int | Tensor = 0
) -> list[tuple[Tensor, Tensor]]:
    """The way back. A positive second moment is never stored as zero. The quadratic code dithers by the step."""
    if storage.codebook == "quadratic":
        return encode_moments(moments, signed, storage.block, step=step)
    signed_book, unsigned_book = storage.books(moments[0].device)
    stored = []
    for x, is_signed in zip(moments, signed, strict=True):
        codes, absmax = quantize_blockwise(x, signed_book if is_signed else unsigned_book, block=storage.block)
        if not is_signed:
            codes.masked_fill_((codes == 0) & (x > 0), 1)
        stored.append((codes, absmax))
    return stored


def _shape_like(x: Tensor, like: Tensor) -> Tensor:
    """Back from memory order to the shape and strides it came from."""
    return x.as_strided(like.shape, like.stride())
