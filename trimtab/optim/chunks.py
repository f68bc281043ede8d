"""The step in stretches, for what the fused kernel leaves to others: zeros to skip, careful rounding, no state at all.

Each stretch of a tensor is brought to float32, stepped there by the same kernel, and stored again. At most CHUNK values
are in float32 at a time, so nothing grows with the model.

Rounding a bfloat16 parameter to nearest loses every update smaller than 1/256 of it. Two ways not to lose them:
    stochastic   round up with the probability of the distance: right on average, no extra memory
    kahan        keep what was rounded away, as bfloat16, and add it next time: 2 more bytes per parameter
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.sharding import flat
from trimtab.ops.step import RULES, STEP, step_unchecked
from trimtab.optim.state import Storage, decode_flat, encode_flat

CHUNK = 1 << 18


def step_in_chunks(
    rule: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    moments: Sequence[str],
    storage: Storage,
    rows: Tensor,
    steps: Tensor,
    group: Mapping[str, Any],
) -> None:
    """What `fused_step` does, chunk by chunk. Without `moments` nothing is remembered."""
    signed = RULES[rule].signed
    books = storage.books(rows.device)
    numbers = steps.tolist() if group["rounding"] == "stochastic" else []
    length = max(storage.block, CHUNK // storage.block * storage.block)  # whole blocks
    for i, (p, g, state) in enumerate(zip(params, grads, states, strict=True)):
        p, g, row = p.view(-1), g.view(-1), rows[i : i + 1]
        kahan = group["rounding"] == "kahan" and p.dtype != torch.float32
        rest = flat(state["compensation"]).view(-1) if kahan else None
        for start in range(0, p.numel(), length):
            here = slice(start, start + length)
            wide = p[here].float()
            if rest is not None:
                wide += rest[here]
            kept = _load(state, moments, signed, storage, here) or [torch.zeros_like(wide) for _ in signed]
            before = [x.clone() for x in (wide, *kept)] if group["skip_zeros"] else []
            step_unchecked([wide], [g[here]], kept, [], row, *books, rule, storage.code, storage.block)
            for x, old in zip((wide, *kept), before, strict=False):
                x.copy_(torch.where(g[here] == 0, old, x))
            moved = row.isfinite().all()  # a skipped tensor stays as it is, to the last bit of its codes
            _store(kept, state, moments, signed, storage, here, moved, step=row[0, STEP].long())
            if rest is not None:
                rounded = wide.to(p.dtype)
                rest[here] = torch.where(moved, (wide - rounded).to(p.dtype), rest[here])
            elif group["rounding"] == "stochastic" and p.dtype != torch.float32:
                rounded = round_stochastically(wide, p.dtype, seed=_seed(numbers[i], i, start))
            else:
                rounded = wide.to(p.dtype)
            p[here] = torch.where(moved, rounded, p[here])


def round_stochastically(x: Tensor, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Round each value up or down with the probability of its distance: right on average, and the same for one seed."""
    if dtype != torch.bfloat16:
        raise ValueError(f"stochastic rounding needs bfloat16, got {dtype}; use rounding='kahan' or 'nearest'")
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, dtype=torch.int32, device=x.device)
    # bfloat16 is the upper half of float32: add noise to the lower half and cut it off.
    bits = x.view(torch.int32)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _seed(step: float, tensor: int, start: int) -> int:
    """The same on every replica, another at every step: copies of a model must not drift apart."""
    return hash((int(step), tensor, start)) & 0x7FFF_FFFF_FFFF_FFFF


def _load(
    state: Mapping[str, Any], moments: Sequence[str], signed: Sequence[bool], storage: Storage, here: slice
) -> list[Tensor]:
    """Copies in float32; none where nothing is kept."""
    if storage.bits == 32 or not moments:
        return [flat(state[name]).view(-1)[here].clone() for name in moments]
    codes = [flat(state[f"{name}_codes"]).view(-1)[here] for name in moments]
    return decode_flat(codes, [state[f"{name}_absmax"][_blocks(here, storage)] for name in moments], signed, storage)


def _store(
    values: Sequence[Tensor],
    state: Mapping[str, Any],
    moments: Sequence[str],
    signed: Sequence[bool],
    storage: Storage,
    here: slice,
    moved: Tensor,
    *,
    step: Tensor,
) -> None:
    if storage.bits == 32 or not moments:
        for name, x in zip(moments, values, strict=False):
            flat(state[name]).view(-1)[here] = x  # unchanged where the tensor was skipped
        return
    stored = encode_flat(values, signed, storage, step=step)
    for name, (codes, absmax) in zip(moments, stored, strict=True):
        old_codes = flat(state[f"{name}_codes"]).view(-1)[here]
        old_absmax = state[f"{name}_absmax"][_blocks(here, storage)]
        old_codes.copy_(torch.where(moved, codes, old_codes))
        old_absmax.copy_(torch.where(moved, absmax, old_absmax))


def _blocks(here: slice, storage: Storage) -> slice:
    return slice(here.start // storage.block, -(-here.stop // storage.block))
