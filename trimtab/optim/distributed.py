"""Optimizer state for torch.distributed.checkpoint (DCP), which any number of processes can load.

    state = {"model": model.state_dict(), "optim": distributed_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)

    state = {"model": model.state_dict(), "optim": distributed_state_dict(model, optimizer)}      # tensors to read into
    dcp.load(state, checkpoint_id=path)
    load_distributed_state_dict(model, optimizer, state["optim"])

The state is portable. PyTorch's `get_optimizer_state_dict` and `set_optimizer_state_dict`, which hosts call, do the
same, also with `flatten_optimizer_state_dict=True`.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from trimtab.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


def distributed_state_dict(
    model: nn.Module, optimizer: Optimizer, *, options: "StateDictOptions | None" = None
) -> dict[str, Any]:
    """The portable state of `optimizer`, by the names of the parameters. Works with DDP, FSDP2 and one process."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(model, optimizer, options=options)


def load_distributed_state_dict(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], *, options: "StateDictOptions | None" = None
) -> None:
    """Load what `distributed_state_dict` returned, here or on another number of processes."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    set_optimizer_state_dict(model, optimizer, state, options=options)
