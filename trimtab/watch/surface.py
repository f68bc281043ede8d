"""The state of any optimizer as batches for trimtab.ops: its moments, and the coefficients of its next step.

Only `param_groups`, `state` and, of our own optimizers, the public `rule_of`, `states_of` and `rows` are read. Adam and
AdamW of PyTorch (plain, foreach, fused) and all of our optimizers, in 8 and 32 bits, become lists of tensors without a
copy. Of any other optimizer with `betas`, `eps` and an `exp_avg_sq`, the second moment is read.

Tensors that the kernels cannot read directly (16-bit moments, unusual strides, amsgrad, weight decay through the
gradient) are converted: one batch per tensor, made when it is needed and dropped after it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.blockwise import count_blocks
from trimtab.ops.checks import FLOATS
from trimtab.ops.sharding import flat, is_dense, local, shard_like
from trimtab.ops.step import RULES
from trimtab.ops.step.rules import COUPLED, DECAY, adam_averages, exact, independent_decay
from trimtab.ops.step.storage import SECOND, Batch, Storage

State = Mapping[str, Any]
USED = (*SECOND, "exp_avg", "max_exp_avg_sq")
FLOAT32 = Storage(32, 256, "quadratic")


def moments_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The rule of trimtab.ops.step that the group follows, if any, and the names of its moments."""
    rule: str | None = optimizer.rule_of(group) if hasattr(optimizer, "rule_of") else None
    if rule in RULES and hasattr(optimizer, "states_of"):
        names = tuple(optimizer.states_of(group))
        # AdafactorMomentum keeps a momentum as the kernels do, but has an update of its own; SGD may keep nothing.
        extras = optimizer.extras_of(torch.empty(1, 1, device="meta"))  # type: ignore[attr-defined]
        known = len(names) == len(RULES[rule].states) and "exp_avg_sq_row" not in extras
        return (rule if known else None), names
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one of them
        return (None if group["amsgrad"] else "adamw"), ("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, torch.optim.RMSprop) and not group["centered"]:
        return (None if group["momentum"] else "rms"), ("square_avg",)
    if "betas" in group and "eps" in group and len(group["betas"]) >= 2:
        return None, ("exp_avg_sq",)
    return None, ()


def rows_of(optimizer: torch.optim.Optimizer, batch: Batch, sums: Tensor | None = None) -> Tensor:
    """One row of coefficients per tensor; `sums` are those of the first pass of a two-pass optimizer."""
    group = batch.group
    if batch.rule is not None and hasattr(optimizer, "states_of"):
        rows: Tensor = optimizer.rows(batch, sums)  # type: ignore[attr-defined]
        independent = independent_decay(group)
        if independent is not None:
            rows[:, DECAY] = independent
        return rows
    lr, wd, t = exact(group["lr"]), group.get("weight_decay", 0.0), batch.t
    if batch.names == ("square_avg",):
        alpha = group["alpha"]
        return batch.rows(lr=lr, coupled=wd, beta2=alpha, gain2=1 - alpha, eps=group["eps"])
    coupled = isinstance(optimizer, torch.optim.Adam) and not group.get("decoupled_weight_decay")
    averages = adam_averages(group["betas"], t)
    decay = {"coupled": wd} if coupled else {"decay": 1 - lr * exact(wd)}
    return batch.rows(**averages, **decay, eps=group["eps"], lr=lr / (1 - averages["beta1"] ** t))


def collect(optimizer: torch.optim.Optimizer, places: Mapping[Tensor, int]) -> Iterator[Batch]:
    """Every watched tensor that has a gradient, by group and by how its state is kept."""
    zeros: dict[Any, Tensor] = {}  # a state that is not there yet is zero
    alone: list[tuple[Batch, Tensor, bool]] = []
    for group in optimizer.param_groups:
        rule, names = moments_of(optimizer, group)
        scale, coupled = _scale_of(optimizer, group), _is_coupled(optimizer, Batch(group, FLOAT32, rule, names))
        batches: dict[Any, Batch] = {}
        for p in group["params"]:
            if p.grad is None or p not in places or p.grad.layout != torch.strided or p.is_complex():
                continue
            state: State = optimizer.state.get(p) or {}
            coded = any(f"{name}_codes" in state for name in names)
            storage = Storage(8, group["block"], group["codebook"]) if coded else FLOAT32
            batch = Batch(group, storage, rule, names, scale)
            if coupled or not _is_plain(p, state, batch):
                alone.append((batch, p, coupled))
            else:
                _add(batches.setdefault((coded, local(p).device), batch), p, places[p], state, zeros)
        yield from (_seal(batch) for batch in batches.values())
    for batch, p, coupled in alone:
        state = optimizer.state.get(p) or {}
        if _is_plain(p, state, batch):
            _add(batch, p, places[p], state, zeros)
        else:
            _convert(batch, p, places[p], state)
        yield _couple(_seal(batch)) if coupled else _seal(batch)


def _scale_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Any:
    """What the step multiplies gradients by. A GradScaler leaves that to fused optimizers."""
    scale = (-1.0 if group.get("maximize") else 1.0) / group.get("loss_scale", 1)
    given = getattr(optimizer, "grad_scale", None)
    return scale / given.double() if isinstance(given, Tensor) else scale


def _is_coupled(optimizer: torch.optim.Optimizer, probe: Batch) -> bool:
    """Whether weight decay is added to the gradient and therefore enters the second moment."""
    known = probe.rule is not None or isinstance(optimizer, torch.optim.Adam)
    if not probe.group.get("weight_decay") or not known:
        return False
    probe.steps, probe.owners = torch.ones(1), [torch.empty(1)]
    return bool(rows_of(optimizer, probe)[0, COUPLED] != 0)


def _is_plain(p: Tensor, state: State, batch: Batch) -> bool:
    """Whether the kernels can read the tensor without a conversion."""
    mine, dtype = local(p), torch.uint8 if batch.storage.bits == 8 else torch.float32
    kept = [local(state[batch.storage.keys(name)[0]]) for name in batch.names] if state else []
    return (
        not batch.group.get("amsgrad")
        and mine.dtype in FLOATS
        and p.grad is not None
        and p.grad.dtype in FLOATS
        and is_dense(mine)
        and all(x.dtype == dtype and x.device == mine.device and x.stride() == mine.stride() for x in kept)
    )


def _add(batch: Batch, p: Tensor, place: int, state: State, zeros: dict[Any, Tensor]) -> None:
    mine, storage = local(p).detach(), batch.storage
    grad = shard_like(p.grad, p).detach()
    if not (grad.is_contiguous() and mine.is_contiguous()) and grad.stride() != mine.stride():
        grad = torch.empty_like(mine, dtype=grad.dtype).copy_(grad)
    kept: dict[str, Tensor] = {}
    for name in batch.names:
        if not state:
            kept[name] = _zero_like(mine, zeros, batch.group.get("initial_accumulator_value", 0.0))
            continue
        found, *scales = (local(state[key]) for key in storage.keys(name))
        if found.numel() != mine.numel():
            raise ValueError(f"{name} has {found.numel()} values, its parameter {mine.numel()}")
        if scales and scales[0].numel() != count_blocks(mine.numel(), storage.block):
            raise ValueError(f"{name} has {scales[0].numel()} scales for {mine.numel()} values")
        kept |= zip(storage.keys(name), (_flat(found), *scales), strict=True)
    batch.where.append(place)
    batch.owners.append(p)
    batch.params.append(_flat(mine))
    batch.grads.append(_flat(grad))
    batch.kept.append(kept)
    batch.counts.append(state.get("step", 0))


def _flat(x: Tensor) -> Tensor:
    """In memory order, of a tensor without gaps."""
    return flat(x).view(-1)


def _zero_like(mine: Tensor, zeros: dict[Any, Tensor], value: float) -> Tensor:
    """A view of one shared tensor: nothing is written to it."""
    key = (mine.device, value)
    if key not in zeros or zeros[key].numel() < mine.numel():
        zeros[key] = torch.full((mine.numel(),), value, device=mine.device)
    return zeros[key][: mine.numel()]


def _seal(batch: Batch) -> Batch:
    device = batch.params[0].device
    counts = [x if isinstance(x, Tensor) else torch.tensor(float(x)) for x in batch.counts]
    if len({x.device for x in counts}) > 1:
        counts = [x.to(device) for x in counts]
    batch.steps = torch.stack([local(x).float() for x in counts]).to(device, non_blocking=True) + 1
    return batch


def _convert(batch: Batch, p: Tensor, place: int, state: State) -> None:
    """One tensor in contiguous float32, and amsgrad's maximum in place of its second moment."""
    found = {key: _float(x) for key, x in state.items() if isinstance(x, Tensor) and key in USED}
    mine, grad = _float(p), _float(shard_like(p.grad, p))
    batch.where, batch.owners, batch.params, batch.grads = [place], [p], [mine], [grad]
    batch.counts, batch.storage = [state.get("step", 0)], FLOAT32
    batch.kept = [{name: found.get(name, torch.zeros_like(mine)) for name in batch.names}]
    largest = found.get("max_exp_avg_sq")
    if largest is not None:
        v, beta2 = batch.kept[0]["exp_avg_sq"], float(batch.group["betas"][1])
        added = (1 - beta2) * (grad * torch.as_tensor(batch.grad_scale).float()).square()
        # The kernels compute β2 v + (1 - β2) g² from it: that must be the maximum that amsgrad divides by.
        batch.kept[0]["exp_avg_sq"] = (torch.maximum(largest, beta2 * v + added) - added) / beta2


def _couple(batch: Batch) -> Batch:
    """g <- g * grad_scale + decay * p, as in the step."""
    decay, scale = batch.group["weight_decay"], torch.as_tensor(batch.grad_scale).float()
    batch.grads = [batch.grads[0].float() * scale.to(batch.steps.device) + decay * batch.params[0].float()]
    batch.grad_scale, batch.group = 1.0, batch.group | {"weight_decay": 0.0}
    return batch


def _float(x: Tensor) -> Tensor:
    return local(x).detach().float().contiguous().view(-1)
