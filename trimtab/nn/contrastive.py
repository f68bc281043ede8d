"""The contrastive loss of image-text pairs, over one process or many.

For N pairs, image i should match text i better than any other text, and text j image j better than any other image:

    z = scale * image @ text.T      loss = (mean_i -log softmax(z[i, :])[i] + mean_j -log softmax(z[:, j])[j]) / 2

With W processes each has N / W pairs. Every process gathers all features in one collective, whose backward adds the
gradients of all processes. The gradient of a process is therefore W times its part of the whole, and the average over
processes, which DDP and FSDP compute, equals the gradient of one process with the whole batch.

Radford et al. 2021 (CLIP).
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

Gather = Literal["off", "local", "full"]


class ContrastiveLoss(NamedTuple):
    """`loss` for the backward pass; detached shares of images and texts whose best match is the right one."""

    loss: Tensor
    image_accuracy: Tensor
    text_accuracy: Tensor


def contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    scale: Tensor | float,
    *,
    gather: Gather = "local",
    group: "dist.ProcessGroup | None" = None,
) -> ContrastiveLoss:
    """InfoNCE in both directions for normalised features [pairs, width]; computed in float32 or wider.

    Args:
        scale: factor of the dot products: the exponential of CLIP's logit scale.
        gather: `"local"`: own pairs against the pairs of all processes; the mean over processes is the whole loss.
            `"full"`: every process computes the whole loss, with W / 2 times as many logits and the same gradients.
            `"off"`: own pairs against own pairs, which is a different loss. All are equal for one process.
        group: the processes that share a batch; all by default. All must have equally many pairs.
    """
    if image_features.dim() != 2 or image_features.shape != text_features.shape:
        raise ValueError(
            "image and text features must be [pairs, width], one text per image, "
            f"got {tuple(image_features.shape)} and {tuple(text_features.shape)}"
        )
    if gather not in get_args(Gather):
        raise ValueError(f"gather={gather!r} is not known; try {' or '.join(map(repr, get_args(Gather)))}")
    image, text = _widen(image_features), _widen(text_features)
    in_group = dist.is_available() and dist.is_initialized()
    alone = gather == "off" or not in_group or dist.get_world_size(group) == 1
    all_image, all_text = (image, text) if alone else _gather_pairs(image, text, group)
    if len(all_image) == 0:
        raise ValueError("there are no pairs: the batch is empty")
    if alone or gather == "full":
        return _score(all_image, all_text, all_image, all_text, scale, first=0)
    return _score(image, text, all_image, all_text, scale, first=len(image) * dist.get_rank(group))


def _score(
    image: Tensor, text: Tensor, all_image: Tensor, all_text: Tensor, scale: Tensor | float, *, first: int
) -> ContrastiveLoss:
    """Score pairs against all pairs; `first` is the index of the first of them among all."""
    target = torch.arange(first, first + len(image), device=image.device)
    # Logits reach 100, where bfloat16 has steps of 0.5: autocast must not choose the dtype.
    with torch.autocast(image.device.type, enabled=False):
        by_image = scale * (image @ all_text.T)
        by_text = by_image.T if all_image is image else scale * (text @ all_image.T)
    loss = (cross_entropy(by_image, target) + cross_entropy(by_text, target)) / 2
    right = [(logits.detach().argmax(dim=1) == target).float().mean() for logits in (by_image, by_text)]
    return ContrastiveLoss(loss, *right)


def _gather_pairs(image: Tensor, text: Tensor, group: "dist.ProcessGroup | None") -> tuple[Tensor, Tensor]:
    world = dist.get_world_size(group)
    # A collective over unequal tensors hangs or mixes them up, so all processes compare the shapes first.
    shapes = image.new_empty(world, 2, dtype=torch.int64)
    dist.all_gather(list(shapes.unbind()), torch.tensor(image.shape, device=image.device), group=group)
    parts = shapes.tolist()
    if any(part != parts[0] for part in parts):
        raise ValueError(
            f"processes must hold equally many pairs of one width, got [pairs, width] {parts} in order of rank; "
            "drop the last, smaller batch (drop_last=True), or use gather='off'"
        )
    gathered: Tensor = _Gather.apply(torch.cat([image, text], dim=1), group)  # type: ignore[no-untyped-call]
    width = image.shape[1]
    return gathered[:, :width], gathered[:, width:]


class _Gather(torch.autograd.Function):
    """Rows of all processes in order of rank; the gradient of a row is the sum over processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
        ctx.group = group
        out = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        parts: Any = torch.split(out, len(x))
        dist.all_gather(list(parts), x.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A reduce-scatter would send half as much, but not every backend has one, and features are small.
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
