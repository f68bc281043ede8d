"""A language model that is not Trimtab's: PyTorch's own encoder layers with a causal mask, and learned positions.

`bench.forecasts` uses it as somebody's own model, `bench.other_gpt:build`. It has no taps, so its attention logits are
not measured.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.data import TextBatches, open_corpus

VOCAB, CONTEXT = 257, 64


class OtherGPT(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 16, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        logits = self.head(self.layers(x, mask=self.mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def count_params(self) -> int:
        return sum(p.numel() for p in self.layers.parameters() if p.dim() == 2)


def build(width: int = 64, depth: int = 3) -> tuple[nn.Module, Callable[[str, int], TextBatches]]:
    corpus = open_corpus("stdlib")
    return OtherGPT(width, depth), lambda split, seed: TextBatches(corpus, split, context=CONTEXT, seed=seed)
