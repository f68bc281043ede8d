"""Linear layers with matrix products in int8 or float8. Replace nn.Linear and have the same state dict.

    forward     X, W --quantize--> int8 product --rescale, bias--> Y                    W: only if it has changed
    backward    G --quantize--> int8 product with the same codes --rescale--> dX;       dW = G^T X, not quantized

Gradients are those of the plain product at the rounded operands (straight-through). See kinds.py for the rounding of
each operand.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from trimtab.nn.kinds import LinearKind, SwitchBack, Tensors, make_kind, why_too_large
from trimtab.nn.rounding import Rounding
from trimtab.nn.tuning import NEVER, int8_from
from trimtab.ops import backends
from trimtab.ops.checks import FLOATS
from trimtab.ops.fingerprint import fingerprint
from trimtab.ops.float32.product import linear

When = Literal["always", "faster"] | int
_REMEDY = "use nn.Linear: revert_linears(model) puts the plain layers back"
CUT_STD = 0.87962566103423978  # standard deviation of a unit normal truncated at ±2
_SAMPLES = 4096  # values of a frozen weight that are compared in every call


class QuantizedProduct(torch.autograd.Function):
    """The three products of a layer. `weight_codes` is the quantized `w`, without gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        kind: SwitchBack,
        rounding: Rounding | None,
        *weight_codes: Tensor,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, kept = kind.forward(rows, w, weight_codes, bias)
        ctx.kind, ctx.rounding, ctx.count, ctx.sizes = kind, rounding, len(weight_codes), w.shape
        ctx.w_dtype, ctx.bias_dtype = w.dtype, None if bias is None else bias.dtype
        needs_x, needs_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(*(weight_codes if needs_x else ()), *(kept if needs_w else ()))
        # Codes that are written in place belong to another weight after a change, as those of nn.Linear would.
        in_place = _quantizes_in_place(w) and not torch.compiler.is_compiling()
        ctx.weight = (w.detach(), w._version) if needs_x and in_place else None
        # Not a view, like the result of nn.Linear: FSDP's hooks would be lost in an in-place operation.
        out: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # `once_differentiable` only cuts the graph: a second derivative through other paths would miss a term silently.
        # Gradients are enabled here only by create_graph=True; a compiled backward pass refuses that itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{_describe(*ctx.sizes)} has no second derivative, which create_graph=True needs; leave "
                f"create_graph out, or {_REMEDY}"
            )
        return QuantizedProduct._backward(ctx, g)

    @staticmethod
    @once_differentiable
    def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
        saved, shape = ctx.saved_tensors, g.shape
        if ctx.weight is not None and ctx.weight[0]._version != ctx.weight[1]:
            raise RuntimeError(
                f"the weight of {_describe(*ctx.sizes)} was changed in place between forward and backward: call "
                "backward() before the optimizer's step"
            )
        g = g.reshape(-1, shape[-1]).contiguous()
        codes, kept = (saved[: ctx.count], saved[ctx.count :]) if needs_x else ((), saved)
        if ctx.rounding is not None:
            ctx.rounding.add("grad", g, ctx.kind.round_grad(g), "grad" in ctx.kind.by_row)
        # The products choose their own precision.
        with torch.autocast(g.device.type, enabled=False):
            dx = ctx.kind.grad_input(g, codes) if needs_x else None
            dx = dx if dx is None else dx.view(*shape[:-1], dx.shape[-1])
            dw = ctx.kind.grad_weight(g, kept).to(ctx.w_dtype) if needs_w else None
            db = g.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, None, *[None] * ctx.count


def _quantizes_in_place(w: Tensor) -> bool:
    """Whether the device decides if the weight is quantized again: on the CPU, the host does."""
    return w.device.type != "cpu" or backends.interpreted


def _describe(out_features: int, in_features: int) -> str:
    return f"a quantized linear layer (in_features={in_features}, out_features={out_features})"


class _Quantized(nn.Module):
    """Base of SwitchBackLinear and SwitchBackConv1D. `matrix` is the weight as [out, in]."""

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None

    def _set_kind(self, n_in: int, n_out: int, kind: LinearKind, threshold: float, when: When) -> None:
        why = why_too_large(kind, n_in, n_out)
        if why is not None:
            raise ValueError(f"{why}; use nn.Linear for this layer, or split it")
        is_number = isinstance(when, int) and not isinstance(when, bool) and when >= 0
        if when not in ("always", "faster") and not is_number:
            raise ValueError(f"when must be 'always', 'faster' or a number of tokens, got {when!r}")
        self.kind, self.threshold, self.when = kind, threshold, when
        self.products = make_kind(kind, threshold)
        self.rounding: Rounding | None = None  # set while rounding errors are measured (rounding.py)
        self._made: tuple[Any, Tensors] | None = None  # what the codes of the weight belong to, and the codes
        self._frozen: tuple[Any, Tensors] | None = None

    def matrix(self) -> Tensor:
        raise NotImplementedError

    @property
    def int8_from(self) -> int:
        """The smallest number of tokens that is quantized; fewer run as in nn.Linear.

        With `when="faster"` it is measured at the first use (tuning.py), and does not change afterwards.
        """
        return self._int8_from(self.weight.dtype)

    def _int8_from(self, dtype: torch.dtype) -> int:
        """`dtype` is that of the products in float, which autocast may change."""
        if self.when == "always" or self.kind.startswith("fp8"):
            return 0
        if self.when == "faster":
            device = self.weight.device
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return 0  # no time can be measured in a CUDA graph
            self.when = int8_from(self.in_features, self.out_features, device, dtype)
        assert isinstance(self.when, int)
        return self.when

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        w, bias = self.matrix(), self.bias
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        elif x.dtype != w.dtype:
            raise ValueError(f"the input is {x.dtype}, the weight {w.dtype}; cast one, or use torch.autocast")
        if self._int8_from(x.dtype) > x.numel() // self.in_features:
            return linear(x, w, bias)
        _check_not_transformed(w)
        if self.rounding is not None:
            by_row, rows = self.products.by_row, x.detach().reshape(-1, self.in_features).contiguous()
            self.rounding.add("input", rows, self.products.round_input(rows), "input" in by_row)
            self.rounding.add("weight", w, self.products.round_weight(w.detach().contiguous()), "weight" in by_row)
        with torch.autocast(x.device.type, enabled=False):
            y: Tensor = QuantizedProduct.apply(  # type: ignore[no-untyped-call]
                x, w, bias, self.products, self.rounding, *self._weight_codes()
            )
        return y

    def _check(self, x: Tensor) -> None:
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"the last dimension must be in_features={self.in_features}, got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            raise ValueError(f"the input must be float32, bfloat16 or float16, got {x.dtype}")
        if not torch.compiler.is_compiling() and hasattr(self.weight, "device_mesh"):
            raise ValueError(
                "the weight is a DTensor: tensor parallelism is not supported (FSDP2 is, it gathers the weight). Leave "
                "this layer out: convert_linears(model, kind, skip=...)"
            )

    # --- The weight's codes

    def _weight_codes(self) -> Tensors:
        """Quantize the weight again whenever its bytes have changed, in whatever way."""
        if torch.compiler.is_compiling():
            return self.products.quantize_weight(self.matrix().detach())
        trains = self.training or (torch.is_grad_enabled() and self.weight.requires_grad)
        with torch.inference_mode(False):  # codes that are made there must serve training too
            return self._current_codes(self.matrix().detach(), trains)

    def _current_codes(self, w: Tensor, trains: bool) -> Tensors:
        if trains and w.device.type != "cpu":
            self._frozen = None  # FSDP2 gathers a trained weight at the same address, with the same version
        if self._frozen is not None and not trains:
            mark, codes = self._frozen
            if mark == self._quick_mark():
                return codes
            self._frozen = None
        if _quantizes_in_place(w):
            return self._device_codes(w) if trains else self.products.quantize_weight(w)
        now = (fingerprint(self.weight), w.dtype, w.shape, self.kind)
        if self._made is None or self._made[0] != now:
            self._made = now, self.products.quantize_weight(w)
        return self._made[1]

    def _device_codes(self, w: Tensor) -> Tensors:
        """The device finds out whether the weight has changed: the host would have to wait for it.

        The kept codes are written in order on one stream, and only by calls that train: between forward and backward,
        an evaluation may use other weights. A CUDA graph must not depend on what was kept when it was captured.
        """
        if w.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.products.quantize_weight(w)
        stream = torch.cuda.current_stream(w.device) if w.is_cuda else None
        place = (w.device, stream, w.dtype, w.shape, w.stride(), self.kind)
        kept = self._made[1] if self._made is not None and self._made[0] == place else ()
        codes, kept = self.products.requantize_weight(w, kept)
        self._made = place, kept
        return codes

    def forget(self) -> None:
        """Free the weight's codes; the next call quantizes the weight again."""
        self._made = None

    def freeze(self) -> None:
        """Quantize the weight now, and use these codes in evaluation without reading the whole weight again.

        If the weight is loaded, moved or trained afterwards, the layer unfreezes itself. A write through `.data` to a
        few values may be missed: only some thousand values are compared, and none on a GPU.
        """
        with torch.inference_mode(False):
            self._frozen = self._quick_mark(), self.products.quantize_weight(self.matrix().detach())

    def thaw(self) -> None:
        self._frozen = None

    def _quick_mark(self) -> tuple[Any, ...]:
        w = self.weight.detach().view(-1)
        version = None if self.weight.is_inference() else self.weight._version
        mark = w.data_ptr(), version, w.dtype, w.shape
        return (*mark, fingerprint(w[:: max(1, len(w) // _SAMPLES)])) if w.device.type == "cpu" else mark

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None, "_frozen": None, "rounding": None}

    def extra_repr(self) -> str:
        shown = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, kind={self.kind!r}"
        if self.threshold:
            shown += f", threshold={self.threshold}"
        if self.int8_from == NEVER:
            return f"{shown}, in float here: too small for int8 to be faster; when='always' quantizes"
        return shown + (f", in float below {self.int8_from} tokens" if self.int8_from else "")


def _check_not_transformed(w: Tensor) -> None:
    # Also under torch.compile, where torch.func.grad would otherwise be wrong.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise RuntimeError(
            f"{_describe(*w.shape)} works with backward() only, not with torch.func (grad, vmap, jvp, hessian ...) or "
            f"forward-mode derivatives; {_REMEDY}"
        )


class Linear(nn.Linear):
    """nn.Linear with the fastest float32 products of this CPU (ops/float32/product.py)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class SwitchBackLinear(_Quantized, nn.Linear):  # type: ignore[misc]
    """nn.Linear with quantized products.

    Args:
        kind: one of kinds.py; "switchback" is int8 without quantizing the weight gradient.
        threshold: for "llm-int8": input columns with a larger value are multiplied in float; 0 disables it.
        when: "always" quantizes every call; "faster" runs calls with too few tokens to benefit in float, as measured
            on this machine (tuning.py); a number of tokens repeats a choice.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kind: LinearKind = "switchback",
        threshold: float = 0.0,
        when: When = "always",
    ) -> None:
        self._set_kind(in_features, out_features, kind, threshold, when)
        self.original: Callable[..., nn.Linear] = Linear  # the class that revert_linears puts back
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)

    def matrix(self) -> Tensor:
        return self.weight


class SwitchBackConv1D(_Quantized):
    """The same for Hugging Face's Conv1D, the linear layer of GPT-2, whose weight is [in, out]."""

    def __init__(
        self, nf: int, nx: int, *, kind: LinearKind = "switchback", threshold: float = 0.0, when: When = "always"
    ) -> None:
        self._set_kind(nx, nf, kind, threshold, when)
        super().__init__()
        self.nf, self.nx = self.out_features, self.in_features = nf, nx
        self.original: Callable[[int, int], nn.Module] | None = None  # the class it was converted from
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(nf))

    def matrix(self) -> Tensor:
        return self.weight.t()


def forget_codes(module: nn.Module) -> None:
    """Free the codes of all quantized layers in `module`, except those that autograd keeps: a byte per weight."""
    for layer in module.modules():
        if isinstance(layer, _Quantized):
            layer.forget()


def init_linear(layer: nn.Linear, std: float | None = None) -> None:
    """Truncated normal with standard deviation `std`, by default 1 / sqrt(fan in) (Wortsman et al. 2023b, section 2).

    Truncation at two deviations reduces the deviation; `CUT_STD` corrects that, as in Flax's lecun_normal. Biases: 0.
    """
    wide = (std if std is not None else 1 / math.sqrt(layer.in_features)) / CUT_STD
    nn.init.trunc_normal_(layer.weight, std=wide, a=-2 * wide, b=2 * wide)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def build_linear(n_in: int, n_out: int, *, bias: bool = True, kind: LinearKind = "float") -> nn.Linear:
    """Create a plain or a quantized linear layer."""
    return Linear(n_in, n_out, bias) if kind == "float" else SwitchBackLinear(n_in, n_out, bias, kind=kind)
