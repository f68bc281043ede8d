"""An embedding that is stable with 8-bit optimizers and high learning rates.

Word frequencies are very uneven (Zipf's law), so a few rows get very large gradients. Three remedies, each optional:
Xavier uniform initialisation, which has no extreme values; a LayerNorm before positions are added, which also bounds
the gradient; and 32-bit optimizer state.

Dettmers et al. 2022, section 2.3 and appendix C.
"""

import torch
from torch import Tensor, nn


class StableEmbedding(nn.Embedding):
    """A drop-in replacement of `nn.Embedding` for words. Do not add the norm to a model that was trained without it.

    Args:
        xavier: uniform weights within sqrt(6 / (words + width)); False keeps PyTorch's standard normal.
        norm: apply a LayerNorm with gain and bias to the rows, with sums in float32.
        keep32: `trimtab.optim.groups` gives this embedding 32-bit optimizer state.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        xavier: bool = True,
        norm: bool = True,
        keep32: bool = True,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.xavier, self.keep32 = xavier, keep32
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(embedding_dim, eps=norm_eps, device=device, dtype=dtype) if norm else None

    def reset_parameters(self) -> None:
        if self.xavier:
            nn.init.xavier_uniform_(self.weight)
            self._fill_padding_idx_with_zero()
        else:
            super().reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        rows = super().forward(tokens)
        # PyTorch sums in float32; under autocast on a GPU it also returns float32.
        return rows if self.norm is None else self.norm(rows).to(rows.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, xavier={self.xavier}, keep32={self.keep32}"
