"""Linear layers whose matrix products run in int8 or simulated float8: drop-in for nn.Linear, with its state dict.

    forward     X, W --quantize--> int8 product --rescale, bias--> Y            W's codes are made once per step
    backward    G --quantize--> int8 product with the same codes --rescale--> dX;       dW = G^T X, not quantized

Gradients are those of the plain product, taken at the rounded operands: the rounding itself passes them straight
through. Which operand is rounded how: kinds.py.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from trimtab.nn.kinds import LinearKind, SwitchBack, Tensors, make_kind, why_too_large
from trimtab.nn.rounding import Rounding
from trimtab.ops.checks import FLOATS
from trimtab.ops.fingerprint import fingerprint
from trimtab.ops.int8 import NEVER, gains_from

When = Literal["always", "faster"]
_REMEDY = "use nn.Linear: revert_linears(model) puts the plain layers back"
_SAMPLES = 4096  # values of a frozen weight that are looked at in every call


class QuantizedProduct(torch.autograd.Function):
    """One layer's three products. `weight_codes` are constants made from `w`."""

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
        wants_x, wants_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(*(weight_codes if wants_x else ()), *(kept if wants_w else ()))
        # Not a view, as nn.Linear's result is none: FSDP's hooks would get lost in an operation in place.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # `once_differentiable` alone cuts the graph: second derivatives that go around it would lose a term silently.
        # Gradients are enabled here by create_graph=True only; a compiled backward pass refuses it by itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{_describe(*ctx.sizes)} has no second derivative, which create_graph=True asks for; leave "
                f"create_graph out, or {_REMEDY}"
            )
        return QuantizedProduct._backward(ctx, g)

    @staticmethod
    @once_differentiable
    def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, wants_w, wants_bias, *_ = ctx.needs_input_grad
        saved, shape = ctx.saved_tensors, g.shape
        g = g.reshape(-1, shape[-1]).contiguous()
        codes, kept = (saved[: ctx.count], saved[ctx.count :]) if wants_x else ((), saved)
        if ctx.rounding is not None:
            ctx.rounding.add("grad", g, ctx.kind.round_grad(g), "grad" in ctx.kind.by_row)
        # The products say themselves in which precision they run.
        with torch.autocast(g.device.type, enabled=False):
            dx = ctx.kind.grad_input(g, codes) if wants_x else None
            dx = dx if dx is None else dx.view(*shape[:-1], dx.shape[-1])
            dw = ctx.kind.grad_weight(g, kept).to(ctx.w_dtype) if wants_w else None
            db = g.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if wants_bias else None
        return dx, dw, db, None, None, *[None] * ctx.count


def _describe(out_features: int, in_features: int) -> str:
    return f"a quantized linear layer (in_features={in_features}, out_features={out_features})"


class _Quantized(nn.Module):
    """What SwitchBackLinear and SwitchBackConv1D share. `matrix` is the weight as [out, in]."""

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None

    def _set_kind(self, kind: LinearKind, threshold: float, when: When) -> None:
        if when not in ("always", "faster"):
            raise ValueError(f"when must be 'always' or 'faster', got {when!r}")
        self.kind, self.threshold, self.when = kind, threshold, when
        self.products = make_kind(kind, threshold)
        self.rounding: Rounding | None = None  # statistics, while somebody measures (rounding.py)
        self._made: tuple[Any, Tensors] | None = None  # the weight's codes and what they were made from
        self._frozen: tuple[Any, Tensors] | None = None

    def matrix(self) -> Tensor:
        """Each of the two says how its weight is one."""
        raise NotImplementedError

    @property
    def int8_from(self) -> int:
        """From how many tokens on the products are quantized; below, they run as in nn.Linear."""
        if self.when == "always" or self.kind.startswith("fp8") or self.weight.device.type != "cpu":
            return 0
        return gains_from(self.in_features, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        w, bias = self.matrix(), self.bias
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        elif x.dtype != w.dtype:
            raise ValueError(f"the input is {x.dtype}, the weight {w.dtype}; cast one, or use torch.autocast")
        if self.int8_from > x.numel() // self.in_features:
            return nn.functional.linear(x, w, bias)
        _check_not_transformed(w)
        if self.rounding is not None:
            by_row, rows = self.products.by_row, x.detach().reshape(-1, self.in_features).contiguous()
            self.rounding.add("input", rows, self.products.round_input(rows), "input" in by_row)
            self.rounding.add("weight", w, self.products.round_weight(w.detach().contiguous()), "weight" in by_row)
        with torch.autocast(x.device.type, enabled=False):
            return QuantizedProduct.apply(x, w, bias, self.products, self.rounding, *self._weight_codes())

    def _check(self, x: Tensor) -> None:
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"the last dimension must be in_features={self.in_features}, got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            raise ValueError(f"the input must be float32, bfloat16 or float16, got {x.dtype}")
        if not torch.compiler.is_compiling() and hasattr(self.weight, "device_mesh"):
            raise ValueError(
                "the weight is a DTensor; under FSDP2 it is whole while the layer runs, but tensor parallelism would "
                "need scales across processes. Leave this layer out: convert_linears(model, kind, skip=...)"
            )

    # --- The weight's codes

    def _weight_codes(self) -> Tensors:
        """Made anew whenever the weight's bytes have changed, whoever changed them; never kept on trust."""
        w = self.matrix().detach()
        if torch.compiler.is_compiling() or w.device.type != "cpu":
            return self.products.quantize_weight(w)
        if (
            self._frozen is not None
            and not self.training
            and not (torch.is_grad_enabled() and self.weight.requires_grad)
        ):
            seen, codes = self._frozen
            if seen == self._glance():
                return codes
            self._frozen = None
        now = (fingerprint(self.weight), w.dtype, w.shape, self.kind)
        if self._made is None or self._made[0] != now:
            self._made = now, self.products.quantize_weight(w)
        return self._made[1]

    def freeze(self) -> None:
        """Quantize the weight now and use these codes in evaluation without reading the weight again.

        A weight that is loaded, moved or trained afterwards is noticed and the layer thaws. What cannot be noticed is a
        write through `.data` to a few single values: only some thousand of them are compared.
        """
        w = self.matrix().detach()
        self._frozen = self._glance(), self.products.quantize_weight(w)

    def thaw(self) -> None:
        self._frozen = None

    def _glance(self) -> tuple[Any, ...]:
        w = self.weight.detach().view(-1)
        version = None if self.weight.is_inference() else self.weight._version
        return w.data_ptr(), version, w.dtype, w.shape, fingerprint(w[:: max(1, len(w) // _SAMPLES)].cpu())

    # --- Copies

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None, "_frozen": None, "rounding": None}

    def extra_repr(self) -> str:
        shown = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, kind={self.kind!r}"
        if self.threshold:
            shown += f", threshold={self.threshold}"
        if self.int8_from == NEVER:
            return f"{shown}, in float here: too small to gain; when='always' quantizes"
        return shown + (f", in float below {self.int8_from} tokens" if self.int8_from else "")


def _check_sizes(kind: str, in_features: int, out_features: int) -> None:
    why = why_too_large(kind, in_features, out_features)
    if why is not None:
        raise ValueError(f"{why}; use nn.Linear for this layer, or split it")


def _check_not_transformed(w: Tensor) -> None:
    # The compiler knows the answer too: without this a compiled torch.func.grad would be wrong.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise RuntimeError(
            f"{_describe(*w.shape)} works with backward() only, not with torch.func (grad, vmap, jvp, hessian ...) or "
            f"forward-mode derivatives; {_REMEDY}"
        )


class SwitchBackLinear(_Quantized, nn.Linear):  # type: ignore[misc]
    """nn.Linear with quantized products.

    Args:
        kind: one of kinds.py; "switchback" is int8 with the weight gradient as it is.
        threshold: of "llm-int8": columns with a value above it are left out of int8. 0: none are.
        when: "always" quantizes every call; "faster" leaves calls with too few tokens to gain in float.
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
        _check_sizes(kind, in_features, out_features)
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self._set_kind(kind, threshold, when)

    def matrix(self) -> Tensor:
        return self.weight


class SwitchBackConv1D(_Quantized):
    """The same for Hugging Face's Conv1D, GPT-2's linear layer, whose weight is [in, out]."""

    def __init__(
        self, nf: int, nx: int, *, kind: LinearKind = "switchback", threshold: float = 0.0, when: When = "always"
    ) -> None:
        _check_sizes(kind, nx, nf)
        super().__init__()
        self.nf, self.nx = self.out_features, self.in_features = nf, nx
        self.original: Callable[[int, int], nn.Module] | None = None  # the class it was converted from
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(nf))
        self._set_kind(kind, threshold, when)

    def matrix(self) -> Tensor:
        return self.weight.t()


def build_linear(n_in: int, n_out: int, *, bias: bool = True, kind: LinearKind = "float") -> nn.Linear:
    """nn.Linear or a quantized one; the models' way to a layer."""
    return nn.Linear(n_in, n_out, bias) if kind == "float" else SwitchBackLinear(n_in, n_out, bias, kind=kind)
