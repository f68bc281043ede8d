"""int8 quantization with one scale per row, per column or per tensor, and the int8 matrix product.

    codes = round(127 * x / absmax), half to even, in [-127, 127]           x ~ codes * absmax / 127

A scale can be taken out of a matrix product only if it is constant along the inner dimension: rows of the left
operand, columns of the right one, or a whole tensor.

    (a_codes @ b_codes in int32) * (a_absmax / 127)[:, None] * (b_absmax / 127) + bias

A row of zeros has absmax 0 and codes 0. A row that holds a NaN or an Inf gets absmax NaN and codes 0, so its products
are NaN, and no others.

Wortsman et al. 2023, section 2. Kernels: int8.cpp (CPU), int8_triton.py (GPU). On CPUs with AMX the product itself is
oneDNN's (`torch._int_mm`); on GPUs it is Triton's or cuBLASLt's, whichever is faster.
"""
# mypy: disable-error-code="no-any-return"
# (the ops of torch.library are untyped)

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.ops import backends
from trimtab.ops.checks import FLOATS, check_same_device, check_tensor

# 127 * 127 * inner must stay below 2^31, or an int32 sum could wrap around.
MAX_INNER = (2**31 - 1) // 127**2
MARKS = (3, 1024)  # of a weight on a GPU: absmax and two sums of hashes, for each of at most 1024 parts


def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(codes, absmax)` of a matrix: int8 shaped like `x`, and one float32 per row."""
    _check_matrix(x)
    return _quantize_plain(x, 1)


def quantize_columnwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(codes, absmax)` of a matrix: int8 shaped like `x`, and one float32 per column."""
    _check_matrix(x)
    return _quantize_plain(x, 0)


def quantize_tensorwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(codes, absmax)`: int8 shaped like `x`, and one float32 scalar. Any number of dimensions."""
    check_tensor("x", x, dtypes=FLOATS)
    codes, absmax = _quantize_plain(x.view(1, -1), 1)
    return codes.view(x.shape), absmax.view(())


def quantize_both_layouts(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(codes, codes_t, absmax)` of a matrix [out, in]: its tensor-wise codes, their transpose, and the scale.

    `codes_t` is [in, out] and contiguous. GPUs multiply int8 only where the inner dimension is contiguous, so a layer
    uses `codes.t()` in its forward and `codes_t.t()` in its backward product.
    """
    _check_matrix(w)
    return _quantize_both(w)


def empty_both_layouts(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors that `requantize_both_layouts(w, ...)` writes to: `(codes, codes_t, absmax, marks)`."""
    _check_matrix(w)
    rows, columns = w.shape
    codes, codes_t = (w.new_zeros(shape, dtype=torch.int8) for shape in ((rows, columns), (columns, rows)))
    return codes, codes_t, w.new_zeros((), dtype=torch.float32), w.new_zeros(MARKS, dtype=torch.int32)


def requantize_both_layouts(w: Tensor, codes: Tensor, codes_t: Tensor, absmax: Tensor, marks: Tensor) -> None:
    """`quantize_both_layouts` into these tensors. On a GPU, codes are written only if `w` has changed since.

    `marks` are 96 bits per part of `w`, of which 64 are hashes of its values and their places. They are compared on the
    device; the host does not wait.
    """
    _check_matrix(w)
    _requantize_both(w, codes, codes_t, absmax, marks)


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
    _check_codes("a", a)
    _check_right(a.shape, b, b_absmax, bias)
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    _check_absmax("a_absmax", a_absmax, a.shape[0], "one per row of a, or a scalar")
    check_same_device(a=a, b=b, a_absmax=a_absmax)
    return _matmul(a, b, a_absmax, b_absmax, bias, dtype)


def int8_linear(x: Tensor, b: Tensor, b_absmax: Tensor, bias: Tensor | None = None) -> Tensor:
    """Quantize the rows of x [M, K] and multiply by codes [K, N]: `int8_matmul` of `quantize_rowwise(x)`, in x's dtype.

    On a CPU with a product of our own this is one kernel, and the codes of x exist a block of rows at a time.
    """
    _check_matrix(x)
    _check_right(x.shape, b, b_absmax, bias)
    check_same_device(x=x, b=b)
    return linear_cpu(x, b, b_absmax, bias) if backends.is_plain(x) else _linear(x, b, b_absmax, bias)


def quantize_reference(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The definition: absmax along `dim`, codes rounded half to even."""
    x = x.float()
    absmax = x.abs().amax(dim=dim, keepdim=True) if x.shape[dim] else x.new_zeros(x.sum(dim, keepdim=True).shape)
    finite = absmax.isfinite()
    unit = torch.where(finite, x, 0.0) / torch.where(finite & (absmax > 0), absmax, 1.0)
    return (unit * 127).round().to(torch.int8), torch.where(finite, absmax, torch.nan).squeeze(dim)


def both_layouts_reference(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: the codes of the whole tensor, and a transposed copy."""
    codes, absmax = _quantize(w.view(1, -1), 1)
    codes = codes.view(w.shape)
    return codes, codes.t().clone(memory_format=torch.contiguous_format), absmax.view(())


def requantize_reference(w: Tensor, codes: Tensor, codes_t: Tensor, absmax: Tensor, marks: Tensor) -> None:
    """The definition: always."""
    for kept, new in zip((codes, codes_t, absmax), both_layouts_reference(w), strict=True):
        kept.copy_(new)


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


def linear_of_ops(x: Tensor, b: Tensor, b_absmax: Tensor, bias: Tensor | None) -> Tensor:
    """The definition of `int8_linear`, and what runs where it is not one kernel."""
    codes, absmax = _quantize(x, 1)
    return _matmul(codes, b, absmax, b_absmax, bias, x.dtype)


def _check_matrix(x: Tensor) -> None:
    check_tensor("x", x, dtypes=FLOATS)
    if x.dim() != 2:
        raise ValueError(f"x must be a matrix, got shape {tuple(x.shape)}; x.flatten(0, -2) makes rows of tokens")


def _check_codes(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.int8 or x.dim() != 2:
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be an int8 matrix, got {got}; quantize_rowwise() makes one")
    if not (x.is_contiguous() or x.t().is_contiguous()):
        raise ValueError(
            f"{name} must be contiguous or a transposed view, got strides {x.stride()}; call .contiguous()"
        )


def _check_absmax(name: str, x: Tensor, size: int, why: str) -> None:
    scalar = isinstance(x, Tensor) and x.dim() == 0
    check_tensor(name, x, dtypes=(torch.float32,), shape=() if scalar else (size,), because=why)


def _check_right(left: torch.Size, b: Tensor, b_absmax: Tensor, bias: Tensor | None) -> None:
    """The right operand of a product, against the shape of the left one."""
    _check_codes("b", b)
    inner, columns = b.shape
    if left[1] != inner:
        raise ValueError(
            f"inner dimensions differ: the left matrix is {tuple(left)}, b is {tuple(b.shape)}; transpose one of them"
        )
    if inner > MAX_INNER:
        raise ValueError(
            f"an inner dimension of {inner} could overflow int32; split it into parts of at most {MAX_INNER}"
        )
    _check_absmax("b_absmax", b_absmax, columns, "one per column of b, or a scalar")
    if bias is not None:
        check_tensor("bias", bias, dtypes=FLOATS, shape=(columns,), because="one per column of b")
        check_same_device(b=b, bias=bias)
    check_same_device(b=b, b_absmax=b_absmax)


_quantize = torch.library.custom_op("trimtab::quantize_int8", mutates_args=())(quantize_reference)
_quantize_both = torch.library.custom_op("trimtab::quantize_both_layouts", mutates_args=())(both_layouts_reference)
_requantize_both = torch.library.custom_op(
    "trimtab::requantize_both_layouts", mutates_args=("codes", "codes_t", "absmax", "marks")
)(requantize_reference)
_matmul = torch.library.custom_op("trimtab::int8_matmul", mutates_args=())(matmul_reference)
_linear = torch.library.custom_op("trimtab::int8_linear", mutates_args=())(linear_of_ops)


@_quantize.register_fake
def _(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[1 - dim], dtype=torch.float32)


@_quantize_both.register_fake
def _(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = w.shape
    scale = w.new_empty((), dtype=torch.float32)
    return torch.empty_like(w, dtype=torch.int8), w.new_empty(columns, rows, dtype=torch.int8), scale


@_requantize_both.register_fake
def _(w: Tensor, codes: Tensor, codes_t: Tensor, absmax: Tensor, marks: Tensor) -> None:
    return None


@_matmul.register_fake
def _(a: Tensor, b: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


@_linear.register_fake
def _(x: Tensor, b: Tensor, b_absmax: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], b.shape[1])


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


def _quantize_plain(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The op. Plain tensors on a CPU go past PyTorch's dispatcher, which takes longer than a kernel on few values."""
    return quantize_native(x, dim) if backends.is_plain(x) else _quantize(x, dim)


def matmul_cpu(
    a: Tensor, b: Tensor, a_absmax: Tensor, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A kernel of ours, or oneDNN's product and our rescale, or the reference."""
    product, _ = backends.int8_product()
    if product == "reference" or 0 in (*a.shape, *b.shape):
        return matmul_reference(a, b, a_absmax, b_absmax, bias, dtype)
    if product == "native":
        return _matmul_native(a, b, a_absmax, b_absmax, bias, dtype)
    total = _int_mm(a, b)
    if backends.native is None:
        return rescale_reference(total, a_absmax, b_absmax, bias, dtype)
    bias = None if bias is None else bias.float()
    out, rest = _rescale_arguments(total.shape, a_absmax, b_absmax, bias, dtype)
    backends.native.rescale(total.data_ptr(), *total.shape, *rest)
    return out


def linear_cpu(x: Tensor, b: Tensor, b_absmax: Tensor, bias: Tensor | None) -> Tensor:
    """One kernel where the product is ours."""
    if backends.int8_product()[0] == "native" and 0 not in (*x.shape, *b.shape):
        return _matmul_native(x, b, None, b_absmax, bias, x.dtype)
    return linear_of_ops(x, b, b_absmax, bias)


def _matmul_native(
    a: Tensor, b: Tensor, a_absmax: Tensor | None, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`a` is codes, or values where there is no `a_absmax`."""
    assert backends.native is not None
    bias = None if bias is None else bias.float()
    out, rest = _rescale_arguments((a.shape[0], b.shape[1]), a_absmax, b_absmax, bias, dtype)
    left = (a.data_ptr(), backends.DTYPE_CODES.get(a.dtype, 0), not a.is_contiguous())
    backends.native.matmul(*left, b.data_ptr(), not b.is_contiguous(), a.shape[1], *out.shape, *rest)
    return out


def _rescale_arguments(
    shape: Sequence[int], a_absmax: Tensor | None, b_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor for the result, and the last arguments of the kernels."""
    out = backends.empty(shape, dtype)
    row = (0, False) if a_absmax is None else (a_absmax.data_ptr(), a_absmax.dim() == 0)
    column = (b_absmax.data_ptr(), b_absmax.dim() == 0)
    last = (0 if bias is None else bias.data_ptr(), out.data_ptr(), backends.DTYPE_CODES[dtype])
    return out, (*row, *column, *last, torch.get_num_threads())


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """`torch._int_mm` with the strides that it expects.

    With VNNI it uses the stride of a dimension of size 1, which a view of a column as a row leaves at 1: the sums would
    be wrong.
    """
    return torch._int_mm(*(x.flatten().view(x.shape) if x.is_contiguous() else x for x in (a, b)))


if backends.native is not None:
    _quantize.register_kernel("cpu")(quantize_native)
_matmul.register_kernel("cpu")(matmul_cpu)
_linear.register_kernel("cpu")(linear_cpu)

if backends.triton_missing is None:
    from trimtab.ops import int8_triton

    _quantize.register_kernel(backends.triton_device)(int8_triton.quantize)
    _quantize_both.register_kernel(backends.triton_device)(int8_triton.quantize_both_layouts)
    _requantize_both.register_kernel(backends.triton_device)(int8_triton.requantize_both_layouts)
    _matmul.register_kernel(backends.triton_device)(int8_triton.matmul)
