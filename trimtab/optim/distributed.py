"""Optimizer state for torch.distributed.checkpoint (DCP), which any number of processes can load.

    state = {"model": model.state_dict(), "optim": distributed_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)

    state = {"model": model.state_dict(), "optim": distributed_state_dict(model, optimizer)}      # tensors to read into
    dcp.load(state, checkpoint_id=path)
    load_distributed_state_dict(model, optimizer, state["optim"])

Use these two functions in place of `get_optimizer_state_dict` and `set_optimizer_state_dict`. They give DCP portable
state. If DCP reads packed 8-bit state, an error is raised: its blocks belong to tensors that are not sharded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from trimtab.optim.checkpoint import UNFLATTENED
from trimtab.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


def distributed_state_dict(
    model: nn.Module, optimizer: Optimizer, *, options: "StateDictOptions | None" = None
) -> dict[str, Any]:
    """The portable state of `optimizer`, by the names of the parameters. Works with DDP, FSDP2 and one process."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with _portable(optimizer, options):
        return get_optimizer_state_dict(model, optimizer, options=options)


def load_distributed_state_dict(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], *, options: "StateDictOptions | None" = None
) -> None:
    """Load what `distributed_state_dict` returned, here or on another number of processes."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    with _portable(optimizer, options):
        set_optimizer_state_dict(model, optimizer, state, options=options)


@contextmanager
def _portable(optimizer: Optimizer, options: "StateDictOptions | None") -> Iterator[None]:
    """`optimizer.state_dict()`, which DCP calls without arguments, is portable inside."""
    if getattr(options, "flatten_optimizer_state_dict", False) and optimizer.has_8bit_state():
        raise ValueError(f"8-bit state saved in this way could not be loaded; {UNFLATTENED}")
    optimizer.default_format = "portable"
    try:
        yield
    finally:
        optimizer.default_format = None
