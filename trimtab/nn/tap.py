"""`tap(x, "logits")` names a value inside a model and passes it to the listeners.

    with listen(model, lambda name, x: print(name, x.max()), patterns=("*.attention.logits",)):
        model(tokens)                       # blocks.0.attention.logits tensor(1.9)  ...

A name is relative to the running module; the handler gets the full path. The path comes from hooks that `listen` adds
to the modules and removes again. A model without listeners pays one test per tap and compiles into one graph, also
while another model has listeners. The handler gets the value detached; it is not stored. A value that activation
checkpointing recomputes in the backward pass is passed once. Compute an expensive value only if `has_listener(name)`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Handler = Callable[[str, Tensor], None]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def tap(x: Tensor, name: str) -> Tensor:
    """Pass `x` to the listeners of this name, and return it."""
    if _running:
        _call_handlers(x, name)
    return x


def has_listener(name: str) -> bool:
    """Whether a listener is registered for this name in the running module."""
    return bool(_running) and _any_listener(name)


@contextmanager
def listen(model: nn.Module, handler: Handler, patterns: str | Sequence[str] = ("*",)) -> Iterator[None]:
    """Inside the `with`, `handler(path, value)` is called for every tap whose path matches a pattern.

    The value shares memory with the model: do not modify it; clone it to keep it.
    """
    listener = _Listener(handler, (patterns,) if isinstance(patterns, str) else tuple(patterns))
    hooks = []
    for name, module in model.named_modules():
        path = strip_wrappers(name)
        hooks.append(module.register_forward_pre_hook(partial(listener.enter, path)))
        # also if forward raises: otherwise the path would be wrong afterwards
        hooks.append(module.register_forward_hook(partial(listener.leave, path), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        listener.stop()


def strip_wrappers(name: str) -> str:
    """The name of a module or parameter without the parts that torch.compile and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class _Listener(threading.local):
    """A handler and, per thread, the path of the running module."""

    def __init__(self, handler: Handler, patterns: tuple[str, ...]) -> None:
        self.handler = handler
        self.patterns = patterns
        self.path: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has no listener: no pattern matches, so `print` is never called."""
        return _Listener, (print, ())

    def enter(self, path: str, *_: Any) -> None:
        if not path:  # a new forward pass: discard what an interrupted one left
            self.stop()
        if not self.path:
            _running.append(self)
        self.path.append(path)

    def leave(self, path: str, *_: Any) -> None:
        if self.path and self.path[-1] == path:
            self.path.pop()
            if not self.path:
                _running.remove(self)

    def stop(self) -> None:
        if self.path:
            self.path.clear()
            _running.remove(self)

    def full_name(self, name: str) -> str | None:
        """The full path of a tap in the running module, if it matches a pattern."""
        if not self.path:  # another model is running
            return None
        path = f"{self.path[-1]}.{name}" if self.path[-1] else name
        return path if any(fnmatchcase(path, pattern) for pattern in self.patterns) else None


# One entry per listener and thread in which its model is running. Otherwise only the hooks of the model refer to a
# listener, so that one that was never closed is freed with its model.
_running: list[_Listener] = []


# Not torch.compiler.disable, which would import the compiler.
@torch._disable_dynamo
def _call_handlers(x: Tensor, name: str) -> None:
    if _recomputing():
        return
    for listener in dict.fromkeys(_running):
        path = listener.full_name(name)
        if path is not None:
            listener.handler(path, x.detach())


@torch._disable_dynamo
def _any_listener(name: str) -> bool:
    return not _recomputing() and any(listener.full_name(name) is not None for listener in dict.fromkeys(_running))


def _recomputing() -> bool:
    # The id of the backward pass running in this thread; -1 if there is none.
    return bool(torch._C._current_graph_task_id() != -1)
