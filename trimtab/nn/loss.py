"""Cross entropy with z-loss.

logZ, the logarithm of the sum over exp(logits), may drift far from zero without changing the cross entropy, until the
logits lose their precision. The z-loss is a small penalty on its square that prevents this.

    ce = logZ - y[target]      loss = mean(ce + c logZ^2)      dloss/dy = p (1 + 2 c logZ) - 1[target]

Both means are over tokens whose target is not `IGNORE`. If there are none, the loss and all gradients are 0. Values of
tokens without a target, even NaN, have no effect. With several processes, each takes the mean over its own tokens.

Wortsman et al. 2023b, section 3 (Small-scale proxies).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.nn.tap import tap
from trimtab.ops.float32.product import product_nn, product_nt, product_tn
from trimtab.ops.float32.score import score_

# B batch, T time, N tokens, D width, V vocabulary

IGNORE = -100  # target of tokens without one, as in PyTorch
LOGITS_AT_ONCE = 2**25  # logits in memory in `linear_cross_entropy`: enough for a matrix product at full speed
ROWS_AT_ONCE = 2**13  # rows of the weight's gradient that are summed at once in 16 bits


class Loss(NamedTuple):
    """`loss` = ce + z is for the backward pass; `ce` (cross entropy) and `z` (z-loss) are detached."""

    loss: Tensor
    ce: Tensor
    z: Tensor


def cross_entropy(logits: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> Loss:
    """The loss of logits [..., V] for targets [...]. Tap: "logz", per token."""
    check_targets(targets, logits.shape[:-1], logits.shape[-1])
    y_NV = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    valid, index, count = _read(targets)
    # `where` instead of a product with 0: 0 * NaN is NaN, forward and backward.
    y_NV = torch.where(valid[:, None], y_NV, 0)
    logz = y_NV.logsumexp(dim=-1)
    ce = logz - y_NV.gather(1, index[:, None]).squeeze(1)
    ce_sum = torch.where(valid, ce, 0).sum()
    z_sum = torch.where(valid, logz, 0).square().sum()
    return _report(ce_sum / count + z_loss * (z_sum / count), ce, logz, valid, count, z_loss)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> Loss:
    """The loss of x [..., D] @ weight [V, D].T for targets [...], without all logits in memory.

    Equal to `cross_entropy(x @ weight.T, ...)`, computed in chunks of tokens. The forward pass also computes the
    gradients, and the backward pass only scales them. It can be differentiated once.
    """
    if hasattr(weight, "device_mesh"):
        raise ValueError("weight is sharded, but all its rows are needed; shard the whole model: fully_shard(model)")
    check_targets(targets, x.shape[:-1], weight.shape[0])
    valid, index, count = _read(targets)
    rows = max(LOGITS_AT_ONCE // weight.shape[0] // 16, 1) * 16
    grad = torch.is_grad_enabled()
    needs = (grad and x.requires_grad, grad and weight.requires_grad)
    # The dtype of autocast. Autocast is disabled inside, so that the weight is cast once and not for every chunk.
    device = x.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    x_ND = x.reshape(-1, x.shape[-1])
    loss, ce, logz = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_ND, weight, index, valid, count, z_loss, rows, low, needs
    )
    return _report(loss, ce, logz, valid, count, z_loss)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        index: Tensor,
        valid: Tensor,
        count: Tensor,
        z_loss: float,
        rows: int,
        low: torch.dtype | None,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x_ND.device.type, enabled=False):
            # Tokens without a target become zeros: a NaN must not reach a gradient.
            x = torch.where(valid[:, None], x_ND, 0).to(low or x_ND.dtype)
            weight = weight_VD.to(x.dtype)
            wide = torch.promote_types(x.dtype, torch.float32)
            ce, logz = torch.empty(2, len(x), dtype=wide, device=x.device).unbind()
            grad_x = torch.empty_like(x) if needs[0] else None
            grad_weight = None
            # Logits are [V, N]: V is rarely a multiple of 16, so rows of V would not be aligned to cache lines, and the
            # products would run at two thirds of the speed.
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                y_VN = product_nt(weight, x[part]).to(wide)
                ce[part], logz[part] = score_(y_VN, index[part], valid[part], z_loss)
                slope_VN = y_VN.to(x.dtype)  # no copy if float32
                if grad_x is not None:
                    grad_x[part] = product_tn(slope_VN, weight)
                if needs[1]:
                    grad_weight = _add_product(grad_weight, slope_VN, x[part])
                del y_VN, slope_VN  # before the next chunk exists
            zero = ce.new_zeros(())
            loss = (torch.where(valid, ce, zero) + z_loss * torch.where(valid, logz, zero).square()).sum() / count
        grad_x = None if grad_x is None else grad_x.to(x_ND.dtype)
        if needs[1]:  # grad_weight is None if there are no tokens
            grad_weight = torch.zeros_like(weight_VD) if grad_weight is None else grad_weight.to(weight_VD.dtype)
        ctx.save_for_backward(grad_x, grad_weight, count)
        ctx.mark_non_differentiable(ce, logz)
        return loss, ce, logz

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise RuntimeError(
                "linear_cross_entropy can be differentiated once, because its gradient has no graph. For second "
                "derivatives use cross_entropy(model(tokens), targets)"
            )
        *grads, count = ctx.saved_tensors
        # Divided here and not in forward: p / count would underflow in 16 bits.
        share = grad_loss / count
        return *(None if g is None else g * share.to(g.dtype) for g in grads), *[None] * 7


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in at least float32. The first product is the total: zeros would cost a pass over memory."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        new = product_nn(a, b)
        return new if total is None else total.add_(new)
    # In 16 bits, in parts: the product and its float32 copy would need 1.5 times the memory of the total.
    parts = [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(a), ROWS_AT_ONCE)]
    if total is None:
        total = torch.empty(len(a), b.shape[1], dtype=wide, device=a.device)
        for part in parts:
            total[part] = product_nn(a[part], b)
        return total
    for part in parts:
        total[part] += product_nn(a[part], b)
    return total


def check_targets(targets: Tensor, shape: torch.Size, classes: int) -> None:
    if targets.shape != shape:
        raise ValueError(f"targets must have one number per token, shape {tuple(shape)}, got {tuple(targets.shape)}")
    check_indices("targets", targets, classes, ignore=IGNORE)


def check_indices(name: str, x: Tensor, limit: int, *, ignore: int | None = None) -> None:
    """Refuse numbers outside [0, limit). Only on the CPU: on a GPU it would synchronise, and the kernel checks too."""
    if x.is_floating_point() or x.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers, got {x.dtype}; call {name}.long()")
    if x.device.type != "cpu" or torch.compiler.is_compiling() or type(x) is not Tensor:
        return
    wrong = (x < 0) | (x >= limit)
    if ignore is not None:
        wrong &= x != ignore
    if wrong.any():
        also = "" if ignore is None else f", or {ignore} where there is none"
        raise ValueError(f"{name} holds {int(x[wrong][0])}; try 0 to {limit - 1}{also}")


def _read(targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mask of tokens with a target, their class (0 for the others), and their number (at least 1)."""
    flat = targets.flatten()
    valid = flat != IGNORE
    return valid, torch.where(valid, flat, 0).long(), valid.sum().clamp(min=1)


def _report(loss: Tensor, ce: Tensor, logz: Tensor, valid: Tensor, count: Tensor, z_loss: float) -> Loss:
    ce, logz = ce.detach(), tap(logz, "logz").detach()
    z = z_loss * torch.where(valid, logz, 0).square().sum() / count
    return Loss(loss, torch.where(valid, ce, 0).sum() / count, z)
