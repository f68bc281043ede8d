"""From hyper-parameters and step numbers to the rows of numbers that `fused_step` works with.

Each function is one optimizer: its equations stand in its docstring, its scalars are worked out in float64 for all
tensors at once, and the result is rounded to float32 once. `steps` is a vector with one step number per tensor,
starting at 1. Every number may be a float or a tensor that broadcasts against `steps`, so nothing waits for a device.

`grad_scale` multiplies the gradient first (a loss scale, a clip, -1 to maximize); a NaN there skips the tensor.
"""

import torch
from torch import Tensor

from trimtab.ops.step import BETA2, DEBIAS, DECAY, GAIN2, SCALARS

Number = float | Tensor

# Neutral: the gradient as it is, no decay, nothing remembered.
_DEFAULTS: dict[str, float] = dict.fromkeys(SCALARS, 0.0) | {"grad_scale": 1.0, "decay": 1.0, "debias": 1.0}


def _exact(*numbers: Number) -> list[Number]:
    """Tensors in float64: a bfloat16 learning rate would round 1 - lr * weight_decay to 1."""
    return [x.double() if isinstance(x, Tensor) else x for x in numbers]


def _second(beta2: Number, t: Tensor, power: float | None) -> tuple[Number, Number]:
    """β2 at step t, and what debiases √v. The schedule 1 - t^-power starts at 0, so its average is never biased."""
    if power is None:
        return beta2, (1 - beta2**t) ** -0.5
    return 1 - t**-power, 1.0


def rows(steps: Tensor, **columns: Number) -> Tensor:
    """Stack named columns into float32 [tensors, len(SCALARS)]; a column left out is neutral."""
    if steps.dim() != 1:
        raise ValueError(f"steps must be a vector with one number per tensor, got shape {tuple(steps.shape)}")
    if steps.device.type == "cpu" and (steps < 1).any():
        raise ValueError(f"steps start at 1, got {steps.min().item():g}; count the step before it is taken")
    unknown = columns.keys() - _DEFAULTS.keys()
    if unknown:
        raise ValueError(f"unknown scalars {sorted(unknown)}; choose from {', '.join(SCALARS)}")
    full = _DEFAULTS | {"step": steps.double()} | columns
    # Most columns are one number for all tensors: those go in at once, and the rest column by column.
    shared = [0.0 if isinstance(full[name], Tensor) else full[name] for name in SCALARS]
    table = torch.tensor(shared, dtype=torch.float64, device=steps.device).repeat(len(steps), 1)
    for place, name in enumerate(SCALARS):
        if isinstance(full[name], Tensor):
            table[:, place] = full[name]
    return table.float()


def adamw(
    steps: Tensor,
    *,
    lr: Number,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Number = 0.0,
    grad_scale: Number = 1.0,
    beta2_power: float | None = None,
) -> Tensor:
    """Rule "adamw": p <- p (1 - lr wd) - lr m̂ / (√v̂ + eps), with m̂ = m / (1 - β1^t), v̂ = v / (1 - β2^t).

    With `beta2_power` λ, β2 is 1 - t^-λ instead, and v̂ = v.
    """
    t = steps.double()
    lr, weight_decay, beta1, beta2 = _exact(lr, weight_decay, *betas)
    beta2, debias = _second(beta2, t, beta2_power)
    return rows(
        steps,
        grad_scale=grad_scale,
        decay=1 - lr * weight_decay,
        lr=lr / (1 - beta1**t),
        beta1=beta1,
        gain1=1 - beta1,
        beta2=beta2,
        gain2=1 - beta2,
        debias=debias,
        eps=eps,
    )


def stable_adamw(
    steps: Tensor,
    *,
    lr: Number,
    betas: tuple[Number, Number] = (0.9, 0.99),
    eps: float = 1e-6,
    weight_decay: Number = 0.0,
    grad_scale: Number = 1.0,
    rms: Number = 0.0,
    clip: float = 1.0,
    decay_clipped: bool = True,
    beta2_power: float | None = None,
) -> Tensor:
    """Rule "adamw" with the step shortened to η = lr / max(1, rms / clip).

    `rms` is `rms_from_ratios` of a first pass with `debiased` rows of the same call (rms left out). Weight decay
    follows η, as in the paper; with `decay_clipped=False` it follows lr.
    """
    lr, weight_decay = _exact(lr, weight_decay)
    shortened = lr / torch.clamp(torch.as_tensor(rms, dtype=torch.float64, device=steps.device) / clip, min=1)
    table = adamw(steps, lr=shortened, betas=betas, eps=eps, grad_scale=grad_scale, beta2_power=beta2_power)
    table[:, DECAY] = 1 - (shortened if decay_clipped else lr) * weight_decay
    return table


def debiased(table: Tensor) -> Tensor:
    """The same rows for `gradient_ratios`, whose v is then the bias-corrected one."""
    table = table.clone()
    table[:, BETA2] *= table[:, DEBIAS] ** 2
    table[:, GAIN2] *= table[:, DEBIAS] ** 2
    return table


def rms_from_ratios(ratios: Tensor, numels: Tensor) -> Tensor:
    """RMS_t of each tensor: near 1 while v tracks g², above it when v is out of date. 0 for an empty tensor."""
    return (ratios.double() / numels.clamp(min=1)).sqrt()


def lamb(
    steps: Tensor,
    *,
    lr: Number,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: Number = 0.0,
    grad_scale: Number = 1.0,
    trust: Number = 1.0,
    beta2_power: float | None = None,
) -> Tensor:
    """Rule "adamw" with both the step and the decay multiplied by `trust`: p <- p - lr trust (m̂ / (√v̂ + eps) + wd p).

    `trust` is `trust_from_norms` of a first pass with lr = 1 and trust left out.
    """
    trusted = _exact(lr)[0] * torch.as_tensor(trust, dtype=torch.float64, device=steps.device)
    return adamw(
        steps,
        lr=trusted,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        grad_scale=grad_scale,
        beta2_power=beta2_power,
    )


def lars(
    steps: Tensor,
    *,
    lr: Number,
    momentum: float = 0.9,
    weight_decay: Number = 0.0,
    grad_scale: Number = 1.0,
    trust: Number = 1.0,
) -> Tensor:
    """Rule "momentum" with the step multiplied by `trust`, from `trust_from_norms` of a first pass with lr = 1."""
    trusted = _exact(lr)[0] * torch.as_tensor(trust, dtype=torch.float64, device=steps.device)
    return sgd(steps, lr=trusted, momentum=momentum, weight_decay=weight_decay, grad_scale=grad_scale)


def trust_from_norms(norms: Tensor, *, bound: float | None = None) -> Tensor:
    """‖p‖ / ‖update‖ per tensor, 1 where either is zero; with `bound`, min(1, bound ‖p‖ / ‖update‖)."""
    weight, update = norms[:, 0].double().sqrt(), norms[:, 1].double().sqrt()
    ratio = weight / update if bound is None else (bound * weight / update).clamp(max=1)
    return torch.where((weight == 0) | (update == 0), 1.0, ratio)


def sgd(
    steps: Tensor,
    *,
    lr: Number,
    momentum: float = 0.9,
    dampening: float = 0.0,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
    grad_scale: Number = 1.0,
) -> Tensor:
    """Rule "momentum": m <- momentum m + (1 - dampening) g, but m = g at the first step; p <- p - lr m.

    With nesterov the update is g + momentum m.
    """
    first, t = steps == 1, steps.double()
    return rows(
        steps,
        grad_scale=grad_scale,
        coupled=weight_decay,
        lr=lr,
        beta1=torch.where(first, 0.0, torch.full_like(t, momentum)),
        gain1=torch.where(first, 1.0, torch.full_like(t, 1 - dampening)),
        mix_m=momentum if nesterov else 1.0,
        mix_g=1.0 if nesterov else 0.0,
    )


def lion(
    steps: Tensor,
    *,
    lr: Number,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: Number = 0.0,
    grad_scale: Number = 1.0,
) -> Tensor:
    """Rule "lion": p <- p (1 - lr wd) - lr sign(β1 m + (1 - β1) g), then m <- β2 m + (1 - β2) g."""
    beta1, beta2 = betas
    lr, weight_decay = _exact(lr, weight_decay)
    return rows(
        steps,
        grad_scale=grad_scale,
        decay=1 - lr * weight_decay,
        lr=lr,
        mix_m=beta1,
        mix_g=1 - beta1,
        beta1=beta2,
        gain1=1 - beta2,
    )


def rmsprop(
    steps: Tensor,
    *,
    lr: Number,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: Number = 0.0,
    momentum: float = 0.0,
    grad_scale: Number = 1.0,
) -> Tensor:
    """Rule "rms": v <- α v + (1 - α) g²; u = g / (√v + eps); p <- p - lr u.

    Rule "rms_momentum": m <- momentum m + u; p <- p - lr m. Rules "rms_centered" and "rms_centered_momentum": the
    same with mean <- α mean + (1 - α) g and √(v - mean²) in place of √v.
    """
    return rows(
        steps,
        grad_scale=grad_scale,
        coupled=weight_decay,
        lr=lr,
        beta1=momentum,
        gain1=1.0,
        beta2=alpha,
        gain2=1 - alpha,
        beta3=alpha,
        gain3=1 - alpha,
        eps=eps,
    )


def adagrad(
    steps: Tensor,
    *,
    lr: Number,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: Number = 0.0,
    grad_scale: Number = 1.0,
) -> Tensor:
    """Rule "rms": v <- v + g²; p <- p - lr / (1 + (t - 1) lr_decay) · g / (√v + eps)."""
    lr = _exact(lr)[0] / (1 + (steps.double() - 1) * lr_decay)
    return rows(steps, grad_scale=grad_scale, coupled=weight_decay, lr=lr, beta2=1.0, gain2=1.0, eps=eps)


def ademamix(
    steps: Tensor,
    *,
    lr: Number,
    betas: tuple[Number, Number, Number] = (0.9, 0.999, 0.9999),
    alpha: Number = 5.0,
    eps: float = 1e-8,
    weight_decay: Number = 0.0,
    grad_scale: Number = 1.0,
    beta2_power: float | None = None,
) -> Tensor:
    """Rule "ademamix": p <- p (1 - lr wd) - lr (m̂ + α slow) / (√v̂ + eps); slow <- β3 slow + (1 - β3) g, not debiased.

    Schedules of α and β3 are the caller's: pass their value at this step.
    """
    t = steps.double()
    lr, weight_decay, beta1, beta2, beta3 = _exact(lr, weight_decay, *betas)
    beta2, debias = _second(beta2, t, beta2_power)
    return rows(
        steps,
        grad_scale=grad_scale,
        decay=1 - lr * weight_decay,
        lr=lr,
        beta1=beta1,
        gain1=1 - beta1,
        beta2=beta2,
        gain2=1 - beta2,
        beta3=beta3,
        gain3=1 - beta3,
        debias=debias,
        eps=eps,
        mix_m=1 / (1 - beta1**t),
        mix_g=alpha,
    )
