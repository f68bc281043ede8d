"""Two processes on the CPU, talking through gloo, for tests of what runs on several machines.

They are started once and live through the session: loading torch takes them seconds. A function under
`@on_two_processes` runs in both; what fails there fails here, with its traceback.
"""

import functools
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.pool import Pool
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PROCESSES = 2
PATIENCE_S = 60  # for one test; a process that waits for the other gives up sooner, and says where


class Pair:
    """Two processes that run the same function. One that fails or hangs takes the pair with it; a new one follows."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []

    def run(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            if not self.pools:
                self._start()
            self._wait([pool.apply_async(report, (function, *args), kwargs) for pool in self.pools])
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pools = [context.Pool(1) for _ in range(PROCESSES)]
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on any free port
        self._wait([pool.apply_async(report, (join, rank, self.store.port)) for rank, pool in enumerate(self.pools)])

    def _wait(self, answers: list[Any]) -> None:
        # The first to fail is the one to report: the other only waits for it.
        deadline = time.monotonic() + PATIENCE_S
        while not all(answer.ready() for answer in answers):
            for answer in answers:
                if answer.ready() and not answer.successful():
                    answer.get()
            if time.monotonic() > deadline:
                late = [rank for rank, answer in enumerate(answers) if not answer.ready()]
                raise TimeoutError(f"processes {late} are not done after {PATIENCE_S} s")
            time.sleep(0.002)
        for answer in answers:
            answer.get()

    def stop(self) -> None:
        for pool in self.pools:
            pool.terminate()
            pool.join()
        self.pools = []


PAIR = Pair()


def report(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Every failure as text: a `pytest.fail` would end the process, and not every exception can be sent."""
    try:
        function(*args, **kwargs)
    except BaseException:
        raise AssertionError(f"in a process of its own:\n{traceback.format_exc()}") from None


def join(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the parameters have no names", UserWarning)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=20))


def on_two_processes(function: Callable[..., None]) -> Callable[..., None]:
    """Called in one of the two it is the function; called from outside it runs in both at once."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            function(*args, **kwargs)
        else:
            PAIR.run(run, *args, **kwargs)

    return run


@on_two_processes
def together(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """What one process can do as well, done by both."""
    function(*args, **kwargs)


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (PROCESSES,))
