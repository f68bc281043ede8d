"""nanoGPT's loop with 8-bit optimizer state. Run: python examples/nanogpt.py

The model has nanoGPT's shape and names (wte, wpe, h, lm_head tied to wte); the text is a file of the standard library.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

import trimtab as tt  # line 1

CONTEXT, WIDTH = 64, 64


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        embeddings = {"wte": nn.Embedding(256, WIDTH), "wpe": nn.Embedding(CONTEXT, WIDTH)}
        self.transformer = nn.ModuleDict(embeddings | {"h": blocks, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        for embedding in embeddings.values():
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        t, mask = self.transformer, nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = t["h"](t["wte"](x) + t["wpe"](torch.arange(x.shape[1])), mask=mask, is_causal=True)
        return F.cross_entropy(self.lm_head(t["ln_f"](hidden)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay: float, lr: float, betas: tuple[float, float]) -> tt.optim.AdamW:
        # In place of two lists of parameters, with and without decay, and torch.optim.AdamW(lists, …)
        return tt.optim.AdamW.for_model(self, lr=lr, betas=betas, weight_decay=weight_decay, bits=8)  # line 2


def main(steps: int = 60) -> SimpleNamespace:
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    model, losses = GPT(), []
    optimizer = model.configure_optimizers(0.1, 3e-3, (0.9, 0.95))
    for _ in range(steps):
        rows = torch.stack([text[i : i + CONTEXT + 1] for i in torch.randint(len(text) - CONTEXT - 1, (16,)).tolist()])
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}\n{optimizer.describe().summary()}")
    return SimpleNamespace(losses=losses, optimizer=optimizer)


if __name__ == "__main__":
    main()
