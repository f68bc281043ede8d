"""Gradient release: parameters are updated during the backward pass, and their gradients are freed at once.

    optimizer.step_in_backward(model)
    for batch in loader:
        model(batch).backward()      # updates the parameters
        optimizer.step()             # the end of the iteration: updates what is left, runs hooks and schedulers

The gradients of the whole model never exist together. Results are those of the plain step, bit for bit.

A gradient that is complete waits until an eighth of the model is waiting, and that of a small tensor for the end of
the backward pass: one call for several tensors takes a fraction of the time of one call each.

Temporary tensors leave gaps between those that stay: after the model is built, and after the first iteration, which
creates the state. glibc keeps these gaps, so they are returned to the system then.
"""

import ctypes
import math
from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from trimtab.ops.sharding import widen
from trimtab.ops.step import gradient_norms_unchecked

if TYPE_CHECKING:
    from trimtab.optim.optimizer import Optimizer

HOLD = 8  # a part of so many of the model may wait
SMALL = 1 << 14  # values of a tensor that waits for the end
PREVIOUS = "previous_grad_norm"  # in `optimizer.state`: a resume clips by the same norm
Norm = Literal["previous"]


class Release:
    """The handle of `Optimizer.step_in_backward`. `remove()` returns to the plain step."""

    def __init__(self, optimizer: "Optimizer", model: nn.Module, max_norm: float | None) -> None:
        self._optimizer, self._max_norm = optimizer, max_norm
        self._lock = RLock()  # devices have backward threads of their own
        self._places: dict[Tensor, tuple[int, int]] = {}  # the indices of a parameter and of its group
        self._large: list[Tensor] = []  # waiting, of this many values
        self._values = 0
        self._small: list[Tensor] = []  # waiting for the end
        self._done: set[Tensor] = set()  # complete since the last `step`
        self._squares: list[Tensor] = []  # the gradients' sums of squares in this iteration
        self._clip: Tensor | float = 1.0
        self._first = True  # iteration
        inside, where = set(model.parameters()), -1
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                where += 1
                if p in inside and p.requires_grad:
                    self._places.setdefault(p, (where, number))
        self._most = sum(p.numel() for p in self._places) // HOLD
        self._hooks = [p.register_post_accumulate_grad_hook(self._receive) for p in self._places]
        _return_free_memory()

    def remove(self) -> None:
        """Back to the plain step. Gradients are kept again from the next backward pass on."""
        for hook in self._hooks:
            hook.remove()
        if self._optimizer._release is self:
            self._optimizer._release = None
            self._optimizer._step_supports_amp_scaling = False

    @property
    def _state(self) -> dict[Any, Any]:
        """The optimizer's state. Other keys than parameters are allowed in it, but its type says otherwise."""
        return self._optimizer.state

    @property
    def norm(self) -> Tensor:
        """The global norm of the gradients since the last `step()`, before clipping; 0 without `max_norm`."""
        device = self._squares[0].device if self._squares else torch.device("cpu")
        return torch.stack([x.to(device) for x in self._squares] or [torch.zeros(())]).sum().sqrt()

    def finish(self) -> None:
        """The end of an iteration."""
        if self._squares and self._max_norm != math.inf:
            norm, state = self.norm, self._state
            state[PREVIOUS] = torch.where(norm.isfinite(), norm, state.get(PREVIOUS, norm))
        if self._first and self._done:
            self._first = False
            _return_free_memory()
        self._done, self._squares = set(), []

    def _receive(self, p: Tensor) -> None:
        """Called by autograd when the gradient of `p` is complete."""
        with self._lock:
            if p in self._done:
                name = self._optimizer.names[self._places[p][0]]
                raise RuntimeError(
                    f"{name} got a second gradient before optimizer.step(): the first one has already updated it. Call "
                    "step() after every backward(). To accumulate gradients over several backward passes, or for a "
                    "layer shared by blocks with checkpoint(use_reentrant=True), use the plain step, without "
                    "step_in_backward"
                )
            if not self._done:
                self._begin()
            self._done.add(p)
            if not self._large and not self._small:
                torch.autograd.Variable._execution_engine.queue_callback(self._update_all)
            if p.numel() <= SMALL:
                self._small.append(p)
                return
            self._large.append(p)
            self._values += p.numel()
            if self._values > self._most:
                self._update(self._large)
                self._large, self._values = [], 0

    def _begin(self) -> None:
        """At the first gradient of an iteration: nothing has changed yet."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            optimizer.check_group(group)
        optimizer._measured = []
        self._large, self._values, self._small = [], 0, []
        previous = self._state.get(PREVIOUS)
        if self._max_norm is not None and previous is not None:
            self._clip = (self._max_norm / (previous + 1e-6)).clamp(max=1.0)

    def _update_all(self) -> None:
        """At the end of a backward pass."""
        with self._lock:
            waiting = self._large + self._small
            self._large, self._values, self._small = [], 0, []
            self._update(waiting)

    @torch.no_grad()
    def _update(self, waiting: list[Tensor]) -> None:
        if not waiting:
            return
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        places = [(*self._places[p], p) for p in waiting]
        batches = optimizer._gather(((where, i, groups[i], p) for where, i, p in places), part=places[0][0])
        if self._max_norm is not None:
            for batch in batches:
                squares = widen(gradient_norms_unchecked(batch.grads)).sum()
                self._squares.append(squares / batch.group["loss_scale"] ** 2)
        optimizer._update(batches, self._clip)
        for p in waiting:
            p.grad = None


def _return_free_memory() -> None:
    """Give the unused pages of the allocator back to the system. Only glibc needs it and has the call."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def check_release(optimizer: "Optimizer", model: nn.Module, max_norm: float | None, norm: Norm | None) -> None:
    """Refuse what needs all gradients at once."""
    if optimizer._release is not None:
        raise ValueError("step_in_backward is active already; call remove() on what it returned first")
    if max_norm is not None and norm != "previous":
        raise ValueError(
            f"clipping to max_norm={max_norm} needs the norm of all gradients before the first update, but here each "
            "gradient is freed before the next one exists; pass norm='previous' to clip by the norm of the previous "
            "iteration, or use StableAdamW, which needs no clipping"
        )
    if norm is not None and (norm != "previous" or max_norm is None or not max_norm > 0):
        raise ValueError(f"norm must be 'previous', with a max_norm above 0, got norm={norm!r}, max_norm={max_norm}")
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            f"there are {distributed.get_world_size()} processes, and gradients are averaged over them only after they "
            "are complete here; use the plain step, without step_in_backward"
        )
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError("DistributedDataParallel keeps gradients in buckets of its own; pass the model without it")
    if optimizer._optimizer_step_pre_hooks:
        raise ValueError(NO_HOOKS)
    inside = set(model.parameters())
    if not any(p in inside for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("none of the optimizer's parameters is in this model")


NO_HOOKS = (
    "a hook before the step (tt.Watch has one) would find no gradients and changed parameters: step_in_backward frees "
    "each gradient during the backward pass. Use one of the two: Watch(...).close(), or remove() on what "
    "step_in_backward returned"
)
