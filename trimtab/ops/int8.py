"""int8 quantization with one scale per row, per column or per tensor, and the int8 matrix product.

    codes = round(127 * x / absmax), half to even, in [-127, 127]           x ~ codes * absmax / 127

A scale can be taken out of a matrix product only if it is constant along the inner dimension: rows of the left
operand, columns of the right one, or a whole tensor.

    (a_codes @ b_codes in int32) * (a_absmax / 127)[:, None] * (b_absmax / 127) + bias

A row of zeros has absmax 0 and codes 0. A row that holds a NaN or an Inf gets absmax NaN and codes 0, so its products
are NaN, and no others.

Wortsman et al. 2023, section 2. Kernels: int8.cpp (CPU), int8_triton.py (GPU). The product itself is oneDNN's
(`torch._int_mm`) on CPUs with VNNI, and int8.cpp's where there is AVX2 or AVX-512 without it; on GPUs it is Triton's or
cuBLASLt's, whichever is faster.
"""
# mypy: disable-error-code="no-any-return"
# (the ops of torch.library are untyped)

import torch
from torch import Tensor

from trimtab.ops import backends
from trimtab.ops.checks import FLOATS, check_same_device, check_tensor

# 127 * 127 * inner must stay below 2^31, or an int32 sum could wrap around.
MAX_INNER = (2**31 - 1) // 127**2


def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(codes, absmax)` of a matrix: int8 shaped like `x`, and one float32 per row."""
    _check_matrix(x)
    return _quantize(x, 1)


def quantize_columnwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(codes, absmax)` of a matrix: int8 shaped like `x`, and one float32 per column."""
    _check_matrix(x)
    return _quantize(x, 0)


def quantize_tensorwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(codes, absmax)`: int8 shaped like `x`, and one float32 scalar. Any number of dimensions."""
    check_tensor("x", x, dtypes=FLOATS)
    codes, absmax = _quantize(x.view(1, -1), 1)
    return codes.view(x.shape), absmax.view(())


def quantize_both_layouts(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(codes, codes_t, absmax)` of a matrix [out, in]: its tensor-wise codes, their transpose, and the scale.

    `codes_t` is [in, out] and contiguous. GPUs multiply int8 only where the inner dimension is contiguous, so a layer
    uses `codes.t()` in its forward and `codes_t.t()` in its backward product.
    """
    _check_matrix(w)
    return _quantize_both(w)


def dequantize(codes: Tensor, absmax: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `codes * absmax / 127`. `absmax` must broadcast: [rows, 1], [1, columns], or a scalar."""
    check_tensor("codes", codes, dtypes=(torch.int8,))
    check_tensor("absmax", absmax, dtypes=(torch.float32,))
    check_same_device(codes=codes, absmax=absmax)
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    if absmax.dim() == 1 and codes.dim() == 2:
        raise ValueError("absmax is a vector; pass absmax[:, None] for rows or absmax[None] for columns")
    return (codes.float() * (absmax / 127)).to(dtype)


def int8_matmul(
    a: Tensor,
    b: Tensor,
    a_absmax: Tensor,
    b_absmax: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Multiply codes [M, K] by codes [K, N], rescale and add the bias in one pass; returns [M, N].

    `a_absmax` is [M] or a scalar, `b_absmax` is [N] or a scalar, `bias` is [N]. Either operand may be a transposed
    view (`weight.t()`), without a copy.
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor) or x.dtype != torch.int8 or x.dim() != 2:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be an int8 matrix, got {got}; quantize_rowwise() makes one")
        if not (x.is_contiguous() or x.t().is_contiguous()):
            raise ValueError(
                f"{name} must be contiguous or a transposed view, got strides {x.stride()}; call .contiguous()"
            )
    (rows, inner), (inner_b, columns) = a.shape, b.shape
    if inner != inner_b:
        raise ValueError(
            f"inner dimensions differ: a is {tuple(a.shape)}, b is {tuple(b.shape)}; transpose one of them"
        )
    if inner > MAX_INNER:
        raise ValueError(
            f"an inner dimension of {inner} could overflow int32; split it into parts of at most {MAX_INNER}"
        )
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    for name, x, size in (("a_absmax", a_absmax, rows), ("b_absmax", b_absmax, columns)):
        why = f"one per {'row' if name[0] == 'a' else 'column'} of {name[0]}, or a scalar"
        scalar = isinstance(x, Tensor) and x.dim() == 0
        check_tensor(name, x, dtypes=(torch.float32,), shape=() if scalar else (size,), because=why)
    if bias is not None:
        check_tensor("bias", bias, dtypes=FLOATS, shape=(columns,), because="one per column of b")
        check_same_device(a=a, bias=bias)
    check_same_device(a=a, b=b, a_absmax=a_absmax, b_absmax=b_absmax)
    return _matmul(a, b, a_absmax, b_absmax, bias, dtype)


def quantize_reference(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The definition: absmax along `dim`, codes rounded half to even."""
    x = x.float()
    absmax = x.abs().amax(dim=dim, keepdim=True) if x.shape[dim] else x.new_zeros(x.sum(dim, keepdim=True).shape)
    finite = absmax.isfinite()
    unit = torch.where(finite, x, 0.0) / torch.where(finite & (absmax > 0), absmax, 1.0)
    return (unit * 127).round().to(torch.int8), torch.where(finite, absmax, torch.nan).squeeze(dim)


def both_layouts_reference(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: the codes of the whole tensor, and a transposed copy."""
    codes, absmax = quantize_reference(w.view(1, -1), 1)
    return codes.view(w.shape), codes.view(w.shape).t().clone(memory_format=torch.contiguous_format), absmax.view(())


def matmul_reference(
    a: Tensor, b: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The definition: the exact integer product, then the scales, then the bias, in float32."""
    return rescale_reference(int_matmul_reference(a, b), a_absmax, b_absmax, bias, dtype)


def int_matmul_reference(a: Tensor, b: Tensor) -> Tensor:
    """The exact int32 product, from float32 products of 1040 terms, whose sums are integers below 2^24."""
    exact = 2**24 // 127**2
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[1], exact):
        part = a[:, start : start + exact].float() @ b[start : start + exact].float()
        total += part.to(torch.int32)
    return total


def rescale_reference(
    total: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    row, column = a_absmax / 127, b_absmax / 127
    y = total.float() * row.view(-1, 1) * column.view(1, -1)
    return (y if bias is None else y + bias.float()).to(dtype)


def _check_matrix(x: Tensor) -> None:
    check_tensor("x", x, dtypes=FLOATS)
    if x.dim() != 2:
        raise ValueError(f"x must be a matrix, got shape {tuple(x.shape)}; x.flatten(0, -2) makes rows of tokens")


_quantize = torch.library.custom_op("trimtab::quantize_int8", mutates_args=())(quantize_reference)
_quantize_both = torch.library.custom_op("trimtab::quantize_both_layouts", mutates_args=())(both_layouts_reference)
_matmul = torch.library.custom_op("trimtab::int8_matmul", mutates_args=())(matmul_reference)


@_quantize.register_fake
def _(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[1 - dim], dtype=torch.float32)


@_quantize_both.register_fake
def _(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = w.shape
    scale = w.new_empty((), dtype=torch.float32)
    return torch.empty_like(w, dtype=torch.int8), w.new_empty(columns, rows, dtype=torch.int8), scale


@_matmul.register_fake
def _(a: Tensor, b: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


# --- Kernels


def quantize_native(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    assert backends.native is not None
    codes = backends.empty(x.shape, torch.int8)
    if x.numel() == 0:
        return codes, x.new_zeros(x.shape[1 - dim], dtype=torch.float32)
    absmax = x.new_empty(x.shape[1 - dim], dtype=torch.float32)
    stored = (codes.data_ptr(), absmax.data_ptr(), torch.get_num_threads())
    backends.native.quantize_int8(x.data_ptr(), backends.DTYPE_CODES[x.dtype], *x.shape, dim == 0, *stored)
    return codes, absmax


def both_layouts_native(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, absmax = quantize_native(w.view(1, -1), 1)
    return codes.view(w.shape), codes.view(w.shape).t().clone(memory_format=torch.contiguous_format), absmax.view(())


def matmul_cpu(
    a: Tensor, b: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """oneDNN's product and our rescale, or both in one kernel of ours, or the reference."""
    product, _ = backends.int8_product()
    if product == "reference" or 0 in (*a.shape, *b.shape):
        return matmul_reference(a, b, a_absmax, b_absmax, bias, dtype)
    if backends.native is None:
        return rescale_reference(_int_mm(a, b), a_absmax, b_absmax, bias, dtype)
    row, column = a_absmax / 127, b_absmax / 127
    bias = None if bias is None else bias.float()
    out = backends.empty((a.shape[0], b.shape[1]), dtype)
    scales = (row.data_ptr(), row.dim() == 0, column.data_ptr(), column.dim() == 0)
    last = (0 if bias is None else bias.data_ptr(), out.data_ptr(), backends.DTYPE_CODES[dtype])
    rest = (*scales, *last, torch.get_num_threads())
    if product == "onednn":
        total = _int_mm(a, b)
        backends.native.rescale(total.data_ptr(), *total.shape, *rest)
    else:
        plain = a.is_contiguous(), b.is_contiguous()
        sizes = (a.shape[1], a.shape[0], b.shape[1])
        backends.native.matmul(a.data_ptr(), not plain[0], b.data_ptr(), not plain[1], *sizes, *rest)
    return out


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """`torch._int_mm` with the strides that it expects.

    With VNNI it uses the stride of a dimension of size 1, which a view of a column as a row leaves at 1: the sums would
    be wrong.
    """
    return torch._int_mm(*(x.flatten().view(x.shape) if x.is_contiguous() else x for x in (a, b)))


if backends.native is not None:
    _quantize.register_kernel("cpu")(quantize_native)
    _quantize_both.register_kernel("cpu")(both_layouts_native)
_matmul.register_kernel("cpu")(matmul_cpu)

if backends.triton_missing is None:
    from trimtab.ops import int8_triton

    _quantize.register_kernel("cuda")(int8_triton.quantize)
    _quantize_both.register_kernel("cuda")(int8_triton.quantize_both_layouts)
    _matmul.register_kernel("cuda")(int8_triton.matmul)
