"""One process or many: rank, device, collectives, random generators, and how a model is distributed.

`torchrun --nproc-per-node 2 -m trimtab train ...` starts several, with gloo on CPUs and NCCL on GPUs. With one process
all of this does nothing.
"""

import hashlib
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
T = TypeVar("T")
# Words in the errors of gloo and NCCL when another process does not answer.
_LOST = ("connection", "peer", "timed out", "timeout", "broken pipe", "gloo", "nccl")


class ProcessLost(RuntimeError):
    """Another process has ended, so this one cannot continue."""


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
        """The mean over all processes."""
        if self.world == 1:
            return x
        x = x.detach().clone()
        dist.all_reduce(x)
        return x / self.world

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process. All must decide alike, or the next collective hangs."""
        return bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Call `work` on the first process; all return its result. Its OSError or RunError is raised by all, so that
        none waits forever."""
        result: Any = None
        error: OSError | RunError | None = None
        try:
            if self.rank == 0:
                result = work()
        except (OSError, RunError) as caught:
            error = caught
        first_result, first_error = self.gather((result, error))[0]
        if first_error is not None:
            raise error or first_error
        return cast(T, first_result)

    def seed_generators(self, seed: int, step: int) -> None:
        """Start random numbers that differ between processes."""
        digest = hashlib.sha256(f"{seed}:{step}:{self.rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "big"))

    def read_generators(self) -> list[dict[str, str]]:
        """The states of the random generators of all processes, as hexadecimal text for JSON."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return self.gather({name: bytes(x.tolist()).hex() for name, x in states.items()})

    def restore_generators(self, saved: list[dict[str, str]]) -> None:
        states = {name: torch.tensor(list(bytes.fromhex(x)), dtype=torch.uint8) for name, x in saved[self.rank].items()}
        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)

    @contextmanager
    def locked(self, folder: Path, *, numbered: bool = False) -> Iterator[Path]:
        """The first process locks the folder, as `lock_folder` does. All raise RunError if it is in use."""
        with ExitStack() as stack:
            yield self.run_on_first(lambda: stack.enter_context(lock_folder(folder, numbered=numbered)))

    def is_lost(self, error: RuntimeError) -> bool:
        """Whether an error means that another process has ended."""
        return self.world > 1 and any(word in str(error).lower() for word in _LOST)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with DDP or FSDP2."""
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
        """The context of a micro-batch's backward pass: gradients are exchanged only after the last one."""
        if self.world == 1 or last:
            return nullcontext()
        if self.parallel == "ddp":
            return model.no_sync()  # type: ignore[operator]
        stack, set_sync = ExitStack(), cast(Any, model).set_requires_gradient_sync
        set_sync(False)
        stack.callback(set_sync, True)
        return stack


@contextmanager
def processes(parallel: Parallel, threads: int | None = None) -> Iterator[Processes]:
    """Set the number of threads, and join the process group if torchrun started this process. Undone at the end."""
    gpus = torch.cuda.device_count()
    with ExitStack() as stack:
        if threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)
        if os.environ.get("WORLD_SIZE", "1") == "1" and not dist.is_initialized():
            yield Processes(device=torch.device("cuda" if gpus else "cpu"), parallel=parallel)
            return
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else CPU
        if not dist.is_initialized():
            if gpus:
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if gpus else "gloo")
            stack.callback(dist.destroy_process_group)
        yield Processes(dist.get_rank(), dist.get_world_size(), device, parallel)
