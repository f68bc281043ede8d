"""The contrastive loss of image-text pairs, over one process or many.

N pairs. A right pair should be more alike than its image with any other text, and its text with any other image:

    z = scale * image @ text.T      loss = (mean_i -log softmax(z[i, :])[i] + mean_j -log softmax(z[:, j])[j]) / 2

Over W processes the N pairs lie in W equal parts. Each process gathers all features in one collective, whose backward
adds up what every process asks of a feature. So the gradient of a process is W times its share of the whole, and the
average over processes that DDP and FSDP take is the gradient of one process with the whole batch.

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
    """`loss` to call backward on; the share of images whose best text is theirs, and of texts likewise, detached."""

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
    """InfoNCE in both directions over features [pairs, width], normalised by the caller; computed in float32 or wider.

    Args:
        scale: what the dot products are multiplied with: the exponential of CLIP's logit scale.
        gather: against whom. `"local"`: own pairs against those of all processes, so each process reports its part
            and the mean over processes is the whole loss. `"full"`: every process computes the whole loss, with
            W / 2 times as many logits. The gradients are the same. `"off"`: own pairs against own pairs, another
            loss. Without a process group all three are the same.
        group: the processes that share a batch; all of them by default. Their parts must be equally large.
    """
    _check_pairs(image_features, text_features)
    if gather not in get_args(Gather):
        raise ValueError(f"gather={gather!r} is none of {', '.join(map(repr, get_args(Gather)))}")
    image, text = _widen(image_features), _widen(text_features)
    alone = gather == "off" or not _in_group() or dist.get_world_size(group) == 1
    all_image, all_text = (image, text) if alone else _gather_pairs(image, text, group)
    if len(all_image) == 0:
        raise ValueError("there are no pairs to compare: the batch is empty")
    if alone or gather == "full":
        return _score(all_image, all_text, all_image, all_text, scale, first=0)
    return _score(image, text, all_image, all_text, scale, first=len(image) * dist.get_rank(group))


def _score(
    image: Tensor, text: Tensor, all_image: Tensor, all_text: Tensor, scale: Tensor | float, *, first: int
) -> ContrastiveLoss:
    """Some pairs, which are number `first` and following of all, against all."""
    target = torch.arange(first, first + len(image), device=image.device)
    # Logits reach 100, where a bfloat16 step is half a unit: an autocast around us must not choose the dtype.
    with torch.autocast(image.device.type, enabled=False):
        by_image = scale * (image @ all_text.T)
        by_text = by_image.T if all_image is image else scale * (text @ all_image.T)
    loss = (cross_entropy(by_image, target) + cross_entropy(by_text, target)) / 2
    right = [(logits.detach().argmax(dim=1) == target).float().mean() for logits in (by_image, by_text)]
    return ContrastiveLoss(loss, *right)


def _gather_pairs(image: Tensor, text: Tensor, group: "dist.ProcessGroup | None") -> tuple[Tensor, Tensor]:
    world = dist.get_world_size(group)
    # A collective over unequal tensors hangs or mixes them up, so the shapes are compared first, by everyone.
    shapes = image.new_empty(world, 2, dtype=torch.int64)
    dist.all_gather(list(shapes.unbind()), torch.tensor(image.shape, device=image.device), group=group)
    parts = shapes.tolist()
    if any(part != parts[0] for part in parts):
        raise ValueError(
            f"processes must hold equally many pairs of one width, got [pairs, width] {parts} in order of rank; "
            "drop the last, smaller batch (drop_last=True), or use gather='off'"
        )
    gathered = _Gather.apply(torch.cat([image, text], dim=1), group)
    all_image, all_text = gathered.split(image.shape[1], dim=1)
    return all_image, all_text


class _Gather(torch.autograd.Function):
    """Rows of all processes in order of rank; the gradient of a row is the sum of all processes' gradients of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
        ctx.group = group
        out = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather(list(out.split(len(x))), x.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A reduce-scatter would move half as much, but not every backend has one, and features are small.
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _check_pairs(image: Tensor, text: Tensor) -> None:
    if image.dim() != 2 or image.shape != text.shape:
        raise ValueError(
            "image and text features must be [pairs, width], one text per image, "
            f"got {tuple(image.shape)} and {tuple(text.shape)}"
        )


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()
