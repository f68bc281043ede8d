"""The three matrix products of a quantized linear layer, one class per kind.

    Y = X W^T + bias            X [tokens, in], W [out, in]
    dX = G W                    G = dL/dY [tokens, out]
    dW = G^T X                  summed over all tokens: the longest inner dimension

| kind           | X                | W                | G               | dW                       |
|----------------|------------------|------------------|-----------------|--------------------------|
| switchback     | int8 by row      | int8 by tensor   | int8 by row     | not quantized            |
| switchback-m   | "                | "                | "               | of the stored int8 X     |
| switchback-q   | "                | int8 by vector   | "               | not quantized            |
| llm-int8       | "                | "                | "               | int8 by column           |
| fp8-tensorwise | e4m3 by tensor   | e4m3 by tensor   | e5m2 by tensor  | of the rounded X and G   |
| fp8-switchback | e4m3 by row      | e4m3 by tensor   | e5m2 by row     | not quantized            |

A scale can be factored out of a product only if it is constant along the inner dimension. The inner dimension of dW is
the tokens, so its scales are maxima over all tokens, and one large token spoils the precision of all others.
SwitchBack therefore does not quantize dW. A row with a NaN or Inf gives NaN. Wortsman et al. 2023, sections 2 and 3.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from trimtab.ops import backends
from trimtab.ops.float8 import (
    MULTIPLE,
    cast_float8,
    float8_matmul,
    has_product,
    round_float8_rowwise,
    round_float8_tensorwise,
)
from trimtab.ops.float32.product import product_tn
from trimtab.ops.int8 import (
    MAX_INNER,
    dequantize,
    empty_both_layouts,
    int8_linear,
    int8_matmul,
    quantize_both_layouts,
    quantize_columnwise,
    quantize_rowwise,
    quantize_tensorwise,
    requantize_both_layouts,
)

LinearKind = Literal[
    "float", "switchback", "switchback-m", "switchback-q", "llm-int8", "fp8-tensorwise", "fp8-switchback"
]
Tensors = tuple[Tensor, ...]


class SwitchBack:
    """Also the base class: the other kinds override what differs."""

    by_row: tuple[str, ...] = ("input", "grad")  # operands with one scale per row; the others have one per tensor

    def quantize_weight(self, w: Tensor) -> Tensors:
        """Codes [out, in] for the forward product, their scale, and on a GPU codes [out, in] for the backward product.

        On a GPU the inner dimension of either product is contiguous. On a CPU both products use the first codes; they
        are returned once, because torch.compile refuses an autograd function that gets a tensor twice.
        """
        plain = w.is_contiguous()
        if w.device.type == "cpu" and not backends.interpreted:
            codes, absmax = quantize_tensorwise(w if plain else w.t())
            codes = codes if plain else codes.t()
            return codes, absmax
        return _in_order(quantize_both_layouts(w if plain else w.t()), plain)

    def requantize_weight(self, w: Tensor, kept: Tensors) -> tuple[Tensors, Tensors]:
        """`quantize_weight(w)`, and what to keep for the next call: tensors that are written only if `w` has changed.

        Only Triton's kernels can tell. Elsewhere, and in kinds with other codes, nothing is kept.
        """
        if backends.triton_missing is not None:
            return self.quantize_weight(w), ()
        plain = w.is_contiguous()
        matrix = w if plain else w.t()
        kept = kept or empty_both_layouts(matrix)
        # The codes of a weight that has not changed are the same tensors, also those that autograd keeps.
        with torch.autograd._unsafe_preserve_version_counter(kept):
            requantize_both_layouts(matrix, *kept)
        return _in_order(kept[:3], plain), kept

    def forward(self, x: Tensor, w: Tensor, weight: Tensors, bias: Tensor | None) -> tuple[Tensor, Tensors]:
        """Y, and what `grad_weight` needs of X. `weight` is `quantize_weight(w)`."""
        return int8_linear(x, weight[0].t(), weight[1], bias), (x,)

    def grad_input(self, g: Tensor, weight: Tensors) -> Tensor:
        return int8_linear(g, weight[2] if len(weight) > 2 else weight[0], weight[1])

    def grad_weight(self, g: Tensor, kept: Tensors) -> Tensor:
        return product_tn(g, kept[0])

    # Rounded operands, for statistics and tests.

    def round_input(self, x: Tensor) -> Tensor:
        codes, absmax = quantize_rowwise(x)
        return dequantize(codes, absmax[:, None], dtype=x.dtype)

    def round_weight(self, w: Tensor) -> Tensor:
        return dequantize(*quantize_tensorwise(w), dtype=w.dtype)

    def round_grad(self, g: Tensor) -> Tensor:
        return self.round_input(g)


def _in_order(both: Tensors, plain: bool) -> Tensors:
    """The codes of a weight in both layouts as `quantize_weight` returns them; not `plain`: those of its transpose."""
    codes, transposed, absmax = both
    return (codes, absmax, transposed.t()) if plain else (transposed, absmax, codes.t())


class SwitchBackM(SwitchBack):
    """Stores the int8 codes of the input for the backward pass: a quarter of the bytes of float32."""

    def forward(self, x: Tensor, w: Tensor, weight: Tensors, bias: Tensor | None) -> tuple[Tensor, Tensors]:
        codes, absmax = quantize_rowwise(x)
        return int8_matmul(codes, weight[0].t(), absmax, weight[1], bias, dtype=x.dtype), (codes, absmax)

    def grad_weight(self, g: Tensor, kept: Tensors) -> Tensor:
        codes, absmax = kept
        return product_tn(g, dequantize(codes, absmax[:, None], dtype=g.dtype))


class SwitchBackQ(SwitchBack):
    """One scale per output feature forward, one per input feature backward."""

    by_row = ("input", "weight", "grad")

    def quantize_weight(self, w: Tensor) -> Tensors:
        """The same, and the scales of the backward product."""
        if w.is_contiguous():
            (rows, row_max), (columns, column_max) = quantize_rowwise(w), quantize_columnwise(w)
        else:
            (rows, row_max), (columns, column_max) = quantize_columnwise(w.t()), quantize_rowwise(w.t())
            rows, columns = rows.t(), columns.t()
        if w.device.type != "cpu":
            rows, columns = rows.contiguous(), columns.t().contiguous().t()
        return rows, row_max, columns, column_max

    def requantize_weight(self, w: Tensor, kept: Tensors) -> tuple[Tensors, Tensors]:
        return self.quantize_weight(w), ()

    def grad_input(self, g: Tensor, weight: Tensors) -> Tensor:
        return int8_linear(g, weight[2], weight[3])

    def round_weight(self, w: Tensor) -> Tensor:
        return self.round_input(w)


class LLMInt8(SwitchBackQ):
    """All three products in int8. With a threshold, columns of X with a larger value are multiplied in float."""

    def __init__(self, threshold: float = 0.0) -> None:
        if not threshold >= 0:
            raise ValueError(f"threshold must be at least 0 (0: no outlier columns), got {threshold}")
        self.threshold = threshold

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """X with its outlier columns set to zero, and X with all other columns set to zero."""
        outlier = (x.abs() > self.threshold).any(dim=0)
        return torch.where(outlier, 0, x), torch.where(outlier, x, 0)

    def forward(self, x: Tensor, w: Tensor, weight: Tensors, bias: Tensor | None) -> tuple[Tensor, Tensors]:
        if self.threshold == 0:
            return super().forward(x, w, weight, bias)
        inside, outliers = self.split(x)
        y, _ = super().forward(inside, w, weight, bias)
        return y + outliers @ w.t().to(x.dtype), (x,)

    def grad_weight(self, g: Tensor, kept: Tensors) -> Tensor:
        inside, outliers = self.split(kept[0]) if self.threshold > 0 else (kept[0], None)
        (g_codes, g_max), (x_codes, x_max) = quantize_columnwise(g), quantize_columnwise(inside)
        total = int8_matmul(g_codes[:MAX_INNER].t(), x_codes[:MAX_INNER], g_max, x_max)
        for start in range(MAX_INNER, len(g), MAX_INNER):  # a longer sum could overflow int32
            part = slice(start, start + MAX_INNER)
            total += int8_matmul(g_codes[part].t(), x_codes[part], g_max, x_max)
        total = total.to(g.dtype)
        return total if outliers is None else total + g.t() @ outliers


class Float8SwitchBack(SwitchBack):
    """float8 products where the GPU has them; else operands are rounded to float8 and multiplied in their own dtype."""

    def quantize_weight(self, w: Tensor) -> Tensors:
        """Codes in both layouts and their scale, or the rounded weight."""
        if not has_product(w.device) or any(size % MULTIPLE for size in w.shape):
            return (self.round_weight(w),)
        codes, scale = cast_float8(w.contiguous(), "e4m3", by_row=False)
        return codes, codes.t().contiguous(), scale

    def requantize_weight(self, w: Tensor, kept: Tensors) -> tuple[Tensors, Tensors]:
        return self.quantize_weight(w), ()

    def forward(self, x: Tensor, w: Tensor, weight: Tensors, bias: Tensor | None) -> tuple[Tensor, Tensors]:
        if len(weight) == 1:
            y = self.round_input(x) @ weight[0].t().to(x.dtype)
        else:
            codes, scale = cast_float8(x, "e4m3", by_row="input" in self.by_row)
            y = float8_matmul(codes, weight[0], scale, weight[2], x.dtype)
        return y if bias is None else y + bias.to(x.dtype), (x,)

    def grad_input(self, g: Tensor, weight: Tensors) -> Tensor:
        if len(weight) == 1:
            return self.round_grad(g) @ weight[0].to(g.dtype)
        codes, scale = cast_float8(g, "e5m2", by_row="grad" in self.by_row)
        return float8_matmul(codes, weight[1], scale, weight[2], g.dtype)

    def round_input(self, x: Tensor) -> Tensor:
        return round_float8_rowwise(x, "e4m3")

    def round_weight(self, w: Tensor) -> Tensor:
        return round_float8_tensorwise(w.contiguous(), "e4m3")

    def round_grad(self, g: Tensor) -> Tensor:
        return round_float8_rowwise(g, "e5m2")


class Float8Tensorwise(Float8SwitchBack):
    """One scale per tensor for all operands: the baseline, which diverges in large models."""

    by_row = ()

    def grad_weight(self, g: Tensor, kept: Tensors) -> Tensor:
        return self.round_grad(g).t() @ self.round_input(kept[0])

    def round_input(self, x: Tensor) -> Tensor:
        return round_float8_tensorwise(x, "e4m3")

    def round_grad(self, g: Tensor) -> Tensor:
        return round_float8_tensorwise(g, "e5m2")


def why_too_large(kind: str, in_features: int, out_features: int) -> str | None:
    """Why the int8 products cannot sum over so many features, or None. float8 kinds sum in floating point."""
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        # The forward product sums over in_features, the gradient of the input over out_features.
        if size > MAX_INNER and not kind.startswith("fp8"):
            return f"{name}={size} is above {MAX_INNER}, where an int8 product could overflow int32"
    return None


def make_kind(kind: str, threshold: float = 0.0) -> SwitchBack:
    if threshold and kind != "llm-int8":
        raise ValueError(f"threshold belongs to llm-int8; leave it out for {kind}")
    if kind == "llm-int8":
        return LLMInt8(threshold)
    classes = {
        "switchback": SwitchBack,
        "switchback-m": SwitchBackM,
        "switchback-q": SwitchBackQ,
        "fp8-tensorwise": Float8Tensorwise,
        "fp8-switchback": Float8SwitchBack,
    }
    if kind not in classes:
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(get_args(LinearKind)[1:])}")
    return classes[kind]()
