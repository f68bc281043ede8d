"""How the moments of one parameter are kept: a byte per value and a scale per block, or float32.

    bits=8     exp_avg_codes   uint8, shaped like the parameter        exp_avg_absmax   float32, one per block
    bits=32    exp_avg         float32, shaped like the parameter

An update never asks which: it is the same kernel, given codes or float32. Small tensors and exempted ones keep 32 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.blockwise import count_blocks, dequantize_blockwise, quantize_blockwise
from trimtab.ops.codebook import Name, load_codebook
from trimtab.optim.sharding import flat

ZERO = {True: 127, False: 0}  # the code of zero in a signed and an unsigned table


@dataclass(frozen=True)
class Storage:
    """How one parameter's moments are kept, and why so. The reason does not make two of them different."""

    bits: int
    block: int
    codebook: Name
    why: str = field(default="", compare=False)

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
    if numel < smallest:
        return Storage(32, block, codebook, f"smaller than min_8bit_size={smallest}")
    return Storage(8, block, codebook, "bits=8")


def new_moment(like: Tensor, name: str, storage: Storage, *, signed: bool, value: float = 0.0) -> dict[str, Tensor]:
    """A moment that is `value` everywhere, in the memory order of the parameter."""
    if storage.bits == 32:
        return {name: torch.full_like(like, value, dtype=torch.float32)}
    codes = torch.full_like(like, ZERO[signed] if value == 0 else 255, dtype=torch.uint8)
    absmax = torch.full((count_blocks(like.numel(), storage.block),), value, dtype=torch.float32, device=like.device)
    return {f"{name}_codes": codes, f"{name}_absmax": absmax}


def decode(state: Mapping[str, Any], name: str, storage: Storage, *, signed: bool) -> Tensor:
    """The moment in float32: the tensor itself at 32 bits, a new one at 8."""
    if storage.bits == 32:
        return state[name]
    codes, absmax = state[f"{name}_codes"], state[f"{name}_absmax"]
    out = torch.empty_like(codes, dtype=torch.float32)
    decode_flat(flat(codes), absmax, storage, signed=signed, out=flat(out))
    return out


def encode(x: Tensor, name: str, storage: Storage, *, signed: bool) -> dict[str, Tensor]:
    """Store a float32 moment. What was decoded comes back as the same codes."""
    if storage.bits == 32:
        return {name: x}
    codes = torch.empty_like(x, dtype=torch.uint8)
    absmax = x.new_empty(count_blocks(x.numel(), storage.block), dtype=torch.float32)
    encode_flat(flat(x), storage, signed=signed, out=(flat(codes), absmax))
    return {f"{name}_codes": codes, f"{name}_absmax": absmax}


def decode_flat(codes: Tensor, absmax: Tensor, storage: Storage, *, signed: bool, out: Tensor | None = None) -> Tensor:
    book = load_codebook(storage.codebook, signed=signed).to(codes.device)
    return dequantize_blockwise(codes, absmax, book, block=storage.block, out=out)


def encode_flat(x: Tensor, storage: Storage, *, signed: bool, out: tuple[Tensor, Tensor]) -> None:
    book = load_codebook(storage.codebook, signed=signed).to(x.device)
    codes, _ = quantize_blockwise(x, book, block=storage.block, out=out)
    if not signed:  # a positive second moment is never stored as zero
        codes.masked_fill_((codes == 0) & (x > 0), 1)
