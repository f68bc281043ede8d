"""Batches of text: windows of `context` tokens, and for each token the next one as target.

    tokens      ... a b c d | e f g h | ...          one window = context + 1 tokens; the next one begins with its last
    window 0        a b c d   e                      token, so every token is the target of exactly one position
    window 1                e f g h   i

The position counts rows since the start of training. Row r is place r mod N of epoch r div N, with N windows per epoch;
a batch is the next rows and may span two epochs. All processes count the rows of the global batch and each returns its
own part. The position is therefore equal in all processes, and a run can resume with another number of processes.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.data.corpus import Corpus
from trimtab.data.files import show
from trimtab.data.order import ROUNDS, Ordered, epoch_keys, permute


class TextBatches(Ordered):
    """Endless batches of one split, in an order that depends only on the seed.

    Args:
        context: tokens per row.
        seed: defines a permutation of the windows for every epoch.
        rank: number of this process.
        world: number of processes; each returns its part of every batch.

    Attributes:
        windows: number of windows in an epoch.
        position: rows returned so far, by all processes together.
    """

    def __init__(
        self, corpus: Corpus, split: str = "train", *, context: int, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        if type(context) is not int or context < 1:
            raise ValueError(f"context must be a positive integer, got {context!r}")
        # A plain array: slices of the subclass np.memmap take several times as long.
        self.source = np.asarray(corpus.tokens(split))
        size = len(self.source)
        identity = {"corpus": corpus.sha256, "vocab": corpus.vocab, "split": split, "context": context, "tokens": size}
        super().__init__(seed, rank, world, identity)
        if size < context + 1:
            advice = f"try context={size - 1} or less" if size > 1 else "give a longer text"
            raise ValueError(
                f"the {split} split of {show(corpus.name)} has {size} tokens, shorter than one window of "
                f"context={context} and the token after it; {advice}"
            )
        self.context = context
        self.windows, self.spare = divmod(size - 1, context)

    @property
    def epoch(self) -> float:
        """Epochs returned so far."""
        return self.position / self.windows

    def next(self, batch: int) -> dict[str, Tensor]:
        """This process's rows of the next global batch: int64 `tokens` and `targets`, [batch / world, context]."""
        share = self.share(batch)
        first = self.position + self.rank * share
        starts = self.find(np.arange(first, first + share))
        rows = np.stack([self.source[start : start + self.context + 1] for start in starts.tolist()])
        self.position += batch
        # Shifted before a sequence length warmup cuts the rows: the last kept token has its true next token as target.
        return {
            "tokens": torch.from_numpy(rows[:, :-1].astype(np.int64)),
            "targets": torch.from_numpy(rows[:, 1:].astype(np.int64)),
        }

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of the first token of each row's window."""
        epochs, places = np.divmod(rows, self.windows)
        starts = np.empty_like(rows)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            windows = permute(places[here], self.windows, self.seed, epoch)
            starts[here] = windows * self.context + self._offset(epoch)
        return starts

    def _offset(self, epoch: int) -> int:
        """Tokens skipped at the beginning: 0 in the first epoch, which defines a full evaluation. Later epochs shift
        by part of the incomplete last window, so that its tokens are used too."""
        return int(epoch_keys(self.seed, epoch)[ROUNDS]) % (self.spare + 1) if epoch else 0
