"""Signals of every tensor in one step: a few passes over memory, one row of sums per tensor.

    rms         √ mean(g² / max(v̂, eps²))      v̂ as used by this step: includes this gradient, bias-corrected
    grad_rms    √ mean(g²)                      after clipping and unscaling, as the optimizer reads it
    param_rms   √ mean(p²)                      before the step
    update_rms  √ mean((p_new - p)²)            weight decay and the optimizer's own clipping included
    ratio       update_rms / param_rms
    eps_share   eps / (grad_rms + eps)          the part of the update that eps removes

Sums are of whole tensors: shards are added over processes. If the optimizer's update rule is unknown, its update is
measured on at most `SAMPLE` values per tensor, copied for the duration of the step. Nothing else is copied.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.nn.tap import strip_wrappers
from trimtab.ops.sharding import add_up_shards, local, widen
from trimtab.ops.step import gradient_norms_unchecked
from trimtab.ops.step.rules import EPS, GRAD_SCALE, rms_from_ratios
from trimtab.ops.step.storage import Batch
from trimtab.watch.processes import Errors
from trimtab.watch.surface import FLOAT32, collect, moments_of, rows_of

SAMPLE = 4096
PRESENT, GRAD, PARAM, RATIO, UPDATE, EPS_USED = range(6)  # the columns of a tensor's row of sums
NAMES = ("rms", "grad_rms", "param_rms", "update_rms", "ratio", "eps_share")


@dataclass
class Plan:
    """The watched tensors: names, parameters and sizes, in the optimizer's order."""

    optimizer: torch.optim.Optimizer
    names: list[str]
    owners: list[Tensor]
    device: torch.device  # of the sums
    errors: Errors

    def __post_init__(self) -> None:
        self.places = {p: i for i, p in enumerate(self.owners)}
        self.numels = torch.tensor([p.numel() for p in self.owners], dtype=torch.float64)

    def zeros(self, columns: int) -> Tensor:
        """A row for every tensor."""
        return torch.zeros(len(self.names), columns, dtype=torch.float64, device=self.device)

    def collect(self) -> Iterator[Batch]:
        return collect(self.optimizer, self.places)


def name_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Names of the optimizer's parameters: from the model, else from the optimizer, else group and index."""
    known = {p: strip_wrappers(name) for name, p in model.named_parameters()}
    names: dict[Tensor, str] = {}
    for i, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [f"group {i}, parameter {k}" for k in range(len(group["params"]))]
        names |= {p: known.get(p, name) for p, name in zip(group["params"], own, strict=True)}
    return names


def has_second_moment(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps a second moment, judged before its first step."""
    found = [moments_of(optimizer, group) for group in optimizer.param_groups]
    return any(Batch({}, FLOAT32, rule, names).second for rule, names in found)


class Signals:
    """The sums of one step. Call `measure_gradients` and `measure_updates` before it, `measure_samples` after it."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.optimizer = plan, plan.optimizer
        self.sums = plan.zeros(6)
        self._batches: list[Batch] | None = None
        self._sampled: list[tuple[int, Tensor, int, Tensor]] = []

    def measure_gradients(self) -> None:
        """Before the step: gradients, and RMS_t against the second moment that the step uses."""
        with self.plan.errors:
            self._gradients()
        eps = self.sums[:, EPS_USED].clone()
        self.sums = add_up_shards(self.plan.owners, self.sums)
        self.sums[:, EPS_USED] = eps

    def forget(self) -> None:
        """Collect again: something has changed the gradients or the groups."""
        self._batches = None

    def _collect(self) -> Iterator[Batch]:
        """`plan.collect()`, once for a step, if it copies nothing: converted gradients must not all be kept."""
        if self._batches is not None:
            yield from self._batches
            return
        found, shares = list[Batch](), True
        for batch in self.plan.collect():
            shares = shares and all(_shares(g, p) for g, p in zip(batch.grads, batch.owners, strict=True))
            found = [*found, batch] if shares else []
            yield batch
        self._batches = found if shares else None

    def _gradients(self) -> None:
        for batch in self._collect():
            where = self._index(batch)
            self.sums[where, PRESENT] = 1.0
            squares = gradient_norms_unchecked(batch.grads).to(self.sums.device).double()
            if batch.second is None:
                scale = torch.as_tensor(batch.grad_scale, device=self.sums.device, dtype=torch.float64)
                self.sums[where, GRAD] = squares * scale**2
                self.sums[where, RATIO] = torch.nan
                continue
            rows = rows_of(self.optimizer, batch)
            self.sums[where, GRAD] = squares * rows[:, GRAD_SCALE].to(self.sums.device).double() ** 2
            self.sums[where, EPS_USED] = rows[:, EPS].to(self.sums.device).double()
            self.sums[where, RATIO] = batch.ratios(rows).to(self.sums.device).double()

    def measure_updates(self) -> None:
        """Before the step, with its final learning rate: parameters, and their update."""
        part = self.plan.zeros(2)
        with self.plan.errors:
            self._updates(part)
        part = add_up_shards(self.plan.owners, part)
        self.sums[:, PARAM], self.sums[:, UPDATE] = part[:, 0], part[:, 1]

    def _updates(self, part: Tensor) -> None:
        for batch in self._collect():
            where = self._index(batch)
            if batch.rule is not None and batch.names:
                part[where] = self._norms(batch).to(part.device).double()
                continue
            part[where, 0] = gradient_norms_unchecked(batch.params).to(part.device).double()
            for place, p in zip(batch.where, batch.owners, strict=True):
                flat = local(p).detach().reshape(-1)
                stride = max(1, math.ceil(flat.numel() / SAMPLE))
                self._sampled.append((place, p, stride, flat[::stride].clone()))

    def measure_samples(self) -> None:
        """After the step: the update of tensors whose update rule is unknown, from samples."""
        if not self._sampled:
            return
        part = self.plan.zeros(1)
        for place, p, stride, before in self._sampled:
            if before.numel():
                change = widen(local(p).detach().reshape(-1)[::stride]) - widen(before)
                part[place, 0] = change.square().mean().to(part.device) * local(p).numel()
        self._sampled = []
        part = add_up_shards(self.plan.owners, part)
        self.sums[:, UPDATE] += part[:, 0]

    def rms(self) -> Tensor:
        """RMS_t of every watched tensor; NaN where there is no gradient or no second moment."""
        rms = rms_from_ratios(self.sums[:, RATIO], self.plan.numels.to(self.sums.device))
        return torch.where(self.sums[:, PRESENT] > 0, rms, torch.nan)

    def _norms(self, batch: Batch) -> Tensor:
        """The sums of p² and of (change of p)² of the next step."""
        sums: Tensor | None = None
        if "clip_threshold" in batch.group:  # StableAdamW shortens its step by RMS_t
            sums = self.sums[self._index(batch), RATIO : RATIO + 1].to(batch.steps.device)
        elif batch.group.get("rms_scaled"):  # AdamW scales its step by the size of the weights
            sums = add_up_shards(batch.owners, gradient_norms_unchecked(batch.params).view(-1, 1))
        elif "max_unorm" in batch.group:  # LAMB and LARS scale their step by the size of the weights
            first: Tensor = self.optimizer.rows(batch, None)  # type: ignore[attr-defined]
            sums = add_up_shards(batch.owners, batch.norms(first))
        return batch.norms(rows_of(self.optimizer, batch, sums))

    def _index(self, batch: Batch) -> Tensor:
        return torch.tensor(batch.where, device=self.sums.device)


def _shares(g: Tensor, p: Tensor) -> bool:
    """Whether `g` is the memory of the gradient of `p`."""
    return p.grad is not None and g.untyped_storage()._cdata == local(p.grad).untyped_storage()._cdata


def to_record(plan: Plan, sums: Tensor) -> dict[str, dict[str, float]]:
    """Signals of every tensor with a gradient, from its sums on the host. NaN: not available."""
    rows, numels = sums.tolist(), plan.numels.clamp(min=1).tolist()
    found: dict[str, dict[str, float]] = {}
    for name, n, row in zip(plan.names, numels, rows, strict=True):
        if not row[PRESENT]:
            continue
        rms, grad, param, update = (root(row[i] / n) for i in (RATIO, GRAD, PARAM, UPDATE))
        eps = row[EPS_USED]
        ratio, eps_share = update / param if param else math.nan, eps / (grad + eps) if eps else math.nan
        found[name] = dict(zip(NAMES, (rms, grad, param, update, ratio, eps_share), strict=True))
    return found


def root(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


def clean(x: Any) -> Any:
    """Round floats to six digits for JSON; non-finite ones become None."""
    if isinstance(x, dict):
        return {key: clean(value) for key, value in x.items()}
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    return x
