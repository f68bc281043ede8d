"""Moments in host memory, parameters on a GPU: a kernel gets them window by window.

    for window in cut(batch):                            at most WINDOW values; long tensors are cut at whole blocks
        kernel(window.batch, window.rows(rows))          the first access to a moment copies it to the device
        window.write_back()                              only after a step

All copies are on the current stream, in order with the kernels, and do not wait. The optimizer waits for the stream at
the end of the step, so that the state in host memory can be read then.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.ops.sharding import flat
from trimtab.ops.step.split import KEPT

if TYPE_CHECKING:
    from trimtab.ops.step.storage import Batch

WINDOW = 1 << 24


class Staged(dict[str, Any]):
    """The state of one piece of a tensor. Its values are copies on the device, made when they are first read."""

    def __init__(self, state: dict[str, Any], here: slice, block: int, device: torch.device) -> None:
        super().__init__()
        self._state, self._here, self._device = state, here, device
        self._blocks = slice(here.start // block, -(-here.stop // block))

    def __missing__(self, key: str) -> Tensor:
        kept = self.kept(key)
        self[key] = copy = torch.empty(kept.shape, dtype=kept.dtype, device=self._device)
        return copy.copy_(kept, non_blocking=True)

    def __contains__(self, key: object) -> bool:
        return key in self._state

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._state else default

    def kept(self, key: str) -> Tensor:
        """The piece in host memory."""
        value: Tensor = self._state[key]
        return value[self._blocks] if key.endswith("_absmax") else flat(value).view(-1)[self._here]

    def write_back(self) -> None:
        for key, copy in self.items():
            self.kept(key).copy_(copy, non_blocking=True)


@dataclass
class Window:
    batch: "Batch"  # of pieces, which are flat
    places: list[int]  # the index of each piece's tensor in the batch that was cut

    def rows(self, rows: Tensor) -> Tensor:
        return torch.stack([rows[i] for i in self.places])

    def write_back(self) -> None:
        for state in self.batch.kept:
            assert isinstance(state, Staged)
            state.write_back()


def is_away(batch: "Batch") -> bool:
    """Whether a kernel cannot read the state where it is."""
    if not batch.params or isinstance(batch.kept[0], Staged):
        return False
    keys = batch.storage.keys(batch.names[0])[:1] if batch.names else KEPT.values()
    found = next((state[key] for state in batch.kept for key in keys if key in state), None)
    return found is not None and bool(found.device != batch.params[0].device)


def wait_for_copies(batches: Sequence["Batch"]) -> None:
    """Then the state in host memory is that of this step."""
    for device in {p.device for batch in batches for p in batch.params if p.device.type != "cpu"}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        else:
            torch.get_device_module(device).synchronize()


def check_not_captured() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step with offload waits for its copies, so it cannot be captured in a CUDA graph; call step() outside "
            "the graph, or leave offload out"
        )


def cut(batch: "Batch") -> Iterator[Window]:
    block = batch.storage.block
    length = max(block, WINDOW // block * block)
    pieces: list[tuple[int, slice]] = []
    room = WINDOW
    for i, p in enumerate(batch.params):
        for start in range(0, max(1, p.numel()), length):
            here = slice(start, min(start + length, p.numel()))
            if pieces and here.stop - start > room:
                yield _make(batch, pieces)
                pieces, room = [], WINDOW
            pieces.append((i, here))
            room -= here.stop - start
    if pieces:
        yield _make(batch, pieces)


def sum_windows(batch: "Batch", rows: Tensor, measure: Callable[["Batch", Tensor], Tensor]) -> Tensor:
    """A sum per tensor, or several, from those of its pieces."""
    sums: dict[int, Tensor] = {}
    for window in cut(batch):
        for i, part in zip(window.places, measure(window.batch, window.rows(rows)).unbind(), strict=True):
            sums[i] = sums[i] + part if i in sums else part
    return torch.stack([sums[i] for i in range(len(batch.params))])


def _make(batch: "Batch", pieces: list[tuple[int, slice]]) -> Window:
    places = [i for i, _ in pieces]
    part = replace(
        batch,
        owners=[batch.owners[i] for i in places],
        where=[batch.where[i] for i in places],
        params=[batch.params[i].view(-1)[here] for i, here in pieces],
        grads=[batch.grads[i].view(-1)[here] for i, here in pieces],
        kept=[Staged(batch.kept[i], here, batch.storage.block, batch.params[i].device) for i, here in pieces],
        starts=[here.start for _, here in pieces],
    )
    part.steps = torch.stack([batch.steps[i] for i in places])
    return Window(part, places)
