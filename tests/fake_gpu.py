"""A GPU without one: fake CUDA tensors, on which a wait of the host for the device can be made an error.

    with fake_gpu() as gpu:         shapes, dtypes and devices are computed as on a GPU; there are no values
        optimizer.step()            may create state and copy constants
        with gpu.no_waits():
            optimizer.step()

An error: reading a value on the host, an operation whose shape depends on values, a copy between host and device that
is not asynchronous, a tensor made on the device from numbers of the host, tensors of two devices in one operation.
Kernels are not run: the ops are, as far as their fake implementation. `fake_gpu("mps")` is an Apple GPU, on which a
tensor in float64 is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.ops import backends
from trimtab.ops.step import storage

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default, aten.equal.default}
READS |= {aten.masked_select.default, aten.is_nonzero.default, aten.unique_dim.default, aten.bincount.default}


class HostWait(AssertionError):
    """The host would wait for the device."""


def is_on_gpu(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type in ("cuda", "mps")


class _Watcher(TorchDispatchMode):
    strict = False

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        self.strict = True
        yield
        self.strict = False

    def wait(self, why: str) -> None:
        if self.strict:
            raise HostWait(why)

    def check_copy(self, source: Tensor, target: Any, non_blocking: bool = False) -> None:
        if source.device.type != torch.device(target).type and not non_blocking:
            self.wait(f"{tuple(source.shape)} values are copied from {source.device} to {target}")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if function in READS and any(map(is_on_gpu, tensors)):
            self.wait(f"{function} reads a value of the device")
        if function is aten._to_copy.default:
            self.check_copy(args[0], kwargs.get("device") or args[0].device, kwargs.get("non_blocking", False))
        if function is aten.copy_.default:
            self.check_copy(args[1], args[0].device, *args[2:], **kwargs)
        made = function(*args, **kwargs)
        results = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        if any(x.device.type == "mps" and x.dtype == torch.float64 for x in results):
            raise TypeError(f"{function} makes a tensor in float64, which this device does not have")
        return made


class _Indexing(TorchFunctionMode):
    """Python's indexing and copies ask for the CUDA runtime, which this PyTorch may not have.

    Tensors made from numbers are found here too.
    """

    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function in (torch.tensor, torch.as_tensor) and not is_on_gpu(args[0])
        if made and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            self._watcher.wait(f"{function.__name__} copies {args[0]!r} to the device")
        if function is Tensor.__getitem__ and is_on_gpu(args[0]):
            return self._get(*args)
        if function is Tensor.__setitem__ and is_on_gpu(args[0]):
            target, index, value = args
            view = self._get(target, index)
            self._copy(view, value) if isinstance(value, Tensor) else view.fill_(value)
            return None
        if function is Tensor.__bool__ and not is_on_gpu(args[0]):
            return False  # of a check on the host, which has no values here either
        if function in (Tensor.nonzero, torch.nonzero):
            self._watcher.wait("the shape of nonzero depends on values")
        if function is Tensor.__invert__:
            return torch.bitwise_not(*args)
        if function is Tensor.contiguous and is_on_gpu(args[0]) and not args[0].is_contiguous():
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        if function is Tensor.copy_ and is_on_gpu(args[0]):
            return self._copy(*args, **kwargs)
        return function(*args, **kwargs)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        self._watcher.check_copy(source, target.device, non_blocking)
        torch.broadcast_shapes(target.shape, source.shape)
        return target

    def _get(self, x: Tensor, index: Any) -> Tensor:
        parts, dim = index if isinstance(index, tuple) else (index,), 0
        for i in parts:
            if i is Ellipsis:
                dim = x.dim() - sum(isinstance(later, int | slice) for later in parts[parts.index(i) + 1 :])
            elif isinstance(i, int):
                x = x.select(dim, i)
            elif isinstance(i, slice):
                start, stop, step = i.indices(x.shape[dim])
                assert step == 1
                x, dim = x.narrow(dim, start, max(0, stop - start)), dim + 1
            elif i is None:
                x, dim = x.unsqueeze(dim), dim + 1
            else:
                raise HostWait(f"the index {i!r} is copied to the device, or its shape depends on values")
        return x


@contextmanager
def fake_gpu(device: str = "cuda") -> Iterator[_Watcher]:
    kept = (storage._on_device, storage._load_books)  # their tensors belong to one mode
    for function in kept:
        function.cache_clear()
    watcher, stream = _Watcher(), SimpleNamespace(synchronize=lambda: None)
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True), watcher, _Indexing(watcher):
        patch.setattr(backends, "triton_missing", None if device == "cuda" else "no CUDA device")
        patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield watcher
    for function in kept:
        function.cache_clear()
