"""Totals over all tensors: norms of v, √v, m and the weights, and the error of the update from 8-bit states.

    var_l1 = Σ √v      var_max = max √v      var_l2 = √ Σ v            √v: the gradient variance of Li et al. 2022
    square_l1 = Σ v, square_l2, square_max       momentum_l1, _l2, _max       weight_l1, _l2, _max
    state_error = ‖u₈ - u‖ / ‖u‖                 u = m / (√v + eps) from new moments, u₈ after storing them in 8 bits

Measured after the update, over all elements of all watched tensors, in chunks that fit in the CPU cache.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trimtab.ops.sharding import add_up_shards, is_sharded, widen
from trimtab.ops.step.rules import BETA1, BETA2, DEBIAS, EPS, GAIN1, GAIN2, GRAD_SCALE
from trimtab.ops.step.storage import Batch, decode_flat, encode_flat
from trimtab.watch.signals import Plan, root
from trimtab.watch.surface import rows_of

CHUNK = 1 << 17
SMALL = 1 << 14  # values of a tensor that is put together with others
SAMPLED_BLOCKS = 16  # per tensor and measurement; the next measurement uses the next blocks
SUMS = ("weight_l1", "weight_l2", "momentum_l1", "momentum_l2", "square_l1", "square_l2", "var_l1")
MAXIMA = ("weight_max", "momentum_max", "square_max")


@torch.no_grad()
def measure_totals(plan: Plan) -> Tensor:
    """A row of ten sums and maxima (`SUMS`, `MAXIMA`), on the device, of whole tensors."""
    sums, maxima = plan.zeros(len(SUMS)), plan.zeros(len(MAXIMA))
    with plan.errors:
        for batch in plan.collect():
            together = _small(batch)
            if together:
                row = _size(*_joined(batch, together)).to(sums.device).double()
                sums[batch.where[together[0]]], maxima[batch.where[together[0]]] = row[: len(SUMS)], row[len(SUMS) :]
            for i, place in enumerate(batch.where):
                parts = [] if i in together else [_size(*chunk) for chunk in _chunks(batch, i)]
                if parts:
                    found = torch.stack(parts).to(sums.device).double()
                    sums[place] = found[:, : len(SUMS)].sum(0)
                    maxima[place] = found[:, len(SUMS) :].amax(0)
    sums = add_up_shards(plan.owners, sums).sum(0)
    return torch.cat([sums, add_up_shards(plan.owners, maxima, largest=True).amax(0)])


def name_totals(row: list[float]) -> dict[str, float]:
    """The twelve scalars of Li et al. 2022 from that row, without moments that the optimizer does not keep."""
    found = dict(zip((*SUMS, *MAXIMA), row, strict=True))
    totals = {name: root(x) if name.endswith("_l2") else x for name, x in found.items()}
    totals |= {"var_l2": root(found["square_l1"]), "var_max": root(found["square_max"])}
    return {name: x for name, x in totals.items() if totals[f"{name.split('_')[0]}_l1"] != 0}


def summarise(
    tensors: Mapping[str, Mapping[str, float]],
    layers: dict[str, dict[str, float]],
    plan: Plan,
    state: Sequence[list[float]],
) -> dict[str, float]:
    """All numbers of a step that belong to no single tensor or layer. Moves those of the output out of `layers`."""
    totals, numels = layers.pop("", {}), dict(zip(plan.names, plan.numels.tolist(), strict=True))
    for kind in ("grad", "param", "update") if tensors else ():
        totals[f"{kind}_norm"] = root(sum(x[f"{kind}_rms"] ** 2 * numels[name] for name, x in tensors.items()))
    if len(state) == 2:
        (error, square), sizes = state
        totals |= name_totals(sizes)
        if square > 0:
            totals["state_error"] = math.sqrt(error / square)
    errors = [x["input_error"] for x in layers.values() if "input_error" in x]
    if errors:
        totals["int8_error"] = math.fsum(errors) / len(errors)
    return totals


def _size(p: Tensor, m: Tensor | None, v: Tensor | None) -> Tensor:
    zero = p.new_zeros((), dtype=torch.float32)
    p = p.float()
    absolute = p.abs()
    weight = [absolute.sum(), p.dot(p), absolute.amax()]
    momentum, square, root = [zero] * 3, [zero] * 3, zero
    if m is not None:
        absolute = m.abs()
        momentum = [absolute.sum(), m.dot(m), absolute.amax()]
    if v is not None:
        square, root = [v.sum(), v.dot(v), v.amax()], v.sqrt().sum()
    return torch.stack([*weight[:2], *momentum[:2], *square[:2], root, weight[2], momentum[2], square[2]])


def _small(batch: Batch) -> list[int]:
    """Whole tensors with few values in 32 bits: together they take as long as one of them."""
    if batch.storage.bits != 32:
        return []
    few = [i for i, p in enumerate(batch.params) if 0 < p.numel() <= SMALL and not is_sharded(batch.owners[i])]
    return few if len(few) > 1 else []


def _joined(batch: Batch, places: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Parameter, first and second moment of several tensors, one after the other."""

    def join(name: str | None) -> Tensor | None:
        named = name in batch.names
        return torch.cat([batch.kept[i][str(name)].view(-1) for i in places]) if named else None

    return torch.cat([batch.params[i].view(-1).float() for i in places]), join("exp_avg"), join(batch.second)


def _chunks(batch: Batch, i: int) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Parameter, first and second moment of one tensor in float32, in chunks of whole blocks."""
    block, p = batch.block, batch.params[i].view(-1)
    length = max(1, CHUNK // block) * block
    for start in range(0, p.numel(), length):
        stop = min(start + length, p.numel())
        moments = _decode(batch, i, start, stop)
        yield p[start:stop], moments.get("exp_avg"), moments.get(batch.second or "")


def _decode(batch: Batch, i: int, start: int, stop: int) -> dict[str, Tensor]:
    kept, block = batch.kept[i], batch.block
    if batch.storage.bits == 32:
        return {name: kept[name].view(-1)[start:stop] for name in batch.names}
    codes = [kept[f"{name}_codes"].view(-1)[start:stop] for name in batch.names]
    absmax = [kept[f"{name}_absmax"][start // block : -(-stop // block)] for name in batch.names]
    decoded = decode_flat(codes, absmax, batch.kinds, batch.storage)
    return dict(zip(batch.names, decoded, strict=True))


@torch.no_grad()
def measure_state_error(plan: Plan, count: int) -> Tensor:
    """Before a step: Σ |u₈ - u|² and Σ u² over a few blocks of every 8-bit tensor, [2]; zeros if there is none.

    `count` is the number of earlier measurements: it selects the blocks.
    """
    sums = plan.zeros(2)
    with plan.errors:
        for batch in plan.collect():
            if batch.storage.bits == 32 or batch.second is None or "exp_avg" not in batch.names:
                continue
            rows = rows_of(plan.optimizer, batch)
            for i, place in enumerate(batch.where):
                length, numel = SAMPLED_BLOCKS * batch.block, batch.params[i].numel()
                start = count % max(1, -(-numel // length)) * length
                if numel:
                    sums[place] = _state_error(batch, i, rows[i], start, min(start + length, numel)).to(sums.device)
    return add_up_shards(plan.owners, sums).sum(0)


def _state_error(batch: Batch, i: int, row: Tensor, start: int, stop: int) -> Tensor:
    old = _decode(batch, i, start, stop)
    g = batch.grads[i].view(-1)[start:stop].float() * row[GRAD_SCALE]
    m = row[BETA1] * old["exp_avg"] + row[GAIN1] * g
    v = row[BETA2] * old[str(batch.second)] + row[GAIN2] * g.square()
    stored = encode_flat([m, v], "mv", batch.storage, step=1)
    m8, v8 = decode_flat([c for c, _ in stored], [a for _, a in stored], "mv", batch.storage)
    u, u8 = (a / (b.sqrt() * row[DEBIAS] + row[EPS]) for a, b in ((m, v), (m8, v8)))
    return torch.stack([widen(u8 - u).square().sum(), widen(u).square().sum()])
