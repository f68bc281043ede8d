"""Adafactor: the second moment of a matrix as one row and one column (Shazeer & Stern 2018). Two forms.

    R <- β2 R + (1 - β2) mean over columns of G²      C <- β2 C + (1 - β2) mean over rows of G²
    V = R C / mean(R)                                 vectors keep a full V
    U = G / √V,   U <- U / max(1, rms(U) / d)

Adafactor, as in PyTorch: no momentum, β2 rises with the step, the step follows the size of the weights.

    β2 = 1 - t^beta2_decay,   V = R C / max(mean(R), eps1),   U = G / max(√V, eps1)
    p <- p (1 - lr wd) - max(eps2, rms(p)) min(lr, 1/√t) U

AdafactorMomentum, the baseline of the 8-bit paper: constant β2, G² + eps in place of G², no relative
steps. Its state is 4 bytes per parameter, twice that of 8-bit Adam.

    m <- β1 m + (1 - β1) U
    p <- p (1 - lr wd) - lr m

Plain PyTorch: a step is a few operations per tensor, in float32.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops.sharding import is_sharded
from trimtab.ops.step.rules import exact, independent_decay, scalar
from trimtab.optim.optimizer import HOST, Batch, Optimizer, Options
from trimtab.optim.options import LARGEST


class _Factored(Optimizer):
    """Shared by the two forms: rows and columns as further state, and PyTorch operations instead of the kernel."""

    rule = "momentum"  # the states besides the factors, if any

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], t: Tensor) -> Tensor:
        """Update the state for step t; return the value to subtract from the decayed parameter."""
        raise NotImplementedError

    def _create(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super()._create(p, group, state)
        for name, shape in self.extras_of(p).items():
            state[name] = torch.zeros(shape, dtype=torch.float32, device=p.device)

    def extra_bytes(self, p: Tensor, group: dict[str, Any]) -> int:
        return 4 * sum(shape.numel() for shape in self.extras_of(p).values())

    def _check_states(self, batch: Batch) -> None:
        super()._check_states(batch)
        for p, state in zip(batch.owners, batch.kept, strict=True):
            for name, shape in self.extras_of(p).items():
                if name not in state or state[name].shape != shape:
                    found = tuple(state[name].shape) if name in state else None
                    raise ValueError(
                        f"a parameter now has {p.numel()} values in shape {tuple(p.shape)}, but its {name} has shape "
                        f"{found}; build a new optimizer after replacing parameters"
                    )
                state[name] = state[name].to(p.device, torch.float32)  # PyTorch's are in the parameter's dtype

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        """Only the gradient scale: there is no kernel."""
        return (torch.zeros_like(batch.t) + batch.grad_scale)[:, None]

    def _final_rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        return self.rows(batch, sums)

    def _apply(self, batch: Batch, rows: Tensor) -> None:
        group = batch.group
        independent = independent_decay(group)
        shrink = 1 - scalar(group["lr"]) * group["weight_decay"] if independent is None else independent
        numbers = zip(rows[:, 0].unbind(), batch.steps.double().unbind(), strict=True)
        for p, state, (scale, t) in zip(batch.owners, batch.kept, numbers, strict=True):
            if p.numel() == 0:
                continue
            assert p.grad is not None
            moved = scale.isfinite()  # else nothing changes
            kept = {name: state[name].clone() for name in (*self.moments, *self.extras_of(p))}
            change = self.update(p, p.grad.float() * scale.float(), state, group, t)
            for name, old in kept.items():
                state[name].copy_(torch.where(moved, state[name], old))
            p.copy_(torch.where(moved, shrink * p.float() - change, p.float()).reshape(p.shape))

    def _offload(self, folder: Path | None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        if not self.moments or any(p.device != HOST for p in params):
            raise ValueError(
                f"{type(self).__name__} does not support offload here: its rows and columns are small, and there is no "
                "kernel that reads a moment in pieces; leave offload out, or use AdamW"
            )
        super()._offload(folder)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        name = type(self).__name__
        if group["bits"] != 32:
            raise ValueError(f"{name} keeps 32-bit state, got bits={group['bits']}; AdamW takes bits=8")
        for option, plain in (("skip_zeros", False), ("rounding", "nearest")):
            if group[option] != plain:
                raise ValueError(f"{name} does not support {option}={group[option]!r}; AdamW does")
        for p in group["params"]:
            if is_sharded(p):
                raise ValueError(
                    f"{name}'s rows and columns are those of whole matrices; it does not support sharded parameters"
                )


class Adafactor(_Factored):
    """Same arguments, defaults, state and results as `torch.optim.Adafactor`. A matrix keeps one row and one column."""

    moments = ()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        """Args:

        lr: the largest relative step; steps are min(lr, 1/√t) times the rms of the weights. Weight decay follows it.
        beta2_decay: β2 is 1 - t^beta2_decay.
        eps: the smallest √V (None: the machine epsilon of the parameter's dtype), and the smallest rms of the weights.
        d: the largest rms of an update.
        """
        own = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, own, options)

    def extras_of(self, p: Tensor) -> dict[str, torch.Size]:
        if p.dim() < 2:
            return {"variance": p.shape}
        *outer, rows, columns = p.shape
        return {"row_var": torch.Size((*outer, rows, 1)), "col_var": torch.Size((*outer, 1, columns))}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], t: Tensor) -> Tensor:
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(p.dtype).eps if eps1 is None else eps1
        square, gain = g.square(), (t ** group["beta2_decay"]).float()
        if p.dim() < 2:
            v = state["variance"].lerp_(square, gain)
        else:
            row = state["row_var"].lerp_(square.mean(-1, keepdim=True), gain)
            col = state["col_var"].lerp_(square.mean(-2, keepdim=True), gain)
            v = row / row.mean(-2, keepdim=True).clamp(min=eps1) * col
        u = _clip(g / v.sqrt().clamp(min=eps1), group["d"])
        lr = torch.zeros_like(t) + exact(group["lr"])
        return _rms(p.float()).clamp(min=eps2) * torch.minimum(lr, t**-0.5).float() * u

    def check_group(self, group: dict[str, Any]) -> None:
        if not isinstance(group["eps"], tuple | list) or len(group["eps"]) != 2 or group["eps"][1] is None:
            raise ValueError(
                f"eps must be a pair (eps1 or None, eps2), got {group['eps']}; PyTorch's default is (None, 1e-3). "
                "AdafactorMomentum takes one number"
            )
        eps1, eps2 = group["eps"]
        checked = {**group, "eps": eps2}
        super().check_group(checked)
        group["lr_max"] = checked["lr_max"]
        if eps1 is not None and not 0 <= eps1 <= LARGEST:
            raise ValueError(f"eps must be a pair of numbers between 0 and {LARGEST}, got {group['eps']}")
        if not group["beta2_decay"] <= 0:
            raise ValueError(f"beta2_decay must be at most 0, got {group['beta2_decay']}; PyTorch's default is -0.8")
        if not group["d"] >= 1:
            raise ValueError(f"d, the largest rms of an update, must be at least 1, got {group['d']}")


class AdafactorMomentum(_Factored):
    """The 32-bit baseline of the 8-bit paper, for comparisons."""

    moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-30,
        weight_decay: float = 0.0,
        *,
        clip_threshold: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip_threshold": clip_threshold}
        super().__init__(params, own, options)

    def extras_of(self, p: Tensor) -> dict[str, torch.Size]:
        if p.dim() < 2:
            return {"exp_avg_sq": p.shape}
        return {"exp_avg_sq_row": p.shape[:-1], "exp_avg_sq_col": p.shape[:-2] + p.shape[-1:]}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], t: Tensor) -> Tensor:
        beta1, beta2 = group["betas"]
        square = g.square() + group["eps"]
        if p.dim() < 2:
            v = state["exp_avg_sq"].lerp_(square, 1 - beta2)
        else:
            row = state["exp_avg_sq_row"].lerp_(square.mean(-1), 1 - beta2)
            col = state["exp_avg_sq_col"].lerp_(square.mean(-2), 1 - beta2)
            # Divide first: the product of two tiny averages would be zero, and the update NaN.
            v = (row / row.mean(-1, keepdim=True))[..., :, None] * col[..., None, :]
        m = state["exp_avg"].lerp_(_clip(g / v.sqrt(), group["clip_threshold"]), 1 - beta1)
        change: Tensor = scalar(group["lr"]) * m
        return change


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _clip(u: Tensor, largest: float) -> Tensor:
    """Scale an update to an rms of at most `largest`."""
    return u / (_rms(u) / largest).clamp(min=1)
