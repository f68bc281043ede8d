"""Block-wise 8-bit quantization: one byte per value and one scale per block.

A block is `block` neighbouring values of the flattened tensor. Dividing it by its largest magnitude (`absmax`)
puts it in [-1, 1]; each value then becomes the index of the nearest codebook entry. An outlier affects the precision
of its own block only.

    x --split--> blocks --/absmax--> [-1, 1] --nearest--> codes

Ties go to the lower index. A block of zeros has absmax 0 and stays zero. A block that holds a NaN or an Inf gets
absmax NaN, so that the whole block dequantizes to NaN, and no other.

Dettmers et al. 2022, section 2. Kernels: blockwise.cpp (CPU), blockwise_triton.py (GPU).
"""
# mypy: disable-error-code="no-any-return"
# (the ops of torch.library are untyped)

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.ops import backends
from trimtab.ops.checks import FLOATS, check_block, check_codebook, check_disjoint, check_same_device, check_tensor
from trimtab.ops.codebook import midpoints


def quantize_blockwise(
    x: Tensor, codebook: Tensor, *, block: int = 256, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return `(codes, absmax)`: uint8 shaped like `x`, and one float32 per block.

    >>> codes, absmax = quantize_blockwise(torch.randn(1000), trimtab.ops.load_codebook(), block=256)
    >>> absmax.shape                                            # the last block is a short one
    torch.Size([4])
    """
    check_block(block)
    check_codebook(codebook)
    check_tensor("x", x, dtypes=FLOATS)
    check_same_device(x=x, codebook=codebook)
    if out is None:
        return _quantize(x, codebook, _useful(block, x))
    codes, absmax = out
    _check_stored(codes, absmax, block)
    check_tensor("out[0]", codes, dtypes=(torch.uint8,), shape=x.shape, because="that of x")
    check_same_device(x=x, codes=codes, absmax=absmax)
    check_disjoint(x=x, codes=codes, absmax=absmax)
    _quantize_out(x, codebook, _useful(block, x), codes, absmax)
    return codes, absmax


def dequantize_blockwise(
    codes: Tensor,
    absmax: Tensor,
    codebook: Tensor,
    *,
    block: int = 256,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Return `codebook[codes] * absmax`, shaped like `codes`. If `out` is given, it determines the dtype."""
    check_block(block)
    check_codebook(codebook)
    _check_stored(codes, absmax, block)
    check_same_device(codes=codes, absmax=absmax, codebook=codebook)
    if out is None:
        if dtype not in FLOATS:
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
        return _dequantize(codes, absmax, codebook, _useful(block, codes), dtype)
    check_tensor("out", out, dtypes=FLOATS, shape=codes.shape, because="that of codes")
    check_same_device(codes=codes, out=out)
    check_disjoint(codes=codes, absmax=absmax, out=out)
    _dequantize_out(codes, absmax, codebook, _useful(block, codes), out)
    return out


def quantize_tensorwise(x: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for the whole tensor: a single block. For ablations; one outlier affects all values."""
    return quantize_blockwise(x, codebook, block=max(1, x.numel()))


def dequantize_tensorwise(
    codes: Tensor, absmax: Tensor, codebook: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    return dequantize_blockwise(codes, absmax, codebook, block=max(1, codes.numel()), dtype=dtype)


def count_blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def quantize_reference(x: Tensor, codebook: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The definition. Every kernel is tested against this function."""
    flat = x.float().flatten()
    blocks = pad(flat, (0, -flat.numel() % block)).view(-1, block)
    absmax = blocks.abs().amax(dim=1)
    finite = absmax.isfinite()
    # An all-zero block has no scale; dividing by one keeps its zeros exact. A non-finite one is stored as zeros.
    unit = blocks / torch.where(finite & (absmax > 0), absmax, 1.0)[:, None]
    unit = torch.where(finite[:, None], unit, 0.0)
    codes = torch.bucketize(unit, midpoints(codebook)).flatten()[: x.numel()]
    return codes.view(x.shape).to(torch.uint8), torch.where(finite, absmax, torch.nan)


def dequantize_reference(codes: Tensor, absmax: Tensor, codebook: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The definition of decoding."""
    scale = absmax.repeat_interleave(block)[: codes.numel()].view(codes.shape)
    return (codebook[codes.int()] * scale).to(dtype)


def _useful(block: int, x: Tensor) -> int:
    """A block longer than the tensor is the same block as one of its length."""
    return min(block, max(1, x.numel()))


def _check_stored(codes: Tensor, absmax: Tensor, block: int) -> None:
    check_tensor("codes", codes, dtypes=(torch.uint8,))
    blocks = (count_blocks(codes.numel(), block),)
    check_tensor("absmax", absmax, dtypes=(torch.float32,), shape=blocks, because=f"one per block of {block}")


def _quantize_out_reference(x: Tensor, codebook: Tensor, block: int, codes: Tensor, absmax: Tensor) -> None:
    for target, value in zip((codes, absmax), quantize_reference(x, codebook, block), strict=True):
        target.copy_(value)


def _dequantize_out_reference(codes: Tensor, absmax: Tensor, codebook: Tensor, block: int, out: Tensor) -> None:
    out.copy_(dequantize_reference(codes, absmax, codebook, block, torch.float32))


_quantize = torch.library.custom_op("trimtab::quantize_blockwise", mutates_args=())(quantize_reference)
_dequantize = torch.library.custom_op("trimtab::dequantize_blockwise", mutates_args=())(dequantize_reference)
_quantize_out = torch.library.custom_op("trimtab::quantize_blockwise_out", mutates_args=("codes", "absmax"))(
    _quantize_out_reference
)
_dequantize_out = torch.library.custom_op("trimtab::dequantize_blockwise_out", mutates_args=("out",))(
    _dequantize_out_reference
)


@_quantize.register_fake
def _(x: Tensor, codebook: Tensor, block: int) -> tuple[Tensor, Tensor]:
    absmax = x.new_empty(count_blocks(x.numel(), block), dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.uint8), absmax


@_dequantize.register_fake
def _(codes: Tensor, absmax: Tensor, codebook: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(codes, dtype=dtype)


# --- Kernels


def quantize_native(x: Tensor, codebook: Tensor, block: int) -> tuple[Tensor, Tensor]:
    codes = backends.empty(x.shape, torch.uint8)
    absmax = backends.empty((count_blocks(x.numel(), block),), torch.float32)
    quantize_out_native(x, codebook, block, codes, absmax)
    return codes, absmax


def quantize_out_native(x: Tensor, codebook: Tensor, block: int, codes: Tensor, absmax: Tensor) -> None:
    assert backends.native is not None
    values = (x.data_ptr(), backends.DTYPE_CODES[x.dtype], x.numel(), block)
    stored = (codes.data_ptr(), absmax.data_ptr())
    backends.native.quantize(*values, codebook.data_ptr(), codebook.numel(), *stored, torch.get_num_threads())


def dequantize_native(codes: Tensor, absmax: Tensor, codebook: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    out = backends.empty(codes.shape, dtype)
    dequantize_out_native(codes, absmax, codebook, block, out)
    return out


def dequantize_out_native(codes: Tensor, absmax: Tensor, codebook: Tensor, block: int, out: Tensor) -> None:
    assert backends.native is not None
    stored = (codes.data_ptr(), absmax.data_ptr(), codes.numel(), block)
    values = (out.data_ptr(), backends.DTYPE_CODES[out.dtype])
    backends.native.dequantize(*stored, codebook.data_ptr(), codebook.numel(), *values, torch.get_num_threads())


if backends.native is not None:
    _quantize.register_kernel("cpu")(quantize_native)
    _quantize_out.register_kernel("cpu")(quantize_out_native)
    _dequantize.register_kernel("cpu")(dequantize_native)
    _dequantize_out.register_kernel("cpu")(dequantize_out_native)

if backends.triton_missing is None:
    from trimtab.ops import blockwise_triton

    _quantize.register_kernel(backends.triton_device)(blockwise_triton.quantize)
    _quantize_out.register_kernel(backends.triton_device)(blockwise_triton.quantize_out)
    _dequantize.register_kernel(backends.triton_device)(blockwise_triton.dequantize)
    _dequantize_out.register_kernel(backends.triton_device)(blockwise_triton.dequantize_out)
