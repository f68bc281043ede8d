"""`tap(x, "logits")` gives a value inside a model a name, and hands it to whoever listens.

    with listen(model, lambda name, x: print(name, x.max()), patterns=("*.attention.logits",)):
        model(tokens)                       # blocks.0.attention.logits tensor(1.9)  ...

A name is relative to the module that is running; the listener hears the whole path. The path comes from hooks that
`listen` puts on the modules and takes away again, so a model nobody listens to pays one test per tap, and compiles
into one graph. The handler gets the value detached, and nothing here keeps it afterwards. A value that activation
checkpointing computes a second time, inside the backward pass, is heard once.

A value that costs something to make is made only if `wanted(name)`.
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

# What torch.compile and checkpoint wrappers add to the names of the modules inside them.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def tap(x: Tensor, name: str) -> Tensor:
    """Return `x`, after everybody who listens to this name has seen it."""
    if _listeners:
        _tell(x, name)
    return x


def wanted(name: str) -> bool:
    """Does somebody listen to this name, in the module that is running now?"""
    return bool(_listeners) and _somebody_wants(name)


@contextmanager
def listen(model: nn.Module, handler: Handler, patterns: str | Sequence[str] = ("*",)) -> Iterator[None]:
    """While this is open, `handler(path, value)` hears every tap in the model whose path matches a pattern.

    The value shares memory with the running model: read it, keep a copy if you need one, never write into it.
    """
    listener = _Listener(handler, (patterns,) if isinstance(patterns, str) else tuple(patterns))
    hooks = []
    for name, module in model.named_modules():
        path = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        hooks.append(module.register_forward_pre_hook(partial(listener.enter, path)))
        # also when forward raises, or the path would be wrong ever after
        hooks.append(module.register_forward_hook(partial(listener.leave, path), always_call=True))
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        for hook in hooks:
            hook.remove()


class _Listener(threading.local):
    """One handler, and the path of the module that runs now: each thread has its own."""

    def __init__(self, handler: Handler, patterns: tuple[str, ...]) -> None:
        self.handler = handler
        self.patterns = patterns
        self.path: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, made while somebody listens, is heard by nobody."""
        return _Listener, (_ignore, ())

    def enter(self, path: str, *_: Any) -> None:
        if not path:  # the model starts anew: forget what an interrupt left behind
            self.path.clear()
        self.path.append(path)

    def leave(self, path: str, *_: Any) -> None:
        if self.path and self.path[-1] == path:
            self.path.pop()

    def full_name(self, name: str) -> str | None:
        """The whole path of a tap here, if this listener wants it."""
        if not self.path:  # another model runs
            return None
        path = f"{self.path[-1]}.{name}" if self.path[-1] else name
        return path if any(fnmatchcase(path, pattern) for pattern in self.patterns) else None


def _ignore(name: str, x: Tensor) -> None:
    pass


_listeners: list[_Listener] = []


@torch._disable_dynamo  # torch.compiler.disable would import the compiler with us
def _tell(x: Tensor, name: str) -> None:
    if _recomputing():
        return
    for listener in tuple(_listeners):
        path = listener.full_name(name)
        if path is not None:
            listener.handler(path, x.detach())


@torch._disable_dynamo  # torch.compiler.disable would import the compiler with us
def _somebody_wants(name: str) -> bool:
    return not _recomputing() and any(listener.full_name(name) is not None for listener in _listeners)


def _recomputing() -> bool:
    # The number of the backward pass that runs in this thread, -1 if none does.
    return bool(torch._C._current_graph_task_id() != -1)
