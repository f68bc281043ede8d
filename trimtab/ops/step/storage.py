"""How moments are stored: one byte per value and one scale per block, or float32.

    bits=8     exp_avg_codes   uint8, shaped like the parameter        exp_avg_absmax   float32, one per block
    bits=32    exp_avg         float32, shaped like the parameter

The `codebook` defines the meaning of a byte: "quadratic" (quadratic.py) or a table of trimtab/ops/codebook.py. One
kernel computes the update for all of them. A `Batch` describes tensors whose moments are stored alike: the optimizers
step them, and the signals of trimtab/watch read them, with one call of a kernel.
"""
# mypy: disable-error-code="no-any-return"
# (the ops of torch.library are untyped)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trimtab.ops.blockwise import count_blocks, dequantize_blockwise, quantize_blockwise
from trimtab.ops.codebook import Name, load_codebook
from trimtab.ops.sharding import flat
from trimtab.ops.step import rules
from trimtab.ops.step.fused import Arguments, Code, norms_unchecked, ratios_unchecked
from trimtab.ops.step.quadratic import decode_moments, encode_moments, start_quadratic
from trimtab.ops.step.rules import RULES
from trimtab.ops.step.windows import is_away, sum_windows

Coding = Literal["quadratic"] | Name
CODINGS = ("quadratic", *get_args(Name))
SECOND = ("exp_avg_sq", "square_avg", "sum")  # PyTorch's names of second moments


@dataclass(frozen=True)
class Storage:
    """How the moments of a parameter are stored. `why` is the reason; it does not count in comparisons."""

    bits: int
    block: int
    codebook: Coding
    why: str = field(default="", compare=False)

    @property
    def code(self) -> Code:
        """The name of the code in the kernels."""
        return "quadratic" if self.codebook == "quadratic" else "codebook"

    def books(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The signed and the unsigned table; empty for a code without one."""
        if self.bits == 32 or self.codebook == "quadratic":
            return (torch.empty(0, device=device),) * 2
        return _load_books(self.codebook, device)

    def nbytes(self, numel: int) -> int:
        """Bytes of one moment of this many values."""
        return 4 * numel if self.bits == 32 else numel + 4 * count_blocks(numel, self.block)

    def keys(self, name: str) -> tuple[str, ...]:
        """The keys of one moment in a parameter's state."""
        return (name,) if self.bits == 32 else (f"{name}_codes", f"{name}_absmax")

    def layout(self, name: str, numel: int) -> dict[str, tuple[torch.dtype, int]]:
        """Dtype and size of each tensor of one moment."""
        sizes = [(torch.float32, numel)] if self.bits == 32 else [(torch.uint8, numel)]
        sizes += [(torch.float32, count_blocks(numel, self.block))] if self.bits == 8 else []
        return dict(zip(self.keys(name), sizes, strict=True))


@dataclass(eq=False)
class Batch:
    """Tensors of one parameter group whose moments are stored alike: the input of one kernel call."""

    group: dict[str, Any]
    storage: Storage
    rule: str | None  # None: only the moments are known, not the update
    names: tuple[str, ...]  # of the moments
    grad_scale: Tensor | float = 1.0
    owners: list[Tensor] = field(default_factory=list)  # the parameters
    where: list[int] = field(default_factory=list)  # their indices among all parameters
    params: list[Tensor] = field(default_factory=list)  # this process's part of them, in memory order
    grads: list[Tensor] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)  # their states
    counts: Any = field(default_factory=list)  # the steps taken so far
    starts: list[int] = field(default_factory=list)  # where pieces of tensors begin; empty for whole tensors
    steps: Tensor = field(init=False)  # the number of the step being taken, per tensor

    @property
    def t(self) -> Tensor:
        """The number of the step being taken, in float64."""
        return self.steps.double()

    @property
    def lr(self) -> rules.Number:
        return rules.exact(self.group["lr"])

    @property
    def weight_decay(self) -> rules.Number:
        """Weight decay for `rows`; 0 if decay is independent of the learning rate."""
        return 0.0 if self.group.get("independent_decay") else rules.exact(self.group["weight_decay"])

    @property
    def kinds(self) -> str:
        """The letters of the moments in trimtab/ops/native/table.py."""
        return RULES[self.rule].states if self.rule else "".join("v" if x == self.second else "m" for x in self.names)

    @property
    def second(self) -> str | None:
        """The name of the second moment, which is the last one."""
        return self.names[-1] if self.names and self.names[-1] in SECOND else None

    @property
    def block(self) -> int:
        """A block longer than the longest tensor is the same block as one of that length."""
        return min(self.storage.block, max([1, *(p.numel() for p in self.params)]))

    def numels(self) -> Tensor:
        """Of the whole tensors, not of the shards."""
        return _on_device(tuple(p.numel() for p in self.owners), self.steps.device)

    def rows(self, **columns: rules.Number) -> Tensor:
        """One row of coefficients per tensor."""
        return rules.rows(self.steps, grad_scale=self.grad_scale, **columns)

    def arguments(self, rows: Tensor) -> Arguments:
        """The arguments of the ops in trimtab.ops.step."""
        arguments = self._arguments(rows, self.params, self.names, str(self.rule))
        if self.group.get("rounding") != "split":
            return arguments
        empty = torch.empty(0, dtype=torch.int8, device=rows.device)
        return arguments._replace(extras=[flat(state.get("extra_bits", empty)) for state in self.kept])

    def norms(self, rows: Tensor) -> Tensor:
        """`step_norms`: the sums of p² and of (change of p)² that a step with these rows would make."""
        if is_away(self):
            return sum_windows(self, rows, Batch.norms)
        return norms_unchecked(*self.arguments(rows))

    def ratios(self, rows: Tensor) -> Tensor:
        """`gradient_ratios`, with the bias-corrected second moment."""
        if is_away(self):
            return sum_windows(self, rows, Batch.ratios)
        return ratios_unchecked(*self._arguments(rules.debiased(rows), self.grads, self.names[-1:], "rms"))

    def _arguments(self, rows: Tensor, params: list[Tensor], names: Sequence[str], rule: str) -> Arguments:
        """States and absmax: all of the first moment, then the next, each in memory order."""
        suffix = "" if self.storage.bits == 32 else "_codes"
        states = [state[name + suffix] for name in names for state in self.kept]
        absmax = [state[f"{name}_absmax"] for name in names for state in self.kept] if suffix else []
        if not all(x.is_contiguous() for x in states):
            states = [flat(x) for x in states]
        books = self.storage.books(rows.device)
        return Arguments(params, self.grads, states, absmax, rows, *books, rule, self.storage.code, self.block, [])


@cache
def _load_books(name: Name, device: torch.device) -> tuple[Tensor, Tensor]:
    return load_codebook(name, signed=True).to(device), load_codebook(name, signed=False).to(device)


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once: a copy would make every step wait."""
    return torch.tensor(numbers, device=device)


def new_moment(
    like: Tensor, name: str, storage: Storage, *, signed: bool, value: float = 0.0, device: torch.device | None = None
) -> dict[str, Tensor]:
    """A moment that is `value` everywhere, in the memory order of the parameter, and on its device by default."""
    device = device or like.device
    if storage.bits == 32:
        return {name: torch.full_like(like, value, dtype=torch.float32, device=device)}
    codes = torch.empty_like(like, dtype=torch.uint8, device=device)
    if storage.codebook == "quadratic":
        code, scale = start_quadratic(value, signed)
    else:
        code, scale = 255 if value else 127 if signed else 0, value
    codes.fill_(code)
    absmax = torch.full((count_blocks(like.numel(), storage.block),), scale, dtype=torch.float32, device=device)
    return {f"{name}_codes": codes, f"{name}_absmax": absmax}


def decode(entry: Mapping[str, Any], names: Sequence[str], kinds: str, storage: Storage) -> dict[str, Tensor]:
    """The moments in float32: the tensors themselves at 32 bits, new ones at 8."""
    if storage.bits == 32 or not names:
        return {name: entry[name] for name in names}
    codes = [entry[f"{name}_codes"] for name in names]
    decoded = decode_flat([flat(c) for c in codes], [entry[f"{name}_absmax"] for name in names], kinds, storage)
    return {name: x.as_strided(c.shape, c.stride()) for name, x, c in zip(names, decoded, codes, strict=True)}


def encode(moments: Mapping[str, Tensor], kinds: str, storage: Storage) -> dict[str, Tensor]:
    """Store float32 moments. Decoded moments are stored as the same values again."""
    if storage.bits == 32 or not moments:
        return dict(moments)
    stored = encode_flat([flat(x) for x in moments.values()], kinds, storage)
    entry: dict[str, Tensor] = {}
    for (name, x), (codes, absmax) in zip(moments.items(), stored, strict=True):
        entry |= {f"{name}_codes": codes.as_strided(x.shape, x.stride()), f"{name}_absmax": absmax}
    return entry


def decode_flat(codes: Sequence[Tensor], absmax: Sequence[Tensor], kinds: str, storage: Storage) -> list[Tensor]:
    """Codes of whole blocks, in memory order, to float32."""
    if storage.codebook == "quadratic":
        return decode_moments(codes, absmax, kinds, storage.block)
    signed_book, unsigned_book = storage.books(codes[0].device)
    return [
        dequantize_blockwise(c, a, unsigned_book if kind == "v" else signed_book, block=storage.block)
        for c, a, kind in zip(codes, absmax, kinds, strict=True)
    ]


def encode_flat(
    moments: Sequence[Tensor], kinds: str, storage: Storage, *, step: int | Tensor = 0
) -> list[tuple[Tensor, Tensor]]:
    """The inverse. A positive second moment is never stored as zero. `step` determines the quadratic code's dither."""
    if storage.codebook == "quadratic":
        return encode_moments(moments, kinds, storage.block, step=step)
    signed_book, unsigned_book = storage.books(moments[0].device)
    stored = []
    for x, kind in zip(moments, kinds, strict=True):
        codes, absmax = quantize_blockwise(x, unsigned_book if kind == "v" else signed_book, block=storage.block)
        if kind == "v":
            codes.masked_fill_((codes == 0) & (x > 0), 1)
        stored.append((codes, absmax))
    return stored
