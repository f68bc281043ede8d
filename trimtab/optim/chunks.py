"""The step chunk by chunk, for options that the fused kernel does not have: skip_zeros, rounding, no state at all.

Each chunk of a tensor is converted to float32, stepped by the same kernel, and stored again. At most CHUNK values are
in float32 at a time, so the extra memory does not grow with the model.

Rounding a bfloat16 parameter to nearest loses every update smaller than 1/256 of it. Three ways to keep them:
    stochastic   round up with a probability equal to the distance: exact on average, no extra memory
    kahan        store the rounding error as bfloat16 and add it at the next step: 2 more bytes per parameter
    split        store eight more bits of the weight: 1 more byte per parameter (trimtab/ops/step/split.py). On CPUs the
                 fused kernel has it
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.sharding import flat
from trimtab.ops.step import RULES, step_unchecked
from trimtab.ops.step.rules import STEP
from trimtab.ops.step.split import join, split
from trimtab.ops.step.storage import Batch, Storage, decode_flat, encode_flat

CHUNK = 1 << 18
_LOWER = 0xFFFF_FFFF


def step_in_chunks(batch: Batch, rows: Tensor) -> None:
    """The same as `fused_step`, chunk by chunk. A batch without moments keeps no state."""
    group, storage, rule = batch.group, batch.storage, str(batch.rule)
    kinds, books = RULES[rule].states, storage.books(rows.device)
    length = max(storage.block, CHUNK // storage.block * storage.block)  # whole blocks
    for i, (p, g, state) in enumerate(zip(batch.params, batch.grads, batch.kept, strict=True)):
        p, g, row, first = p.view(-1), g.view(-1), rows[i : i + 1], batch.starts[i] if batch.starts else 0
        rest = extra = None
        if group["rounding"] == "split" and p.dtype == torch.bfloat16:
            extra = flat(state["extra_bits"]).view(-1)
        if group["rounding"] == "kahan" and p.dtype != torch.float32:
            rest = flat(state["compensation"]).view(-1)
        for start in range(0, p.numel(), length):
            here = slice(start, start + length)
            wide = p[here].float() if extra is None else join(p[here], extra[here])
            if rest is not None:
                wide += rest[here]
            moments = _load(state, batch, here) or [torch.zeros_like(wide) for _ in kinds]
            before = [x.clone() for x in (wide, *moments)] if group["skip_zeros"] else []
            step_unchecked([wide], [g[here]], moments, [], row, *books, rule, storage.code, storage.block, [])
            for x, old in zip((wide, *moments), before, strict=False):
                x.copy_(torch.where(g[here] == 0, old, x))
            moved = row.isfinite().all()  # a skipped tensor does not change, nor do its codes
            if batch.names:
                _store(moments, state, batch, here, moved, step=row[0, STEP].long())
            if extra is not None:
                rounded, new = split(wide, step=row[0, STEP].long(), start=first + start)
                extra[here] = torch.where(moved, new, extra[here])
            elif rest is not None:
                rounded = wide.to(p.dtype)
                rest[here] = torch.where(moved, (wide - rounded).to(p.dtype), rest[here])
            elif group["rounding"] == "stochastic" and p.dtype != torch.float32:
                # The same on every replica, so that replicas stay equal; different at every step.
                seed = (row[0, STEP].long() << 20) + batch.where[i]
                rounded = round_stochastically(wide, p.dtype, seed=seed, start=first + start)
            else:
                rounded = wide.to(p.dtype)
            p[here] = torch.where(moved, rounded, p[here])


def round_stochastically(x: Tensor, dtype: torch.dtype, *, seed: Tensor, start: int = 0) -> Tensor:
    """Round each value up or down, with probabilities by distance: exact on average, and reproducible by seed.

    `start` is the index of the first value in the whole tensor.
    """
    if dtype != torch.bfloat16:
        raise ValueError(f"stochastic rounding needs bfloat16, got {dtype}; use rounding='kahan' or 'nearest'")
    places = torch.arange(start, start + x.numel(), device=x.device).view(x.shape)
    noise = _hash(_hash(places) + _hash(seed)) >> 16
    # bfloat16 is the upper half of float32: add noise to the lower half and cut it off.
    bits = x.view(torch.int32)
    rounded = ((bits + noise.int()) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _hash(x: Tensor) -> Tensor:
    """The lower 32 bits of an int64, mixed. (The constants are Chris Wellons' lowbias32.)"""
    x = x & _LOWER
    x = ((x ^ (x >> 16)) * 0x7FEB_352D) & _LOWER
    x = ((x ^ (x >> 15)) * 0x846C_A68B) & _LOWER
    return x ^ (x >> 16)


def _load(state: Mapping[str, Any], batch: Batch, here: slice) -> list[Tensor]:
    """Copies in float32; none where nothing is kept."""
    if batch.storage.bits == 32 or not batch.names:
        return [flat(state[name]).view(-1)[here].clone() for name in batch.names]
    codes, absmax = zip(*(_stored(state, name, batch.storage, here) for name in batch.names), strict=True)
    return decode_flat(codes, absmax, RULES[str(batch.rule)].states, batch.storage)


def _store(
    values: Sequence[Tensor], state: Mapping[str, Any], batch: Batch, here: slice, moved: Tensor, *, step: Tensor
) -> None:
    if batch.storage.bits == 32:
        for name, x in zip(batch.names, values, strict=True):
            flat(state[name]).view(-1)[here] = x  # not changed where the tensor was skipped
        return
    stored = encode_flat(values, RULES[str(batch.rule)].states, batch.storage, step=step)
    for name, new in zip(batch.names, stored, strict=True):
        for old, value in zip(_stored(state, name, batch.storage, here), new, strict=True):
            old.copy_(torch.where(moved, value, old))


def _stored(state: Mapping[str, Any], name: str, storage: Storage, here: slice) -> tuple[Tensor, Tensor]:
    """Views of the codes and of the absmax of a chunk."""
    blocks = slice(here.start // storage.block, -(-here.stop // storage.block))
    return flat(state[f"{name}_codes"]).view(-1)[here], state[f"{name}_absmax"][blocks]
