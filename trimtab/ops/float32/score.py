"""Cross entropy with z-loss of columns of logits, whose gradient replaces them.

    logZ = log sum exp(y)      ce = logZ - y[target]      y <- p (1 + 2 c logZ) - 1[target]

Columns are tokens, rows classes: a vector of tokens needs no sums within the vector. In PyTorch it takes five passes
over the logits, in the kernel three. Tokens that are not valid get a gradient of 0.

Kernel: score.cpp (CPU).
"""

import torch
from torch import Tensor

from trimtab.ops import backends


def score_(y_VN: Tensor, index: Tensor, valid: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return ce and logZ of tokens; overwrite their logits with the gradient of the summed loss."""
    served = (
        not torch.compiler.is_compiling()
        and backends.native is not None
        and type(y_VN) is Tensor
        and y_VN.dtype == torch.float32
        and y_VN.device.type == "cpu"
        and y_VN.is_contiguous()
        and y_VN.numel() > 0
    )
    return _score_native(y_VN, index, valid, z_loss) if served else score_reference_(y_VN, index, valid, z_loss)


def score_reference_(y_VN: Tensor, index: Tensor, valid: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """The definition."""
    target = y_VN.gather(0, index[None]).squeeze(0)
    largest = y_VN.amax(dim=0)
    total = y_VN.sub_(largest).exp_().sum(dim=0)
    logz = largest + total.log()
    counts = valid.to(y_VN.dtype)
    y_VN.mul_(counts * (1 + 2 * z_loss * logz) / total)
    y_VN.scatter_add_(0, index[None], -counts[None])
    return logz - target, logz


def _score_native(y_VN: Tensor, index: Tensor, valid: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    assert backends.native is not None
    index, valid = index.contiguous(), valid.contiguous()
    ce, logz = torch.empty(2, y_VN.shape[1]).unbind()
    addresses = (y_VN.data_ptr(), index.data_ptr(), valid.data_ptr(), ce.data_ptr(), logz.data_ptr())
    backends.native.score(*addresses, *y_VN.shape, z_loss, torch.get_num_threads())
    return ce, logz
