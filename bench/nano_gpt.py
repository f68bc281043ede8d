"""The model of nanoGPT (github.com/karpathy/nanoGPT) in plain PyTorch modules, for comparison.

The architecture and the settings of its training script: pre-norm, no biases, one product for queries, keys and values,
PyTorch's fused attention, exact GELU, a tied head, learned positions, cross entropy over all logits at once. Its
optimizer: AdamW with weight decay on matrices only.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = (batch, time, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).contiguous().view(batch, time, width))
        return out


class NanoGPT(nn.Module):
    def __init__(self, *, vocab: int, context: int, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(NanoBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        x = self.norm(self.blocks(self.embedding(tokens) + self.positions(positions)))
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


def decay_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, object]]:
    """Matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
