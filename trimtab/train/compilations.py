"""How often torch.compile compiles: once for each shape of a batch, and never silently not at all.

Lengths are compiled one by one (`dynamic=False`), because a kernel for one length is faster than a kernel for all. The
warm-up's `multiple` or `lengths` decide how many there are.
"""

from typing import Any

import torch

from trimtab.train.config import RunConfig


def batch_sizes(config: RunConfig) -> range:
    batch = config.batch_warmup
    return range(batch.start, batch.end + 1, batch.increment)


class Compilations:
    """Counts what torch.compile does: once for each shape of a batch, and never silently not at all."""

    def __init__(self, config: RunConfig) -> None:
        lengths = {length for _, length in config.seqlen_warmup.table(config.steps)}
        self.most = len(lengths) * (len(batch_sizes(config)) if config.micro_batch is None else 1)
        self.compiles = config.compile

    def __enter__(self) -> "Compilations":
        if self.compiles:
            from torch._dynamo import config as dynamo

            torch._dynamo.reset()  # what an earlier run in this process compiled would count against the limit
            # Beyond its limit dynamo would run uncompiled and hardly say so.
            limits = {
                name: max(getattr(dynamo, name), self.most)
                for name in ("recompile_limit", "accumulated_recompile_limit")
            }
            self._patch = dynamo.patch(**limits, fail_on_recompile_limit_hit=True)
            self._patch.__enter__()
            self._before = self._now()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.compiles:
            self._patch.__exit__(*error)

    @property
    def count(self) -> int:
        return self._now() - self._before

    @staticmethod
    def _now() -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])
