"""The rules of the fused step: the equations, and the coefficients that they are computed with.

A rule is one equation that several optimizers use with different coefficients. All coefficients of one tensor at one
step are a row with the columns `SCALARS`. `rows` builds the rows of many tensors: in float64, rounded to float32 once.
So the kernels contain only arithmetic, and all kernels do the same.

    steps = torch.tensor([1.0])                        # the number of this step, for each tensor
    row = rules.rows(steps, lr=0.1, beta1=0.9, gain1=0.1, mix_m=1.0)            # m <- 0.9 m + 0.1 g;  p <- p - 0.1 m
    ops.fused_step("momentum", [p], [p.grad], [[m]], row)

Every coefficient may be a float or a tensor that broadcasts against `steps`, so no computation waits for a device. The
rows of AdamW, Lion and the other optimizers are in trimtab/optim, one file each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.native import table
from trimtab.ops.sharding import home_of_numbers
from trimtab.ops.step.quadratic import exact_root

SCALARS = table.SCALARS
GRAD_SCALE, COUPLED, DECAY, LR, BETA1, GAIN1, BETA2, GAIN2, BETA3, GAIN3, DEBIAS, EPS, MIX_M, MIX_G, STEP = range(
    len(SCALARS)
)

Number = float | Tensor
Row = list[float]
Moments = tuple[Tensor, ...]
Update = Callable[..., tuple[Tensor, Moments]]

# Neutral: the gradient is not scaled, the parameter does not decay, and the averages keep nothing.
_NEUTRAL: dict[str, Number] = {**dict.fromkeys(SCALARS, 0.0), "grad_scale": 1.0, "decay": 1.0, "debias": 1.0}


# --- The equations, on one float32 tensor. `r` is its row. Every kernel does these operations in this order, each
# rounded once, so that the codes agree exactly.


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    m = r[BETA1] * m + r[GAIN1] * g
    v = r[BETA2] * v + r[GAIN2] * (g * g)
    return m / (exact_root(v) * r[DEBIAS] + r[EPS]), (m, v)


def _momentum(p: Tensor, g: Tensor, m: Tensor, r: Row) -> tuple[Tensor, Moments]:
    m = r[BETA1] * m + r[GAIN1] * g
    return r[MIX_M] * m + r[MIX_G] * g, (m,)


def _lion(p: Tensor, g: Tensor, m: Tensor, r: Row) -> tuple[Tensor, Moments]:
    c = r[MIX_M] * m + r[MIX_G] * g
    update = torch.where(c.isnan(), c, c.sign())  # PyTorch's sign of NaN is 0, which would hide it
    return update, (r[BETA1] * m + r[GAIN1] * g,)


def _rms(p: Tensor, g: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    v = r[BETA2] * v + r[GAIN2] * (g * g)
    return g / (exact_root(v) * r[DEBIAS] + r[EPS]), (v,)


def _rms_momentum(p: Tensor, g: Tensor, m: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    update, (v,) = _rms(p, g, v, r)
    m = r[BETA1] * m + r[GAIN1] * update
    return m, (m, v)


def _rms_centered(p: Tensor, g: Tensor, mean: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    mean = r[BETA3] * mean + r[GAIN3] * g
    v = r[BETA2] * v + r[GAIN2] * (g * g)
    variance = (v - mean * mean).clamp(min=0)  # never negative, also where both were rounded; a NaN stays NaN
    return g / (exact_root(variance) * r[DEBIAS] + r[EPS]), (mean, v)


def _rms_centered_momentum(p: Tensor, g: Tensor, m: Tensor, mean: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    update, (mean, v) = _rms_centered(p, g, mean, v, r)
    m = r[BETA1] * m + r[GAIN1] * update
    return m, (m, mean, v)


def _ademamix(p: Tensor, g: Tensor, m: Tensor, slow: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    m = r[BETA1] * m + r[GAIN1] * g
    slow = r[BETA3] * slow + r[GAIN3] * g
    v = r[BETA2] * v + r[GAIN2] * (g * g)
    return (r[MIX_M] * m + r[MIX_G] * slow) / (exact_root(v) * r[DEBIAS] + r[EPS]), (m, slow, v)


@dataclass(frozen=True)
class Rule:
    """The states of a rule, by the letters of table.py, and its update."""

    states: str
    update: Update

    @property
    def signed(self) -> tuple[bool, ...]:
        return tuple(state != "v" for state in self.states)


_UPDATES: list[Update] = [_adamw, _momentum, _lion, _rms, _ademamix]
_UPDATES += [_rms_momentum, _rms_centered, _rms_centered_momentum]
RULES = {name: Rule(states, update) for (name, states), update in zip(table.RULES.items(), _UPDATES, strict=True)}
assert all(f"_{name}" == rule.update.__name__ for name, rule in RULES.items()), "trimtab/ops/native/table.py differs"


# --- Rows, and what several optimizers compute alike


def rows(steps: Tensor, **columns: Number) -> Tensor:
    """Float32 [tensors, len(SCALARS)] from named columns; a column left out is neutral.

    `steps` has one step number per tensor, starting at 1. `grad_scale` multiplies the gradient first (a loss scale, a
    clipping factor, -1 to maximize); a NaN there skips the tensor.
    """
    if steps.dim() != 1:
        raise ValueError(f"steps must be a vector with one number per tensor, got shape {tuple(steps.shape)}")
    if steps.device.type == "cpu" and (steps < 1).any():
        raise ValueError(f"steps start at 1, got {steps.min().item():g}; count the step before it is taken")
    unknown = columns.keys() - _NEUTRAL.keys()
    if unknown:
        raise ValueError(f"unknown scalars {sorted(unknown)}; choose from {', '.join(SCALARS)}")
    full = _NEUTRAL | {"step": steps.double()} | columns
    zero = torch.zeros_like(steps, dtype=torch.float64)  # adding to it moves numbers to the device without a copy
    return torch.stack([zero + full[name] for name in SCALARS], dim=1).float()


def exact(x: Number) -> Number:
    """A tensor in float64: a bfloat16 learning rate would round 1 - lr * weight_decay to 1."""
    return scalar(x).to(home_of_numbers(x.device)).double() if isinstance(x, Tensor) else x


def scalar(x: Any) -> Any:
    """A tensor of shape (1,) as one of shape (): only that may be on the CPU where the others are on a GPU."""
    return x.reshape(()) if isinstance(x, Tensor) else x


def adam_averages(betas: Sequence[Number], t: Tensor, beta2_power: float | None = None) -> dict[str, Number]:
    """The columns of m <- β1 m + (1 - β1) g and v <- β2 v + (1 - β2) g², and `debias` with √v̂ = debias √v.

    With `beta2_power` λ, β2 is the schedule 1 - t^-λ. It starts at 0, so v has no bias.
    """
    beta1, beta2 = exact(betas[0]), exact(betas[1])
    beta2, debias = (beta2, (1 - beta2**t) ** -0.5) if beta2_power is None else (1 - t**-beta2_power, 1.0)
    return {"beta1": beta1, "gain1": 1 - beta1, "beta2": beta2, "gain2": 1 - beta2, "debias": debias}


def momentum_average(steps: Tensor, momentum: float, dampening: float = 0.0) -> dict[str, Number]:
    """The columns of m <- momentum m + (1 - dampening) g, and m = g at the first step."""
    first, t = steps == 1, steps.double()
    return {
        "beta1": torch.where(first, 0.0, torch.full_like(t, momentum)),
        "gain1": torch.where(first, 1.0, torch.full_like(t, 1 - dampening)),
    }


def independent_decay(group: Mapping[str, Any]) -> Number | None:
    """The factor of a parameter per step where weight decay is independent of the learning rate; else None."""
    if not group.get("independent_decay") or group["weight_decay"] == 0:
        return None
    if group["lr_max"] is None:
        raise ValueError("independent_decay was switched on without lr_max; set the group's lr_max too")
    factor: Number = 1 - group["weight_decay"] * scalar(group["lr"]) / group["lr_max"]
    return factor


def debiased(table: Tensor) -> Tensor:
    """The same rows for `gradient_ratios`, whose v is then the bias-corrected one."""
    table = table.clone()
    square = table.select(1, DEBIAS) ** 2
    for column in (BETA2, GAIN2):
        table.select(1, column).mul_(square)
    return table


def rms_from_ratios(ratios: Tensor, numels: Tensor) -> Tensor:
    """RMS_t of each tensor, from `gradient_ratios`: near 1 while v follows g², higher when v is out of date."""
    return (ratios.double() / numels.clamp(min=1)).sqrt()


def trust_from_norms(norms: Tensor, *, bound: float | None = None) -> Tensor:
    """‖p‖ / ‖update‖ of each tensor, from `step_norms`. With `bound`, min(1, bound · ratio).

    1 where either is zero or the ratio is not finite: a NaN in its row would skip the tensor.
    """
    weight, update = norms[:, 0].double().sqrt(), norms[:, 1].double().sqrt()
    ratio = weight / update if bound is None else (bound * weight / update).clamp(max=1)
    return torch.where((weight != 0) & (update != 0) & ratio.isfinite(), ratio, 1.0)
