"""One process or many: who we are, how a model is spread, and sums over all of us.

`torchrun --nproc-per-node 2 -m trimtab train ...` starts several; gloo on CPUs, NCCL on GPUs. Everything here does
nothing where there is only one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.runs import RunError, lock_folder
from trimtab.train.config import Parallel

CPU = torch.device("cpu")
Result = TypeVar("Result")
# What gloo and NCCL say when somebody no longer answers.
_LOST = ("connection", "peer", "timed out", "timeout", "broken pipe", "gloo", "nccl")


class ProcessLost(RuntimeError):
    """One of several processes has died, so the others cannot go on."""


@dataclass(frozen=True)
class Processes:
    rank: int = 0
    world: int = 1
    device: torch.device = CPU
    parallel: Parallel = "ddp"

    @property
    def sharded(self) -> bool:
        return self.world > 1 and self.parallel == "fsdp2"

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def mean(self, x: Tensor) -> Tensor:
        """The mean of a tensor over all processes, weighted alike."""
        if self.world == 1:
            return x
        x = x.detach().clone()
        dist.all_reduce(x)
        return x / self.world

    def any(self, flag: bool) -> bool:
        """Whether one of us says so. Decisions must be made together, or the next collective hangs."""
        if self.world == 1:
            return flag
        x = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(x)
        return bool(x > 0)

    def gather(self, value: Any) -> list[Any]:
        """What each process says, in the order of ranks."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def together(self, work: Callable[[], Result]) -> Result:
        """Run `work` on every process. An OSError or RunError of one is raised by all, so that none waits forever."""
        result: Result | None = None
        error: OSError | RunError | None = None
        try:
            result = work()
        except (OSError, RunError) as caught:
            error = caught
        for failed in self.gather(error):
            if failed is not None:
                raise error or failed
        return cast(Result, result)

    @contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """The first process locks the folder. All raise RunError if it is in use."""
        with ExitStack() as stack:
            self.together(lambda: stack.enter_context(lock_folder(folder)) if self.rank == 0 else None)
            yield

    def lost(self, error: RuntimeError) -> bool:
        """Whether an error means that another process is gone."""
        return self.world > 1 and any(word in str(error).lower() for word in _LOST)

    def spread(self, model: nn.Module) -> nn.Module:
        """The model as the loop calls it."""
        if self.world == 1:
            return model
        if self.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            for block in getattr(module, "blocks", ()):
                fully_shard(block)
        return fully_shard(model)  # type: ignore[return-value]

    def accumulate(self, model: nn.Module, last: bool) -> Any:
        """Around the backward pass of a micro-batch: gradients are exchanged only after the last."""
        if self.world == 1 or last:
            return nullcontext()
        if self.parallel == "ddp":
            return model.no_sync()  # type: ignore[operator]
        return _unsynced(model)


@contextmanager
def _unsynced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextmanager
def processes(parallel: Parallel) -> Iterator[Processes]:
    """Join the others if torchrun started us, and leave them at the end."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if world == 1 and not dist.is_initialized():
        yield Processes(device=torch.device("cuda" if gpus else "cpu"), parallel=parallel)
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    started = not dist.is_initialized()
    if started:
        if gpus:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if gpus else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device, parallel)
    finally:
        if started:
            dist.destroy_process_group()
