"""How much an 8-bit data type distorts Adam's update, and where (Dettmers et al. 2022, appendix F).

A 32-bit optimizer runs as usual. At each `observe`, its moments are quantized and dequantized by the method under test,
and the resulting update is compared with the exact one:

    u = m / (√v + eps)      absolute error |u8 - u|       relative error |u8 - u| / |u + 1e-6|

Counts and errors are summed by (code of m, code of v), in the order of the codes' values. A good data type has small
errors where the counts are high.
"""

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from trimtab.ops import codebook
from trimtab.ops.blockwise import dequantize_blockwise, quantize_blockwise
from trimtab.ops.step.quadratic import decode_moments, encode_moments

Method = Literal["quadratic", "dynamic-symmetric", "dynamic", "linear", "quantile"]


class ErrorAnalysis:
    """Sum the errors that 8-bit state would cause, from the moments of an Adam-like optimizer with 32-bit state.

    >>> analysis = ErrorAnalysis("dynamic", block=2048)
    >>> optimizer.step(); analysis.observe(optimizer)
    >>> analysis.mean_relative_error, analysis.counts                # a number, and a 256 x 256 histogram

    Args:
        method: the data type; "quadratic" is what the optimizers use by default.
        block: values per scale; None is one scale for the whole tensor.
        eps: as in the update.
        smallest: tensors with fewer values are left out.
        largest: tensors with more values are left out, as the paper leaves out embeddings.
    """

    def __init__(
        self,
        method: Method = "quadratic",
        *,
        block: int | None = 256,
        eps: float = 1e-8,
        smallest: int = 8193,
        largest: int = 50_000_000,
    ) -> None:
        if method not in get_args(Method):
            raise ValueError(f"unknown method {method!r}; choose one of {', '.join(get_args(Method))}")
        if method == "quantile" and block is not None:
            raise ValueError("quantiles are those of a whole tensor; use block=None with method='quantile'")
        self.method, self.block, self.eps, self.smallest, self.largest = method, block, eps, smallest, largest
        self.counts, self.absolute, self.relative = (torch.zeros(256, 256, dtype=torch.float64) for _ in range(3))
        self._count = 0

    @torch.no_grad()
    def observe(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the optimizer's current state to the histograms."""
        if not optimizer.state:
            raise ValueError("the optimizer has no state yet; call observe after its first step")
        self._count += 1
        for state in optimizer.state.values():
            if "exp_avg_codes" in state:
                raise ValueError("this optimizer's state is already quantized; use one with bits=32")
            if "exp_avg" not in state or "exp_avg_sq" not in state:
                needed = "the analysis needs exp_avg and exp_avg_sq in 32 bits"
                raise ValueError(f"{needed}, the state has {', '.join(state)}")
            m, v = state["exp_avg"], state["exp_avg_sq"]
            if self.smallest <= m.numel() <= self.largest:
                self._add(m.float().contiguous(), v.float().contiguous())

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Deprecated: use `observe`."""
        warnings.warn("ErrorAnalysis.look is now ErrorAnalysis.observe", DeprecationWarning, stacklevel=2)
        self.observe(optimizer)

    @property
    def mean_absolute_error(self) -> float:
        return float(self.absolute.sum() / self.counts.sum())

    @property
    def mean_relative_error(self) -> float:
        return float(self.relative.sum() / self.counts.sum())

    def _add(self, m: Tensor, v: Tensor) -> None:
        (m_codes, m8), (v_codes, v8) = self._round(m, v)
        u, u8 = m / (v.sqrt() + self.eps), m8 / (v8.sqrt() + self.eps)
        error = (u8 - u).abs().double()
        cell = (m_codes.long() * 256 + v_codes.long()).flatten().cpu()
        for histogram, values in (
            (self.counts, torch.ones_like(error)),
            (self.absolute, error),
            (self.relative, error / (u + 1e-6).abs()),
        ):
            histogram.view(-1).index_add_(0, cell, values.flatten().cpu())

    def _round(self, m: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The codes of m and of v, and what they decode to."""
        if self.method == "quadratic":
            block = self.block or m.numel()
            stored = encode_moments([m, v], "mv", block, step=self._count)
            m8, v8 = decode_moments([c for c, _ in stored], [a for _, a in stored], "mv", block)
            return [(stored[0][0].view(torch.int8).int() + 128, m8), (stored[1][0], v8)]
        return [self._round_one(m, signed=True), self._round_one(v, signed=False)]

    def _round_one(self, x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        if self.method == "quantile":
            book = codebook.quantile(x)
            codes = torch.bucketize(x, codebook.midpoints(book))
            return codes, book[codes]
        assert self.method != "quadratic"
        book = codebook.load_codebook(self.method, signed=signed).to(x.device)
        block = self.block or x.numel()
        codes, absmax = quantize_blockwise(x, book, block=block)
        return codes, dequantize_blockwise(codes, absmax, book, block=block)
