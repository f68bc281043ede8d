"""The fused optimizer step: decode the state, update in float32, write the parameter, encode. One pass over memory.

    codes, absmax --decode--> m, v --rule(g)--> p, m, v --encode--> codes, absmax       (block by block, in cache)

One implementation serves every rule (rules.py), and 8-bit and 32-bit state. In every rule:
- The parameter moves by the fresh float32 moments, not by the requantized ones.
- A positive second moment is never stored as zero: with v = 0 and m > 0 the update would explode.
- A tensor whose row holds a non-finite number is skipped: parameters and state do not change in any bit. A caller skips
  the non-finite gradient of one tensor in this way (`gradient_norms` finds it).
- Otherwise a non-finite gradient spreads as in PyTorch: its element of the parameter becomes NaN, and so does its block
  of 8-bit state.

Kernels: fused.cpp (CPU), fused_triton.py (GPU).
"""
# mypy: disable-error-code="no-any-return"
# (the ops of torch.library are untyped)

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from trimtab.ops import backends
from trimtab.ops.blockwise import count_blocks, dequantize_reference, quantize_reference
from trimtab.ops.checks import FLOATS, check_block, check_codebook, check_disjoint, check_same_device, check_tensor
from trimtab.ops.codebook import load_codebook
from trimtab.ops.native import table
from trimtab.ops.sharding import widen
from trimtab.ops.step.quadratic import decode_moments, encode_moments
from trimtab.ops.step.rules import BETA2, COUPLED, DECAY, EPS, GAIN2, GRAD_SCALE, LR, RULES, SCALARS, STEP, Moments, Row
from trimtab.ops.step.split import join, split

Code = Literal["codebook", "quadratic"]
Tensors = Sequence[Tensor]


class Stored(TypedDict, total=False):
    """How the state is stored."""

    absmax: Sequence[Tensors] | None  # of 8-bit codes, one per block; None: the states are float32
    block: int  # 256
    code: Code  # "codebook"; "quadratic" is that of quadratic.py
    signed: Tensor | None  # the codebook of first moments; by default that of load_codebook
    unsigned: Tensor | None  # of second moments
    extras: Tensors | None  # eight more bits of each bfloat16 parameter, int8 (split.py); empty for float32


class Arguments(NamedTuple):
    """The arguments of the ops. `states` and `absmax` are flat: all of the first state, then the next."""

    params: Tensors
    grads: Tensors
    states: Tensors
    absmax: Tensors  # none: the states are float32
    scalars: Tensor
    signed: Tensor
    unsigned: Tensor
    rule: str
    code: str
    block: int
    extras: Tensors = ()  # none, or one per parameter


def fused_step(
    rule: str, params: Tensors, grads: Tensors, states: Sequence[Tensors], scalars: Tensor, **stored: Unpack[Stored]
) -> None:
    """Update every parameter and its state in place, in one call.

    `states` and `absmax` hold one list per state of the rule (see `RULES`), each with one tensor per parameter:
    uint8 codes with one absmax per block, or, when `absmax` is None, float32 moments. `scalars` is [tensors, 15].
    """
    arguments = _check(rule, params, grads, states, scalars, **stored)
    if params:
        _step(*arguments)


def step_norms(
    rule: str, params: Tensors, grads: Tensors, states: Sequence[Tensors], scalars: Tensor, **stored: Unpack[Stored]
) -> Tensor:
    """What a `fused_step` with these rows would do, without doing it: the first pass of LAMB and LARS.

    Returns float32 [tensors, 2]: the sum of p^2 and the sum of (change of p)^2. Sums, so that shards can be added up.
    """
    arguments = _check(rule, params, grads, states, scalars, **stored, writes=False)
    return norms_unchecked(*arguments) if params else scalars.new_zeros(0, 2)


def gradient_ratios(
    grads: Tensors,
    second_moments: Tensors,
    scalars: Tensor,
    *,
    absmax: Tensors | None = None,
    block: int = 256,
    code: Code = "codebook",
    unsigned: Tensor | None = None,
) -> Tensor:
    """The sum of g^2 / max(v, eps^2) of each tensor, float32 [tensors]: the first pass of StableAdamW.

    v is the one that a `fused_step` with these rows would make. Sums, so that shards can be added up.
    """
    stored: Stored = {"block": block, "code": code, "unsigned": unsigned}
    stored["absmax"] = None if absmax is None else [absmax]
    arguments = _check("rms", grads, grads, [second_moments], scalars, **stored, writes=False)
    return ratios_unchecked(*arguments) if grads else scalars.new_zeros(0)


def gradient_norms(grads: Tensors) -> Tensor:
    """The sum of squares of each gradient, float32 [tensors], in one pass. Not finite where the gradient is not."""
    grads = list(grads)
    for i, g in enumerate(grads):
        check_tensor(f"grads[{i}]", g, dtypes=FLOATS)
    if not grads:
        return torch.zeros(0, dtype=torch.float32)
    check_same_device(**{f"grads[{i}]": g for i, g in enumerate(grads)})
    return gradient_norms_unchecked(grads)


# --- Reference


def step_reference(*arguments: Any) -> None:
    """The definition, tensor by tensor."""
    a = Arguments(*arguments)
    rule = RULES[a.rule]
    keep = a.scalars.isfinite().all(dim=1).tolist()
    for i, row in enumerate(a.scalars.tolist()):
        if not keep[i]:
            continue
        states, scales = a.states[i :: len(a.params)], a.absmax[i :: len(a.params)]
        p, update, moments = _advance(a, i, row)
        p = row[DECAY] * p - row[LR] * update
        if a.extras and a.extras[i].numel():
            p, extra = split(p, step=int(row[STEP]))
            a.extras[i].copy_(extra)
        a.params[i].copy_(p)
        if not scales:
            stored: list[tuple[Tensor, ...]] = [(moment,) for moment in moments]
        elif a.code == "quadratic":
            stored = list(encode_moments(moments, rule.states, a.block, step=int(row[STEP])))
        else:
            stored = [_encode(x, s, a) for x, s in zip(moments, rule.signed, strict=True)]
        for k, values in enumerate(stored):
            for target, value in zip((states[k], *scales[k : k + 1]), values, strict=True):
                target.copy_(value)


def norms_reference(*arguments: Any) -> Tensor:
    """The definition of `step_norms`, with sums in float64."""
    a = Arguments(*arguments)
    result = a.scalars.new_zeros(len(a.params), 2)
    for i, row in enumerate(a.scalars.tolist()):
        p, update, _ = _advance(a, i, row)
        change = (row[DECAY] - 1.0) * p - row[LR] * update
        result[i, 0] = widen(p).square().sum()
        result[i, 1] = widen(change).square().sum()
    return result


def ratios_reference(*arguments: Any) -> Tensor:
    """The definition of `gradient_ratios`, with sums in float64. The parameters are not used."""
    a = Arguments(*arguments)
    result = a.scalars.new_zeros(len(a.grads))
    for i, row in enumerate(a.scalars.tolist()):
        g, (v,) = a.grads[i].float() * row[GRAD_SCALE], _decode(a, i)
        v = row[BETA2] * v + row[GAIN2] * (g * g)
        result[i] = widen(g * g / v.clamp(min=torch.tensor(row[EPS], dtype=torch.float32).square())).sum()
    return result


def gradient_norms_reference(grads: Tensors) -> Tensor:
    return torch.stack([widen(g).square().sum().float() for g in grads])


def _advance(a: Arguments, i: int, row: Row) -> tuple[Tensor, Tensor, Moments]:
    """Decode and apply the rule: the old parameter, the update and the new moments, all in float32."""
    p, g = a.params[i].float(), a.grads[i].float() * row[GRAD_SCALE]
    if a.extras and a.extras[i].numel():
        p = join(a.params[i], a.extras[i])
    if row[COUPLED] != 0:
        g = g + row[COUPLED] * p
    update, moments = RULES[a.rule].update(p, g, *_decode(a, i), row)
    return p, update, moments


def _decode(a: Arguments, i: int) -> Tensors:
    states, scales, rule = a.states[i :: len(a.params)], a.absmax[i :: len(a.params)], RULES[a.rule]
    if not scales:
        return states
    if a.code == "quadratic":
        return decode_moments(states, scales, rule.states, a.block)
    books = [a.signed if s else a.unsigned for s in rule.signed]
    stored = zip(states, scales, books, strict=True)
    return [dequantize_reference(c, scale, book, a.block, torch.float32) for c, scale, book in stored]


def _encode(moment: Tensor, signed: bool, a: Arguments) -> tuple[Tensor, Tensor]:
    codes, scale = quantize_reference(moment, a.signed if signed else a.unsigned, a.block)
    if not signed:
        # Where the block is stored as NaN, its codes stay as the quantizer wrote them.
        broken = scale.isnan().repeat_interleave(a.block)[: moment.numel()].view(moment.shape)
        codes = torch.where((moment > 0) & (codes == 0) & ~broken, 1, codes)
    return codes, scale


# --- Checks and registration


def _check(
    rule: str,
    params: Tensors,
    grads: Tensors,
    states: Sequence[Tensors],
    scalars: Tensor,
    *,
    absmax: Sequence[Tensors] | None = None,
    block: int = 256,
    code: str = "codebook",
    signed: Tensor | None = None,
    unsigned: Tensor | None = None,
    extras: Tensors | None = None,
    writes: bool = True,
) -> Arguments:
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; choose one of {', '.join(RULES)}")
    if code not in get_args(Code):
        raise ValueError(f"unknown code {code!r}; choose one of {', '.join(get_args(Code))}")
    if code == "quadratic" and (signed is not None or unsigned is not None):
        raise ValueError("the quadratic code uses no codebook; leave signed and unsigned out")
    check_block(block)
    count, wanted = len(params), len(RULES[rule].states)
    lists = {"states": states} if absmax is None else {"states": states, "absmax": absmax}
    for name, value in lists.items():
        if len(value) != wanted or any(len(tensors) != count for tensors in value):
            got = [len(tensors) for tensors in value]
            raise ValueError(
                f"rule {rule!r} needs {name} as {wanted} lists of {count} tensors, got lists of lengths {got}"
            )
    if len(grads) != count:
        raise ValueError(f"got {count} params but {len(grads)} grads; leave out parameters without a gradient")
    why = "a row of trimtab.ops.step.SCALARS per tensor"
    check_tensor("scalars", scalars, dtypes=(torch.float32,), shape=(count, len(SCALARS)), because=why)
    device = params[0].device if count else torch.device("cpu")
    custom = unsigned is not None
    signed = load_codebook(signed=True).to(device) if signed is None else signed
    unsigned = load_codebook(signed=False).to(device) if unsigned is None else unsigned
    check_codebook(signed)
    check_codebook(unsigned)
    if custom and absmax is not None and not unsigned[1] > 0:
        raise ValueError(
            "the unsigned codebook must hold one zero at most, or a positive second moment could become zero"
        )
    stored = (torch.float32 if absmax is None else torch.uint8,)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        check_tensor(f"params[{i}]", p, dtypes=FLOATS)
        check_tensor(f"grads[{i}]", g, dtypes=FLOATS, shape=p.shape, because="that of its parameter")
        for k in range(wanted):
            name = f"[{k}][{i}]"
            check_tensor("states" + name, states[k][i], dtypes=stored, shape=p.shape, because="that of its parameter")
            if absmax is not None:
                blocks, why = (count_blocks(p.numel(), block),), f"one per block of {block}"
                check_tensor("absmax" + name, absmax[k][i], dtypes=(torch.float32,), shape=blocks, because=why)
    for i, (p, extra) in enumerate(zip(params, extras or (), strict=extras is not None)):
        kept = p.dtype == torch.bfloat16
        if kept or extra.numel():
            check_tensor(f"extras[{i}]", extra, dtypes=(torch.int8,), shape=p.shape, because="that of its parameter")
            check_tensor(f"params[{i}]", p, dtypes=(torch.bfloat16,))
    flat_states = [s for tensors in states for s in tensors]
    flat_absmax = [a for tensors in absmax or () for a in tensors]
    more = list(extras or ())
    named = {"params": params, "grads": grads, "states": flat_states, "absmax": flat_absmax, "extras": more}
    tensors = {f"{name}[{i}]": x for name, group in named.items() for i, x in enumerate(group)}
    if count:
        check_same_device(**tensors, scalars=scalars, signed=signed, unsigned=unsigned)
    if writes:
        check_disjoint(**tensors)
    block = min(block, max([1, *(p.numel() for p in params)]))  # a longer block is the same block
    books = (signed, unsigned)
    return Arguments(list(params), list(grads), flat_states, flat_absmax, scalars, *books, rule, code, block, more)


# The ops without checks: checking hundreds of tensors takes longer than updating them, and an optimizer makes its own
# states. Mutated tensors are marked in the schema.
_REST = "Tensor scalars, Tensor signed, Tensor unsigned, str rule, str code, SymInt block"
_READS = f"(Tensor[] params, Tensor[] grads, Tensor[] states, Tensor[] absmax, {_REST}, Tensor[] extras) -> Tensor"
_WRITES = (
    f"(Tensor(a0!)[] params, Tensor[] grads, Tensor(a2!)[] states, Tensor(a3!)[] absmax, {_REST}, "
    "Tensor(a10!)[] extras) -> ()"
)


def _define(name: str, function: Any, schema: str, mutates: tuple[str, ...] = ()) -> Any:
    return torch.library.custom_op(f"trimtab::{name}", function, mutates_args=mutates, schema=schema)


_step = _define("fused_step", step_reference, _WRITES, ("params", "states", "absmax", "extras"))
norms_unchecked = _define("step_norms", norms_reference, _READS)
ratios_unchecked = _define("gradient_ratios", ratios_reference, _READS)
gradient_norms_unchecked = _define("gradient_norms", gradient_norms_reference, "(Tensor[] grads) -> Tensor")
norms_unchecked.register_fake(lambda *a: a[4].new_empty(len(a[0]), 2))
ratios_unchecked.register_fake(lambda *a: a[4].new_empty(len(a[0])))
gradient_norms_unchecked.register_fake(lambda grads: grads[0].new_empty(len(grads), dtype=torch.float32))


def step_unchecked(params: Tensors, *arguments: Any) -> None:
    """The op. It increments the parameters' versions in one call; one call per tensor takes as long as the step.

    For many small tensors PyTorch's dispatcher takes longer than the kernel, so plain tensors on a CPU do not use it.
    """
    if backends.is_plain(params[0]):
        step_native(params, *arguments)
    else:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            _step(params, *arguments)
    torch.autograd.graph.increment_version(params)


# --- Kernels


def step_native(*arguments: Any) -> None:
    _call_native("update", Arguments(*arguments))


def norms_native(*arguments: Any) -> Tensor:
    return torch.tensor(_call_native("norms", Arguments(*arguments)), dtype=torch.float32).view(-1, 2)


def ratios_native(*arguments: Any) -> Tensor:
    return torch.tensor(_call_native("ratios", Arguments(*arguments))[::2], dtype=torch.float32)


def gradient_norms_native(grads: Tensors) -> Tensor:
    assert backends.native is not None
    addresses, counts = [g.data_ptr() for g in grads], [g.numel() for g in grads]
    dtypes = [backends.DTYPE_CODES[g.dtype] for g in grads]
    sums = backends.native.gradient_norms(addresses, counts, dtypes, torch.get_num_threads())
    return torch.tensor(sums, dtype=torch.float32)


_RULE_CODES = {name: code for code, name in enumerate(table.RULES)}


def _call_native(what: str, a: Arguments) -> list[float]:
    assert backends.native is not None
    addresses, codes = ([x.data_ptr() for x in tensors] for tensors in a[:4]), backends.DTYPE_CODES
    counts = [p.numel() for p in a.params]
    dtypes = ([codes[x.dtype] for x in tensors] for tensors in a[:2])
    extras = [x.data_ptr() for x in a.extras]  # 0 of an empty one
    books = (a.signed.data_ptr(), a.signed.numel(), a.unsigned.data_ptr(), a.unsigned.numel())
    rest = (a.code == "quadratic", table.PASSES.index(what), torch.get_num_threads())
    rule, scalars = _RULE_CODES[a.rule], a.scalars.data_ptr()
    return backends.native.step(rule, *addresses, counts, *dtypes, extras, scalars, a.block, *books, *rest)


if backends.native is not None:
    _step.register_kernel("cpu")(step_native)
    norms_unchecked.register_kernel("cpu")(norms_native)
    ratios_unchecked.register_kernel("cpu")(ratios_native)
    gradient_norms_unchecked.register_kernel("cpu")(gradient_norms_native)

if backends.triton_missing is None:
    from trimtab.ops.step import fused_triton

    _step.register_kernel(backends.triton_device)(fused_triton.step)
    norms_unchecked.register_kernel(backends.triton_device)(fused_triton.norms)
    ratios_unchecked.register_kernel(backends.triton_device)(fused_triton.ratios)
    gradient_norms_unchecked.register_kernel(backends.triton_device)(fused_triton.gradient_norms)
