"""Accelerate's loop with 8-bit optimizer state, saved and resumed. Run: python examples/accelerate_loop.py

`accelerate launch` runs the same file on several devices, with DDP or FSDP2.
"""

import tempfile
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from torch import nn

import trimtab as tt  # line 1


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))


def main(steps: int = 40) -> SimpleNamespace:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build()
    optimizer = tt.optim.StableAdamW.for_model(model, lr=1e-2, bits=8)  # line 2; before prepare
    rows = torch.randint(256, (64, 33), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(losses) < steps:
            for row in loader:
                with accelerator.accumulate(model):
                    logits = model(row[:, :-1])
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        accelerator.save_state(folder)
        accelerator.load_state(folder)  # 8-bit state continues bit for bit
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}\n{optimizer.optimizer.describe().summary()}")
    return SimpleNamespace(losses=losses, optimizer=optimizer.optimizer)


if __name__ == "__main__":
    main()
