"""An optimizer seen from outside: which moments it keeps, and the rows that say what its next step does with them.

Read are only `param_groups`, `state` and, of our own optimizers, the public `rule`, `states_of` and `rows`. So Adam and
AdamW of PyTorch (plain, foreach, fused) and all of ours, in 8 and 32 bits, become lists of tensors for trimtab.ops,
without a copy. Any other optimizer with `betas`, `eps` and an `exp_avg_sq` shows at least its second moment.

What the kernels cannot read as it is (16-bit moments, odd strides, amsgrad, weight decay through the gradient) comes as
a batch of one tensor, made when it is its turn and dropped after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimtab.ops import step_rules
from trimtab.ops.blockwise import count_blocks
from trimtab.ops.checks import FLOATS
from trimtab.ops.codebook import Name, load_codebook
from trimtab.ops.sharding import is_dense, local, shard_like
from trimtab.ops.step import COUPLED, DECAY, RULES

State = Mapping[str, Any]


@dataclass(eq=False)
class Batch:
    """Tensors of one group that are kept the same way, and what the kernels need to read them."""

    group: dict[str, Any]
    rule: str | None  # None: the update is not known, only the second moment
    names: tuple[str, ...]  # of the moments
    coded: bool
    where: list[int] = field(default_factory=list)  # places among the watched tensors
    owners: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)  # steps taken so far
    grad_scale: Any = 1.0
    steps: Tensor = field(init=False)

    def numels(self) -> Tensor:
        """Of the whole tensors, not of the shards."""
        return torch.tensor([p.numel() for p in self.owners], device=self.steps.device)

    def moments(self, *names: str) -> tuple[list[Tensor], list[Tensor]]:
        """States and absmax as the ops take them: all of the first, then the next."""
        if not self.coded:
            return [state[name] for name in names for state in self.kept], []
        codes = [state[f"{name}_codes"] for name in names for state in self.kept]
        return codes, [state[f"{name}_absmax"] for name in names for state in self.kept]

    @property
    def second(self) -> str | None:
        return self.names[-1] if self.names and self.names[-1] in SECOND else None

    @property
    def code(self) -> str:
        return "quadratic" if self.coded and self.group.get("codebook") == "quadratic" else "codebook"

    @property
    def block(self) -> int:
        return min(self.group["block"] if self.coded else 256, max([1, *(p.numel() for p in self.params)]))

    def books(self) -> tuple[Tensor, Tensor]:
        """The signed and the unsigned table; some table where none is needed."""
        name: Name = "dynamic-symmetric" if not self.coded or self.code == "quadratic" else self.group["codebook"]
        device = self.params[0].device
        return load_codebook(name, signed=True).to(device), load_codebook(name, signed=False).to(device)


SECOND = ("exp_avg_sq", "square_avg", "sum")  # PyTorch's names of second moments
USED = (*SECOND, "exp_avg", "max_exp_avg_sq")


def moments_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The rule of trimtab.ops.step that the group follows, if any, and the names of its moments."""
    rule: str | None = optimizer.rule_of(group) if hasattr(optimizer, "rule_of") else None
    if rule in RULES and hasattr(optimizer, "states_of"):
        names = tuple(optimizer.states_of(group))
        # AdafactorMomentum keeps a momentum as the kernels do, but has an update of its own; SGD may keep nothing.
        known = len(names) == len(RULES[rule].signed) and "exp_avg_sq_row" not in _extras(optimizer)
        return (rule if known else None), names
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one of them
        return (None if group["amsgrad"] else "adamw"), ("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, torch.optim.RMSprop) and not group["centered"]:
        return (None if group["momentum"] else "rms"), ("square_avg",)
    if "betas" in group and "eps" in group and len(group["betas"]) >= 2:
        return None, ("exp_avg_sq",)
    return None, ()


def _extras(optimizer: Any) -> dict[str, Any]:
    return optimizer.extras_of(torch.empty(1, 1, device="meta"))


def rows_of(optimizer: torch.optim.Optimizer, batch: Batch, sums: Tensor | None = None) -> Tensor:
    """One row of trimtab.ops.step.SCALARS per tensor; `sums` are those of the first pass of a two-pass optimizer."""
    group = batch.group
    if batch.rule is not None and hasattr(optimizer, "states_of"):
        rows: Tensor = optimizer.rows(batch, sums)  # type: ignore[attr-defined]
        if group.get("independent_decay") and group["weight_decay"] and group.get("lr_max"):
            rows[:, DECAY] = 1 - group["weight_decay"] * group["lr"] / group["lr_max"]
        return rows
    common = {"lr": group["lr"], "eps": group["eps"], "grad_scale": batch.grad_scale}
    if batch.names == ("square_avg",):
        return step_rules.rmsprop(batch.steps, alpha=group["alpha"], weight_decay=group["weight_decay"], **common)
    decay = group.get("weight_decay", 0.0)
    coupled = isinstance(optimizer, torch.optim.Adam) and not group.get("decoupled_weight_decay")
    rows = step_rules.adamw(
        batch.steps, betas=tuple(group["betas"][:2]), weight_decay=0.0 if coupled else decay, **common
    )
    rows[:, COUPLED] = decay if coupled else 0.0
    return rows


def collect(optimizer: torch.optim.Optimizer, places: Mapping[Tensor, int]) -> Iterator[Batch]:
    """Every watched tensor that has a gradient, by group and by how its state is kept."""
    zeros: dict[Any, Tensor] = {}  # a state that is not there yet is zero
    alone: list[tuple[Batch, Tensor]] = []
    for group in optimizer.param_groups:
        rule, names = moments_of(optimizer, group)
        scale, coupled = _scale_of(optimizer, group), _is_coupled(optimizer, group, rule, names)
        batches: dict[Any, Batch] = {}
        for p in group["params"]:
            if p.grad is None or p not in places or p.grad.layout != torch.strided or p.is_complex():
                continue
            state: State = optimizer.state.get(p) or {}
            coded = any(f"{name}_codes" in state for name in names)
            batch = Batch(group, rule, names, coded, grad_scale=scale)
            if coupled or not _is_plain(p, state, names, coded, group):
                alone.append((batch, p))
            else:
                _add(batches.setdefault((coded, local(p).device), batch), p, places[p], state, zeros)
        yield from (_seal(batch) for batch in batches.values())
    for batch, p in alone:
        state = optimizer.state.get(p) or {}
        if _is_plain(p, state, batch.names, batch.coded, batch.group):
            _add(batch, p, places[p], state, zeros)
        else:
            _convert(batch, p, places[p], state)
        yield _couple(_seal(batch)) if _is_coupled(optimizer, batch.group, batch.rule, batch.names) else _seal(batch)


def _scale_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Any:
    """What the step multiplies gradients by. A GradScaler leaves that to fused optimizers."""
    scale = (-1.0 if group.get("maximize") else 1.0) / group.get("loss_scale", 1)
    given = getattr(optimizer, "grad_scale", None)
    return scale / given.double() if isinstance(given, Tensor) else scale


def _is_coupled(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], rule: str | None, names: tuple[str, ...]
) -> bool:
    """Does weight decay go through the gradient? Then the second moment has it too."""
    if not group.get("weight_decay") or (rule is None and not isinstance(optimizer, torch.optim.Adam)):
        return False
    probe = Batch(group, rule, names, False)
    probe.steps, probe.owners = torch.ones(1), [torch.empty(1)]
    return bool(rows_of(optimizer, probe)[0, COUPLED] != 0)


def _is_plain(p: Tensor, state: State, names: Sequence[str], coded: bool, group: Mapping[str, Any]) -> bool:
    """Can the kernels read it as it is?"""
    mine, dtype = local(p), torch.uint8 if coded else torch.float32
    kept = [local(state[name + ("_codes" if coded else "")]) for name in names] if state else []
    return (
        not group.get("amsgrad")
        and mine.dtype in FLOATS
        and p.grad is not None
        and p.grad.dtype in FLOATS
        and is_dense(mine)
        and all(x.dtype == dtype and x.device == mine.device and x.stride() == mine.stride() for x in kept)
    )


def _add(batch: Batch, p: Tensor, place: int, state: State, zeros: dict[Any, Tensor]) -> None:
    mine, group = local(p).detach(), batch.group
    grad = shard_like(p.grad, p).detach()
    if not (grad.is_contiguous() and mine.is_contiguous()) and grad.stride() != mine.stride():
        grad = torch.empty_like(mine, dtype=grad.dtype).copy_(grad)
    kept: dict[str, Tensor] = {}
    for name in batch.names:
        if not state:
            kept[name] = _zero_like(mine, zeros, group.get("initial_accumulator_value", 0.0))
            continue
        found = kept[name + ("_codes" if batch.coded else "")] = _flat(local(state[name + "_codes" * batch.coded]))
        if found.numel() != mine.numel():
            raise ValueError(f"{name} has {found.numel()} values, its parameter {mine.numel()}")
        if batch.coded:
            scales = kept[f"{name}_absmax"] = state[f"{name}_absmax"]
            if scales.numel() != count_blocks(mine.numel(), group["block"]):
                raise ValueError(f"{name} has {scales.numel()} scales for {mine.numel()} values")
    batch.where.append(place)
    batch.owners.append(p)
    batch.params.append(_flat(mine))
    batch.grads.append(_flat(grad))
    batch.kept.append(kept)
    batch.counts.append(state.get("step", 0))


def _flat(x: Tensor) -> Tensor:
    """In memory order, of a tensor without gaps."""
    return x.view(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))


def _zero_like(mine: Tensor, zeros: dict[Any, Tensor], value: float) -> Tensor:
    """One stretch of zeros for all: nothing is written there."""
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
    flat = {key: _float(x) for key, x in state.items() if isinstance(x, Tensor) and key in USED}
    mine, grad = _float(p), _float(shard_like(p.grad, p))
    batch.where, batch.owners, batch.params, batch.grads = [place], [p], [mine], [grad]
    batch.counts, batch.coded = [state.get("step", 0)], False
    batch.kept = [{name: flat.get(name, torch.zeros_like(mine)) for name in batch.names}]
    largest = flat.get("max_exp_avg_sq")
    if largest is not None:
        v, beta2 = batch.kept[0]["exp_avg_sq"], float(batch.group["betas"][1])
        added = (1 - beta2) * (grad * torch.as_tensor(batch.grad_scale).float()).square()
        # What the rows make of it, β2 v + (1 - β2) g², must be the maximum that amsgrad divides by.
        batch.kept[0]["exp_avg_sq"] = (torch.maximum(largest, beta2 * v + added) - added) / beta2


def _couple(batch: Batch) -> Batch:
    """g <- g * grad_scale + decay * p, as the step will do."""
    decay, scale = batch.group["weight_decay"], torch.as_tensor(batch.grad_scale).float()
    batch.grads = [batch.grads[0].float() * scale.to(batch.steps.device) + decay * batch.params[0].float()]
    batch.grad_scale, batch.group = 1.0, batch.group | {"weight_decay": 0.0}
    return batch


def _float(x: Tensor) -> Tensor:
    return local(x).detach().float().contiguous().view(-1)
