"""Argument checks of all ops. A message states what is wrong, what was given and what would work.

Kernels take addresses, so a tensor with gaps or overlaps must not reach them. It is refused instead of copied: a copy
would double the memory that these ops are meant to save.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str, x: Tensor, *, dtypes: tuple[torch.dtype, ...], shape: Iterable[int] | None = None, because: str = ""
) -> None:
    """Dense, strided, contiguous, of one of these dtypes, and of this shape. `because` is the reason for the shape."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not torch.compiler.is_compiling() and x.layout != torch.strided:  # not available in a compiled backward
        raise ValueError(f"{name} must be dense, got layout {x.layout}; call {name}.to_dense() first")
    if x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} must be {wanted}, got {str(x.dtype).removeprefix('torch.')}")
    if not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got shape {tuple(x.shape)} with strides {x.stride()}; "
            f"pass {name}.contiguous() to make a copy"
        )
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)} ({because}), got {tuple(x.shape)}")


def check_same_device(**tensors: Tensor) -> None:
    (first, reference), *others = tensors.items()
    for name, x in others:
        if x.device != reference.device:
            raise ValueError(
                f"{name} is on {x.device} but {first} is on {reference.device}; "
                f"move it with .to({str(reference.device)!r})"
            )


def check_codebook(codebook: Tensor) -> None:
    check_tensor("codebook", codebook, dtypes=(torch.float32,))
    if codebook.dim() != 1 or not 2 <= codebook.numel() <= 256:
        raise ValueError(
            f"codebook must be a vector of 2 to 256 sorted values, got shape {tuple(codebook.shape)}; "
            "trimtab.ops.load_codebook() returns one"
        )
    # Only on the CPU: on a GPU the check would wait for the device, and a graph has no values.
    if codebook.device.type == "cpu" and _has_values(codebook) and not (codebook[1:] >= codebook[:-1]).all():
        raise ValueError("codebook must be sorted and free of NaN; sort it first: codebook.sort().values")


def check_block(block: int) -> None:
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"block must be an int, got {type(block).__name__}")
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}; 256 is the usual choice")


def check_disjoint(**tensors: Tensor) -> None:
    """No two tensors share memory. Sorting the byte ranges finds an overlap between neighbours."""
    if not all(_has_values(x) for x in tensors.values()):
        return
    ranges = sorted(
        (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), name)
        for name, x in tensors.items()
        if x.numel() and x.device.type != "meta"
    )
    for (_, end, name), (start, _, other) in pairwise(ranges):
        if start < end:
            raise ValueError(f"{name} and {other} share memory; give each its own tensor")


def _has_values(x: Tensor) -> bool:
    """A real tensor, not a placeholder while PyTorch traces."""
    return not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"
