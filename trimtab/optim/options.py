"""The options of all optimizers, and the checks of options, groups and parameters.

An option that an optimizer does not support is refused, never ignored.
"""

import math
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from trimtab.ops import backends
from trimtab.ops.checks import FLOATS, check_block
from trimtab.ops.sharding import is_dense, is_sharded, local
from trimtab.ops.step.storage import CODINGS, Coding, Storage
from trimtab.optim.groups import Keep
from trimtab.optim.places import FLATTENED

Rounding = Literal["nearest", "stochastic", "kahan", "split"]


class Options(TypedDict, total=False):
    """All but keep32 and offload can be set per group too."""

    bits: Literal[8, 32]  # of the state; 32
    block: int  # values that share a scale; 256
    min_8bit_size: int  # smaller tensors keep 32 bits; 4096
    codebook: Coding  # of 8-bit state; "quadratic", or a table of trimtab/ops/codebook.py
    keep32: Keep | Iterable[Keep]  # parameters with 32-bit state; by default embeddings, by their names
    offload: str | PathLike[str] | None  # a folder: state in a memory-mapped file there; "cpu": in host memory
    maximize: bool
    independent_decay: bool  # weight decay is wd * lr / lr_max, instead of following the learning rate
    lr_max: float | None  # the peak of the schedule; by default the learning rate given here
    skip_zeros: bool  # elements whose gradient is exactly zero keep their weight and state, which then has 32 bits
    skip_nonfinite: bool  # a tensor whose gradient holds a NaN or Inf is left as it is, and counted in `skipped`
    loss_scale: float  # the loss was multiplied by this; implies skip_nonfinite
    percentile_clipping: int  # shorten gradients longer than this percentile of the last 100; 100 is off
    rounding: Rounding  # of bfloat16 and float16 parameters
    # PyTorch's switches. The first three choose an implementation there; here there is one, which can be captured in a
    # CUDA graph, so every value is accepted. The others change what a step does: True is refused.
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
    amsgrad: bool


DEFAULTS: dict[str, Any] = {
    "bits": 32,
    "block": 256,
    "min_8bit_size": 4096,
    "codebook": "quadratic",
    "maximize": False,
    "independent_decay": False,
    "lr_max": None,
    "skip_zeros": False,
    "skip_nonfinite": False,
    "loss_scale": 1.0,
    "percentile_clipping": 100,
    "rounding": "nearest",
}
IMPLEMENTATIONS = ("foreach", "fused", "capturable")
REFUSED = {
    "differentiable": "steps are not differentiable; use torch.optim for that",
    "amsgrad": "a running maximum of the second moment is not kept; use torch.optim for that",
}
LARGEST = torch.finfo(torch.float32).max
_LIMITS = (
    ("weight_decay", 0, LARGEST),
    ("eps", 0, LARGEST),
    ("momentum", 0, LARGEST),
    ("alpha", 0, LARGEST),
    ("min_8bit_size", 0, math.inf),
    ("percentile_clipping", 0, 100),
    ("loss_scale", 1 / LARGEST, LARGEST),
)
_POSITIVE = ("clip_threshold", "beta2_power", "max_unorm", "t_alpha", "t_beta3")


def choose_storage(numel: int, group: Mapping[str, Any], exempt: str | None) -> Storage:
    """How to store a parameter's moments. `numel` is that of the whole parameter, so all processes choose the same."""
    bits, why = 32, "bits=32"
    if group["bits"] == 8:
        if exempt is not None:
            why = exempt
        elif group["skip_zeros"]:  # in an 8-bit block all values change with the shared scale
            why = "skip_zeros"
        elif numel < group["min_8bit_size"]:
            why = f"smaller than min_8bit_size={group['min_8bit_size']}"
        else:
            bits, why = 8, "bits=8"
    return Storage(bits, group["block"], group["codebook"], why)


def check_options(optimizer: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options without PyTorch's switches, which have no effect here."""
    for name, instead in REFUSED.items():
        if given.get(name):
            raise ValueError(f"{optimizer} does not support {name}=True: {instead}")
    switches = {*REFUSED, *IMPLEMENTATIONS}
    unknown = given.keys() - DEFAULTS.keys() - switches
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise TypeError(f"{optimizer} got unknown options {sorted(unknown)}; besides its own it has {known}")
    return {name: value for name, value in given.items() if name not in switches}


def check_group(group: dict[str, Any]) -> None:
    """Check the range of every value of a group. Sets lr_max if it is needed and missing."""
    for name, instead in REFUSED.items():
        if group.get(name):
            raise ValueError(f"a parameter group has {name}=True: {instead}")
    check_lr(group["lr"])
    if group["bits"] not in (8, 32):
        raise ValueError(f"bits must be 8 or 32, got {group['bits']!r}")
    check_block(group["block"])
    if group["codebook"] not in CODINGS:
        raise ValueError(f"codebook must be one of {', '.join(CODINGS)}, got {group['codebook']!r}")
    for name, low, high in _LIMITS:
        if name in group and (isinstance(group[name], tuple | list) or not low <= group[name] <= high):
            raise ValueError(f"{name} must be between {low} and {high}, got {group[name]}")
    if int(group["percentile_clipping"]) != group["percentile_clipping"]:
        raise ValueError(f"percentile_clipping must be a whole number, got {group['percentile_clipping']}")
    for name in _POSITIVE:
        if group.get(name) is not None and not group[name] > 0:
            raise ValueError(f"{name} must be above 0, got {group[name]}")
    if not all(0 <= beta < 1 for beta in group.get("betas", ())):
        raise ValueError(f"betas must be at least 0 and below 1, got {group['betas']}")
    if group["rounding"] not in get_args(Rounding):
        raise ValueError(f"rounding must be one of {', '.join(get_args(Rounding))}, got {group['rounding']!r}")
    if group["independent_decay"]:
        if group["lr_max"] is None:
            group["lr_max"] = float(group["lr"])
        if not group["lr_max"] > 0:
            raise ValueError(
                f"independent_decay divides by the peak learning rate, got lr_max={group['lr_max']}; "
                "pass lr_max=, the highest value your schedule reaches"
            )


def check_lr(lr: Any) -> None:
    """A finite number, or a tensor with one. (With a NaN the kernel would skip every tensor.)"""
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or lr.dim() > 1:
            raise ValueError(f"lr must be a number or a tensor of shape () or (1,), got shape {tuple(lr.shape)}")
        if lr.device.type != "cpu":  # reading it would wait for the device
            return
    if not abs(lr) <= LARGEST:
        raise ValueError(f"lr must be finite and fit in float32, got {lr}")


def check_param(name: str, p: Tensor, rounding: Rounding) -> None:
    if type(p).__name__ == "FlatParameter" or hasattr(p, "_fsdp_flattened") or hasattr(p, "ds_id"):
        raise ValueError(f"{name} is a piece of several concatenated tensors (FSDP1 or ZeRO): {FLATTENED}")
    if p.dtype not in FLOATS:
        raise ValueError(f"{name} is {p.dtype}; state can be kept for float32, bfloat16 and float16 parameters")
    if rounding in ("stochastic", "split") and p.dtype not in FLOATS[:2]:
        raise ValueError(f"{name} is {p.dtype}, but rounding={rounding!r} needs bfloat16; use rounding='kahan'")
    mine = local(p)
    if is_sharded(p) and any(placement.is_partial() for placement in p.placements):  # type: ignore[attr-defined]
        raise ValueError(f"{name} is a DTensor with partial sums; a parameter must be sharded or replicated")
    if mine.device.type == "meta":
        raise ValueError(f"{name} is on meta and has no values; give it memory first (to_empty)")
    if mine.device.type == "cuda" and backends.triton_missing is not None:
        raise ValueError(f"{name} is on {mine.device}, but its kernels are not available: {backends.triton_missing}")
    if not is_dense(mine):
        raise ValueError(
            f"{name} has shape {tuple(mine.shape)} with strides {mine.stride()}, which leave gaps or overlap; "
            "use a contiguous parameter"
        )
