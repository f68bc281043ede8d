"""Batches of text: windows of `context` tokens with the token that follows each.

    tokens      ... a b c d | e f g h | ...          one window = context + 1 tokens; the next begins with its last,
    window 0        a b c d   e                      so every token is the target of exactly one
    window 1                e f g h   i

A position is a number of rows since the beginning of training. Row r is place r mod N of epoch r div N, N windows to an
epoch; a batch is the next rows and may straddle two epochs. All processes count the rows of the global batch and each
takes its own part, so the position of one is the position of all, and another number of processes goes on from it.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.data.corpus import Corpus
from trimtab.data.order import ROUNDS, check_rank, check_share, epoch_keys, permute, read_position


class TextBatches:
    """Endless batches of one split, in an order that depends on the seed alone.

    Args:
        context: tokens per row.
        seed: of the order; a permutation of the windows for every epoch.
        rank, world: which part of each batch is this process's.

    Attributes:
        windows: how many make an epoch.
        position: rows handed out to all processes together.
    """

    def __init__(
        self, corpus: Corpus, split: str = "train", *, context: int, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        check_rank(rank, world)
        if type(context) is not int or context < 1:
            raise ValueError(f"context must be a positive integer, got {context!r}")
        # The plain array behind the map: np.memmap is a subclass whose slices take several times as long.
        self.source = np.asarray(corpus.tokens(split))
        if len(self.source) < context + 1:
            advice = f"try context={len(self.source) - 1} or less" if len(self.source) > 1 else "give a longer text"
            raise ValueError(
                f"the {split} split of {corpus.name} has {len(self.source)} tokens, shorter than one window of "
                f"context={context} and the token after it; {advice}"
            )
        self.context, self.seed, self.rank, self.world = context, seed, rank, world
        self.windows, self.spare = divmod(len(self.source) - 1, context)
        self.position = 0
        self._identity = {"corpus": corpus.sha256, "vocab": corpus.vocab, "split": split} | {
            "context": context,
            "seed": seed,
            "tokens": len(self.source),
        }

    @property
    def epoch(self) -> float:
        """Epochs handed out so far."""
        return self.position / self.windows

    def next(self, batch: int) -> dict[str, Tensor]:
        """This process's rows of the next global batch: int64 `tokens` and `targets`, [batch / world, context]."""
        share = check_share(batch, self.world)
        first = self.position + self.rank * share
        starts = self.find(np.arange(first, first + share))
        rows = np.stack([self.source[start : start + self.context + 1] for start in starts.tolist()])
        self.position += batch
        # Shifted here, before anybody cuts: the last token kept still has its true successor as target.
        return {
            "tokens": torch.from_numpy(rows[:, :-1].astype(np.int64)),
            "targets": torch.from_numpy(rows[:, 1:].astype(np.int64)),
        }

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the tokens the windows of these rows begin."""
        epochs, places = np.divmod(rows, self.windows)
        starts = np.empty_like(rows)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            windows = permute(places[here], self.windows, self.seed, epoch)
            starts[here] = windows * self.context + self._offset(epoch)
        return starts

    def state(self) -> dict[str, Any]:
        """The position, and what it is a position in; JSON."""
        return {**self._identity, "position": self.position}

    def load(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken, with any number of processes."""
        self.position = read_position(state, self._identity)

    def _offset(self, epoch: int) -> int:
        """Tokens left out at the beginning. The first epoch starts at token 0, which defines a full evaluation; later
        ones shift by what does not fill a window, so that no tail is left out for ever."""
        return int(epoch_keys(self.seed, epoch)[ROUNDS]) % (self.spare + 1) if epoch else 0
