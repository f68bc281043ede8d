"""Counts and limits the compilations of torch.compile: one per shape of a batch.

Each length is compiled separately (`dynamic=False`), because a kernel for one length is faster than one for all. The
warmup's `multiple` or `lengths` decide how many lengths there are.
"""

from typing import Any

import torch

from trimtab.train.config import RunConfig


def batch_sizes(config: RunConfig) -> range:
    batch = config.batch_warmup
    return range(batch.start, batch.end + 1, batch.increment)


class Compilations:
    """Raises dynamo's recompile limit, beyond which it would silently run uncompiled, to what the config needs."""

    def __init__(self, config: RunConfig) -> None:
        lengths = {length for _, length in config.seqlen_warmup.table(config.steps)}
        self.most = len(lengths) * (len(batch_sizes(config)) if config.micro_batch is None else 1)
        self.compiles = config.compile

    def __enter__(self) -> "Compilations":
        if self.compiles:
            from torch._dynamo import config as dynamo

            torch._dynamo.reset()  # compilations of an earlier run in this process would count
            names = ("recompile_limit", "accumulated_recompile_limit")
            limits = {name: max(getattr(dynamo, name), self.most) for name in names}
            self._patch = dynamo.patch(**limits, fail_on_recompile_limit_hit=True)
            self._patch.__enter__()
            self._before = self._total()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.compiles:
            self._patch.__exit__(*error)

    @property
    def count(self) -> int:
        return self._total() - self._before

    @staticmethod
    def _total() -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])
