"""Counts and limits the compilations of torch.compile: one per shape of a batch.

Each length is compiled separately (`dynamic=False`), because a kernel for one length is faster than one for all. The
warmup's `multiple` or `lengths` decide how many lengths there are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from trimtab.train.config import RunConfig


def batch_sizes(config: RunConfig) -> range:
    batch = config.batch_warmup
    return range(batch.start, batch.end + 1, batch.increment)


def count_shapes(config: RunConfig) -> int:
    lengths = {length for _, length in config.seqlen_warmup.table(config.steps)}
    return len(lengths) * (len(batch_sizes(config)) if config.micro_batch is None else 1)


@contextmanager
def limit_compilations(most: int | None) -> Iterator[Callable[[], int]]:
    """Raise dynamo's recompile limit, beyond which it would silently run uncompiled. Yields a function that counts."""
    if most is None:
        yield lambda: 0
        return
    from torch._dynamo import config as dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # compilations of an earlier run in this process would count
    before = counters["stats"]["unique_graphs"]
    limits = {key: max(getattr(dynamo, key), most) for key in ("recompile_limit", "accumulated_recompile_limit")}
    with dynamo.patch(**limits, fail_on_recompile_limit_hit=True):
        yield lambda: int(counters["stats"]["unique_graphs"] - before)
