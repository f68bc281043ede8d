"""The 256 values of each 8-bit data type.

A codebook is a sorted float32 table inside [-1, 1] (signed) or [0, 1] (unsigned). A value is stored as the index
of the nearest entry. The dynamic table has few entries in the small decades and many near 1.

    decade 10^-6 : 1 value    10^-5 : 2    10^-4 : 4    ...    10^0 : 64        (signed; twice as many unsigned)

Its values have a closed form, which the kernels use instead of a lookup. With j the magnitude index of a signed
code and i = floor(log2 j), value = 10^(i-6) * (0.9 * (j + 0.5) / 2^i - 0.8); j = 128 is 1.0.

Dettmers et al. 2022, section 2 and appendix F.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

Name = Literal["dynamic-symmetric", "dynamic", "linear", "dynamic-flush", "linear-flush"]
NOTHING = 1e-30  # of the largest value of a block: what a step divides by is then eps


def load_codebook(name: Name = "dynamic-symmetric", *, signed: bool = True) -> Tensor:
    """The named table on the CPU. It is shared between callers: do not write to it."""
    if name not in get_args(Name):
        raise ValueError(f"unknown codebook {name!r}; choose one of {', '.join(get_args(Name))}")
    return _TABLES[name, signed]


def dynamic(*, signed: bool = True, exponent_bits: int = 7, bits: int = 8) -> Tensor:
    """The dynamic table of 2^bits values: `exponent_bits` decades, the rest of the bits are linear fractions.

    The signed 8-bit table contains 1.0 but not -1.0. Kept as published, to read the states of other libraries.
    """
    fraction_bits = bits - 1 - exponent_bits
    if not (2 <= bits <= 8 and exponent_bits >= 1 and fraction_bits >= 0):
        raise ValueError(
            f"a dynamic table needs 2 <= bits <= 8 and 1 <= exponent_bits <= bits - 1, "
            f"got bits={bits}, exponent_bits={exponent_bits}"
        )
    magnitudes = []
    for i in range(exponent_bits):
        count = 2 ** (i + fraction_bits + (0 if signed else 1))
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64, device="cpu")
        magnitudes.append(10.0 ** (i - exponent_bits + 1) * (edges[1:] + edges[:-1]) / 2)
    if fraction_bits:  # the codes with no indicator bit, at the scale of the last decade
        edges = torch.linspace(0.1, 1.0, 2**fraction_bits, dtype=torch.float64, device="cpu")
        magnitudes.append((edges[1:] + edges[:-1]) / 2)
    values = torch.cat(magnitudes)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")
    values = torch.cat([-values, values, ends]) if signed else torch.cat([values, ends])
    # The unsigned table with fraction bits does not use every code; the published one is padded with zeros.
    values = torch.cat([values, values.new_zeros(2**bits - values.numel())])
    return values.sort().values.float()


def dynamic_symmetric(*, exponent_bits: int = 7, bits: int = 8) -> Tensor:
    """The signed dynamic table with its first value replaced by -1.0.

    Without -1.0, a block whose largest magnitude is negative is stored 0.7 % too small at every step. Long averages
    (Lion, AdEMAMix) then lose most of their value; with this table they do not.
    """
    values = dynamic(signed=True, exponent_bits=exponent_bits, bits=bits)
    values[0] = -1.0
    return values


def linear(*, signed: bool = True, bits: int = 8) -> Tensor:
    """Evenly spaced values. The signed table is that of the paper: symmetric, so it has no exact zero."""
    _check_bits(bits)
    return torch.linspace(-1.0 if signed else 0.0, 1.0, 2**bits, dtype=torch.float64, device="cpu").float()


def flushing(table: Tensor) -> Tensor:
    """An unsigned table in which code 1 decodes to nearly zero; the largest value but one makes room for it.

    Here a positive second moment gets code 1 at least. In the published optimizers it may become zero, and the next
    step may then be very large. With this table they can be compared.
    """
    return torch.cat([table[:1], table.new_full((1,), NOTHING), table[1:-2], table[-1:]])


def quantile(x: Tensor, *, bits: int = 8, offset: float = 1 / 512) -> Tensor:
    """The exact quantiles of `x`, evenly spaced in probability from `offset` to 1 - `offset`.

    Not inside [-1, 1]: this table contains the values themselves, so it is used with absmax = 1.
    """
    return _order_statistics(_finite(x, bits, offset), bits, offset).float()


def quantile_chunked(x: Tensor, *, bits: int = 8, offset: float = 1 / 512, chunk: int = 4096) -> Tensor:
    """Estimate `quantile` by averaging the order statistics of chunks: no sort is longer than `chunk`.

    A last chunk shorter than half is left out.
    """
    if chunk < 2**bits:
        raise ValueError(f"chunk must hold at least {2**bits} values, got {chunk}")
    values = _finite(x, bits, offset)
    whole, rest = divmod(values.numel(), chunk)
    if whole == 0:
        return _order_statistics(values, bits, offset).float()
    total = _order_statistics(values[: whole * chunk].view(whole, chunk), bits, offset).sum(dim=0)
    if 2 * rest < chunk:
        return (total / whole).float()
    total += _order_statistics(values[whole * chunk :], bits, offset)
    return (total / (whole + 1)).float()


def midpoints(values: Tensor) -> Tensor:
    """The 255 decision boundaries: a value on one of them goes to the lower index."""
    return (values[1:] + values[:-1]) / 2


def _check_bits(bits: int) -> None:
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be between 2 and 8, got {bits}")


def _order_statistics(values: Tensor, bits: int, offset: float) -> Tensor:
    """The values at evenly spaced probabilities along the last dimension, linear between neighbours."""
    ordered = values.sort(dim=-1).values
    last = values.shape[-1] - 1
    position = torch.linspace(offset, 1 - offset, 2**bits, dtype=torch.float64, device=values.device) * last
    below = position.floor().long()
    return torch.lerp(ordered[..., below], ordered[..., (below + 1).clamp(max=last)], position - below)


def _finite(x: Tensor, bits: int, offset: float) -> Tensor:
    _check_bits(bits)
    if not 0 < offset < 0.5:
        raise ValueError(f"offset must be between 0 and 0.5, got {offset}")
    if x.numel() < 2**bits:
        raise ValueError(f"a {bits}-bit quantile table needs at least {2**bits} values, got {x.numel()}")
    values = x.detach().flatten().double()
    if not values.isfinite().all():
        raise ValueError("quantiles of a tensor with NaN or Inf are not defined; remove those values first")
    return values


# Made at import: later, a table would get the device and the tensor mode of its first caller.
_TABLES = {
    ("dynamic-symmetric", True): dynamic_symmetric(),
    ("dynamic-symmetric", False): dynamic(signed=False),
    **{("dynamic", signed): dynamic(signed=signed) for signed in (True, False)},
    **{("linear", signed): linear(signed=signed) for signed in (True, False)},
    ("dynamic-flush", True): dynamic(),
    ("dynamic-flush", False): flushing(dynamic(signed=False)),
    ("linear-flush", True): linear(),
    ("linear-flush", False): flushing(linear(signed=False)),
}
