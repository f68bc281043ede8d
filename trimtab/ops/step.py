"""The fused optimizer step: decode the state, update in float32, write the parameter, encode. One pass over memory.

    codes, absmax --decode--> m, v --rule(g)--> p, m, v --encode--> codes, absmax       (block by block, in cache)

One skeleton serves every rule, and 8-bit and 32-bit state alike. Everything that depends on the hyper-parameters or
on the step number is worked out beforehand, in float64, as one row of `SCALARS` per tensor (step_rules.py): so the
kernels hold only arithmetic, and every twin does the same.

What holds in every rule:
- The parameter moves by the fresh float32 moments, not by the requantized ones.
- A positive second moment is never stored as zero: a vanished v under a surviving m would make the update explode.
- A tensor whose row holds a non-finite number is skipped: parameters and state stay as they are, bit for bit. That
  is how a caller drops one tensor's bad gradient (`gradient_norms` finds it).
- Otherwise a non-finite gradient spreads as in PyTorch: its element of the parameter becomes NaN, and so does its
  block of 8-bit state. Nothing hides it.

Twins: step.cpp (CPU), step_triton.py (GPU).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trimtab.ops import backends
from trimtab.ops.blockwise import count_blocks, dequantize_reference, quantize_reference
from trimtab.ops.checks import (
    FLOATS,
    check_block,
    check_codebook,
    check_disjoint,
    check_same_device,
    check_shape,
    check_tensor,
)
from trimtab.ops.codebook import load_codebook
from trimtab.ops.quadratic import decode_moments, encode_moments, exact_root

SCALARS = (
    "grad_scale",  # g <- grad_scale * gradient
    "coupled",  # g <- g + coupled * p          (weight decay through the gradient)
    "decay",  # p <- decay * p                (decoupled weight decay)
    "lr",  # p <- p - lr * update
    "beta1",  # m <- beta1 * m + gain1 * g
    "gain1",
    "beta2",  # v <- beta2 * v + gain2 * g^2
    "gain2",
    "beta3",  # slow <- beta3 * slow + gain3 * g
    "gain3",
    "debias",  # multiplies sqrt(v)
    "eps",
    "mix_m",  # how much of m, and of g (or the slow average), the update is made of
    "mix_g",
    "step",  # the number of this step: the quadratic code dithers with it
)
GRAD_SCALE, COUPLED, DECAY, LR, BETA1, GAIN1, BETA2, GAIN2, BETA3, GAIN3, DEBIAS, EPS, MIX_M, MIX_G, STEP = range(
    len(SCALARS)
)

Code = Literal["codebook", "quadratic"]
Row = list[float]
Moments = tuple[Tensor, ...]


def fused_step(
    rule: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    scalars: Tensor,
    *,
    absmax: Sequence[Sequence[Tensor]] | None = None,
    block: int = 256,
    code: Code = "codebook",
    signed: Tensor | None = None,
    unsigned: Tensor | None = None,
) -> None:
    """Update every parameter and its state in place, in one call.

    `states` and `absmax` hold one list per state of the rule (see `RULES`), each with one tensor per parameter:
    uint8 codes with one absmax per block, or, when `absmax` is None, float32 moments. `scalars` is [tensors, 15].
    Codes are those of a codebook, or quadratic ones (quadratic.py).
    """
    arguments = _prepare(rule, params, grads, states, scalars, absmax, block, code, signed, unsigned)
    if params:
        _step(*arguments)


def step_norms(
    rule: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    scalars: Tensor,
    *,
    absmax: Sequence[Sequence[Tensor]] | None = None,
    block: int = 256,
    code: Code = "codebook",
    signed: Tensor | None = None,
    unsigned: Tensor | None = None,
) -> Tensor:
    """What a `fused_step` with these rows would do, without doing it: the first pass of LAMB and LARS.

    Returns float32 [tensors, 2]: the sum of p^2 and the sum of (change of p)^2. Sums, so that shards can be added up.
    """
    arguments = _prepare(rule, params, grads, states, scalars, absmax, block, code, signed, unsigned, writes=False)
    return norms_unchecked(*arguments) if params else scalars.new_zeros(0, 2)


def gradient_ratios(
    grads: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    scalars: Tensor,
    *,
    absmax: Sequence[Tensor] | None = None,
    block: int = 256,
    code: Code = "codebook",
    unsigned: Tensor | None = None,
) -> Tensor:
    """The sum of g^2 / max(v, eps^2) of each tensor, float32 [tensors]: the first pass of StableAdamW.

    v is the one that a `fused_step` with these rows would make. Sums, so that shards can be added up.
    """
    stored = None if absmax is None else [absmax]
    arguments = _prepare(
        "rms", grads, grads, [second_moments], scalars, stored, block, code, None, unsigned, writes=False
    )
    _, grads, states, scales, scalars, _, book, _, _, block = arguments
    return ratios_unchecked(grads, states, scales, scalars, book, code, block) if grads else scalars.new_zeros(0)


def gradient_norms(grads: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each gradient, float32 [tensors], in one pass. Not finite where the gradient is not."""
    grads = list(grads)
    for i, g in enumerate(grads):
        check_tensor(f"grads[{i}]", g, dtypes=FLOATS)
    if not grads:
        return torch.zeros(0, dtype=torch.float32)
    check_same_device(**{f"grads[{i}]": g for i, g in enumerate(grads)})
    return gradient_norms_unchecked(grads)


# --- The rules, as equations on one float32 tensor. `r` is its row of SCALARS. Every kernel does these operations in
# this order, each rounded once, so that the codes agree exactly.


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    m = r[BETA1] * m + r[GAIN1] * g
    v = r[BETA2] * v + r[GAIN2] * (g * g)
    return m / (exact_root(v) * r[DEBIAS] + r[EPS]), (m, v)


def _momentum(p: Tensor, g: Tensor, m: Tensor, r: Row) -> tuple[Tensor, Moments]:
    m = r[BETA1] * m + r[GAIN1] * g
    return r[MIX_M] * m + r[MIX_G] * g, (m,)


def _lion(p: Tensor, g: Tensor, m: Tensor, r: Row) -> tuple[Tensor, Moments]:
    c = r[MIX_M] * m + r[MIX_G] * g
    update = torch.where(c.isnan(), c, c.sign())  # PyTorch's sign of NaN is 0, and would hide it
    return update, (r[BETA1] * m + r[GAIN1] * g,)


def _rms(p: Tensor, g: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    v = r[BETA2] * v + r[GAIN2] * (g * g)
    return g / (exact_root(v) * r[DEBIAS] + r[EPS]), (v,)


def _rms_momentum(p: Tensor, g: Tensor, m: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    v = r[BETA2] * v + r[GAIN2] * (g * g)
    m = r[BETA1] * m + r[GAIN1] * (g / (exact_root(v) * r[DEBIAS] + r[EPS]))
    return m, (m, v)


def _rms_centered(p: Tensor, g: Tensor, mean: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    mean = r[BETA3] * mean + r[GAIN3] * g
    v = r[BETA2] * v + r[GAIN2] * (g * g)
    return g / (exact_root(_variance(v, mean)) * r[DEBIAS] + r[EPS]), (mean, v)


def _rms_centered_momentum(p: Tensor, g: Tensor, m: Tensor, mean: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    update, (mean, v) = _rms_centered(p, g, mean, v, r)
    m = r[BETA1] * m + r[GAIN1] * update
    return m, (m, mean, v)


def _variance(v: Tensor, mean: Tensor) -> Tensor:
    """Never negative, also where both were rounded. A NaN stays one."""
    return (v - mean * mean).clamp(min=0)


def _ademamix(p: Tensor, g: Tensor, m: Tensor, slow: Tensor, v: Tensor, r: Row) -> tuple[Tensor, Moments]:
    m = r[BETA1] * m + r[GAIN1] * g
    slow = r[BETA3] * slow + r[GAIN3] * g
    v = r[BETA2] * v + r[GAIN2] * (g * g)
    return (r[MIX_M] * m + r[MIX_G] * slow) / (exact_root(v) * r[DEBIAS] + r[EPS]), (m, slow, v)


@dataclass(frozen=True)
class Rule:
    """Which states a rule keeps (True: signed), and its update."""

    signed: tuple[bool, ...]
    update: Callable[..., tuple[Tensor, Moments]]


RULES = {
    "adamw": Rule((True, False), _adamw),
    "momentum": Rule((True,), _momentum),
    "lion": Rule((True,), _lion),
    "rms": Rule((False,), _rms),
    "ademamix": Rule((True, True, False), _ademamix),
    "rms_momentum": Rule((True, False), _rms_momentum),
    "rms_centered": Rule((True, False), _rms_centered),
    "rms_centered_momentum": Rule((True, True, False), _rms_centered_momentum),
}


# --- Reference


def step_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scalars: Tensor,
    signed: Tensor,
    unsigned: Tensor,
    rule: str,
    code: str,
    block: int,
) -> None:
    """The definition, tensor by tensor. `states` and `absmax` are flat: all of the first state, then the next."""
    for i, row in enumerate(_rows(scalars)):
        if row is None:
            continue
        mine, scales = states[i :: len(params)], absmax[i :: len(params)]
        p, update, moments = _apply(rule, params[i], grads[i], mine, scales, row, signed, unsigned, code, block)
        params[i].copy_(row[DECAY] * p - row[LR] * update)
        if absmax and code == "quadratic":
            stored = encode_moments(moments, RULES[rule].signed, block, step=int(row[STEP]))
            for target, scale, (codes, largest) in zip(mine, scales, stored, strict=True):
                target.copy_(codes)
                scale.copy_(largest)
            continue
        for k, moment in enumerate(moments):
            if not absmax:
                mine[k].copy_(moment)
                continue
            is_signed = RULES[rule].signed[k]
            codes, scale = quantize_reference(moment, signed if is_signed else unsigned, block)
            if not is_signed:
                codes = torch.where((moment > 0) & (codes == 0) & ~_broken(scale, moment, block), 1, codes)
            mine[k].copy_(codes)
            scales[k].copy_(scale)


def norms_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scalars: Tensor,
    signed: Tensor,
    unsigned: Tensor,
    rule: str,
    code: str,
    block: int,
) -> Tensor:
    """The definition of `step_norms`, with sums in float64."""
    result = scalars.new_zeros(len(params), 2)
    for i, row in enumerate(scalars.tolist()):
        mine, scales = states[i :: len(params)], absmax[i :: len(params)]
        p, update, _ = _apply(rule, params[i], grads[i], mine, scales, row, signed, unsigned, code, block)
        change = (row[DECAY] - 1.0) * p - row[LR] * update
        result[i, 0] = p.double().square().sum()
        result[i, 1] = change.double().square().sum()
    return result


def ratios_reference(
    grads: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scalars: Tensor,
    unsigned: Tensor,
    code: str,
    block: int,
) -> Tensor:
    """The definition of `gradient_ratios`, with sums in float64."""
    result = scalars.new_zeros(len(grads))
    for i, row in enumerate(scalars.tolist()):
        g, v = grads[i].float() * row[GRAD_SCALE], second_moments[i]
        if absmax and code == "quadratic":
            (v,) = decode_moments([v], [absmax[i]], [False], block)
        elif absmax:
            v = dequantize_reference(v, absmax[i], unsigned, block, torch.float32)
        v = row[BETA2] * v + row[GAIN2] * (g * g)
        result[i] = (g * g / v.clamp(min=torch.tensor(row[EPS], dtype=torch.float32).square())).double().sum()
    return result


def gradient_norms_reference(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([g.double().square().sum().float() for g in grads])


def _apply(
    rule: str,
    param: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    absmax: Sequence[Tensor],
    row: Row,
    signed: Tensor,
    unsigned: Tensor,
    code: str,
    block: int,
) -> tuple[Tensor, Tensor, Moments]:
    """Decode and apply the rule: the old parameter, the update and the new moments, all in float32."""
    p, g = param.float(), grad.float() * row[GRAD_SCALE]
    if row[COUPLED] != 0:
        g = g + row[COUPLED] * p
    moments = states
    if absmax and code == "quadratic":
        moments = decode_moments(states, absmax, RULES[rule].signed, block)
    elif absmax:
        books = [signed if s else unsigned for s in RULES[rule].signed]
        moments = [
            dequantize_reference(c, a, book, block, torch.float32)
            for c, a, book in zip(states, absmax, books, strict=True)
        ]
    update, moments = RULES[rule].update(p, g, *moments, row)
    return p, update, moments


def _rows(scalars: Tensor) -> list[Row | None]:
    """One list of floats per tensor, or None where it is to be skipped."""
    keep = scalars.isfinite().all(dim=1).tolist()
    return [row if k else None for row, k in zip(scalars.tolist(), keep, strict=True)]


def _broken(scale: Tensor, moment: Tensor, block: int) -> Tensor:
    """Where the block is stored as NaN, its codes mean nothing and stay as the quantizer wrote them."""
    return scale.isnan().repeat_interleave(block)[: moment.numel()].view(moment.shape)


# --- Checks and registration


def _prepare(
    rule: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    scalars: Tensor,
    absmax: Sequence[Sequence[Tensor]] | None,
    block: int,
    code: str,
    signed: Tensor | None,
    unsigned: Tensor | None,
    *,
    writes: bool = True,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor, Tensor, str, str, int]:
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; choose one of {', '.join(RULES)}")
    if code not in get_args(Code):
        raise ValueError(f"unknown code {code!r}; choose one of {', '.join(get_args(Code))}")
    if code == "quadratic" and (signed is not None or unsigned is not None):
        raise ValueError("the quadratic code uses no codebook; leave signed and unsigned out")
    check_block(block)
    count, wanted = len(params), len(RULES[rule].signed)
    lists = {"states": states} if absmax is None else {"states": states, "absmax": absmax}
    for name, value in lists.items():
        if len(value) != wanted or any(len(tensors) != count for tensors in value):
            got = [len(tensors) for tensors in value]
            raise ValueError(
                f"rule {rule!r} needs {name} as {wanted} lists of {count} tensors, got lists of lengths {got}"
            )
    if len(grads) != count:
        raise ValueError(f"got {count} params but {len(grads)} grads; leave out parameters without a gradient")
    check_tensor("scalars", scalars, dtypes=(torch.float32,))
    check_shape("scalars", scalars, (count, len(SCALARS)), "a row of trimtab.ops.step.SCALARS per tensor")
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
        check_tensor(f"grads[{i}]", g, dtypes=FLOATS)
        check_shape(f"grads[{i}]", g, p.shape, "that of its parameter")
        for k in range(wanted):
            check_tensor(f"states[{k}][{i}]", states[k][i], dtypes=stored)
            check_shape(f"states[{k}][{i}]", states[k][i], p.shape, "that of its parameter")
            if absmax is not None:
                blocks = (count_blocks(p.numel(), block),)
                check_tensor(f"absmax[{k}][{i}]", absmax[k][i], dtypes=(torch.float32,))
                check_shape(f"absmax[{k}][{i}]", absmax[k][i], blocks, f"one per block of {block}")
    flat_states = [s for tensors in states for s in tensors]
    flat_absmax = [a for tensors in absmax or () for a in tensors]
    named = {"params": params, "grads": grads, "states": flat_states, "absmax": flat_absmax}
    tensors = {f"{name}[{i}]": x for name, group in named.items() for i, x in enumerate(group)}
    if count:
        check_same_device(**tensors, scalars=scalars, signed=signed, unsigned=unsigned)
    if writes:
        check_disjoint(**tensors)
    block = min(block, max([1, *(p.numel() for p in params)]))  # a longer block is the same block
    return list(params), list(grads), flat_states, flat_absmax, scalars, signed, unsigned, rule, code, block


# The ops themselves. Checking hundreds of tensors costs more than updating them, so an optimizer, which made its own
# states, calls these; states and absmax are flat there: all of the first state, then the next.
_step = torch.library.custom_op("trimtab::fused_step", mutates_args=("params", "states", "absmax"))(step_reference)
norms_unchecked = torch.library.custom_op("trimtab::step_norms", mutates_args=())(norms_reference)
gradient_norms_unchecked = torch.library.custom_op("trimtab::gradient_norms", mutates_args=())(gradient_norms_reference)
ratios_unchecked = torch.library.custom_op("trimtab::gradient_ratios", mutates_args=())(ratios_reference)


def step_unchecked(params: Sequence[Tensor], *arguments: Any) -> None:
    """The op, telling autograd once that the parameters changed: tensor by tensor, that takes as long as the step."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _step(params, *arguments)
    torch.autograd.graph.increment_version(params)


@norms_unchecked.register_fake
def _(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scalars: Tensor,
    signed: Tensor,
    unsigned: Tensor,
    rule: str,
    code: str,
    block: int,
) -> Tensor:
    return scalars.new_empty(len(params), 2)


@ratios_unchecked.register_fake
def _(
    grads: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scalars: Tensor,
    unsigned: Tensor,
    code: str,
    block: int,
) -> Tensor:
    return scalars.new_empty(len(grads))


@gradient_norms_unchecked.register_fake
def _(grads: Sequence[Tensor]) -> Tensor:
    return grads[0].new_empty(len(grads), dtype=torch.float32)


# --- Twins

UPDATE, NORMS, RATIOS = range(3)  # enum class Pass in native.h


def step_native(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scalars: Tensor,
    signed: Tensor,
    unsigned: Tensor,
    rule: str,
    code: str,
    block: int,
) -> None:
    _call_native(params, grads, states, absmax, scalars, signed, unsigned, rule, code, block, UPDATE)


def norms_native(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scalars: Tensor,
    signed: Tensor,
    unsigned: Tensor,
    rule: str,
    code: str,
    block: int,
) -> Tensor:
    sums = _call_native(params, grads, states, absmax, scalars, signed, unsigned, rule, code, block, NORMS)
    return torch.tensor(sums, dtype=torch.float32).view(-1, 2)


def ratios_native(
    grads: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scalars: Tensor,
    unsigned: Tensor,
    code: str,
    block: int,
) -> Tensor:
    arguments = (grads, grads, second_moments, absmax, scalars, unsigned, unsigned, "rms", code, block)
    return torch.tensor(_call_native(*arguments, RATIOS)[::2], dtype=torch.float32)


def gradient_norms_native(grads: Sequence[Tensor]) -> Tensor:
    assert backends.native is not None
    sums = backends.native.gradient_norms(
        backends.addresses(grads), [g.numel() for g in grads], _dtype_codes(grads), torch.get_num_threads()
    )
    return torch.tensor(sums, dtype=torch.float32)


def _call_native(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scalars: Tensor,
    signed: Tensor,
    unsigned: Tensor,
    rule: str,
    code: str,
    block: int,
    what: int,
) -> list[float]:
    assert backends.native is not None
    return backends.native.step(
        list(RULES).index(rule),
        backends.addresses(params),
        backends.addresses(grads),
        backends.addresses(states),
        backends.addresses(absmax),
        [p.numel() for p in params],
        _dtype_codes(params),
        _dtype_codes(grads),
        scalars.data_ptr(),
        block,
        signed.data_ptr(),
        signed.numel(),
        unsigned.data_ptr(),
        unsigned.numel(),
        code == "quadratic",
        what,
        torch.get_num_threads(),
    )


def _dtype_codes(tensors: Sequence[Tensor]) -> list[int]:
    return [backends.DTYPE_CODES[x.dtype] for x in tensors]


if backends.native is not None:
    _step.register_kernel("cpu")(step_native)
    norms_unchecked.register_kernel("cpu")(norms_native)
    ratios_unchecked.register_kernel("cpu")(ratios_native)
    gradient_norms_unchecked.register_kernel("cpu")(gradient_norms_native)

if backends.triton_missing is None:
    from trimtab.ops import step_triton

    _step.register_kernel("cuda")(step_triton.step)
    norms_unchecked.register_kernel("cuda")(step_triton.norms)
    ratios_unchecked.register_kernel("cuda")(step_triton.ratios)
    gradient_norms_unchecked.register_kernel("cuda")(step_triton.gradient_norms)
