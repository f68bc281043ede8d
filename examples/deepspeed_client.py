"""DeepSpeed with an 8-bit optimizer of trimtab as its client optimizer. Run: deepspeed examples/deepspeed_client.py

ZeRO stage 0: the weights are bfloat16, DeepSpeed keeps float32 copies and trimtab updates these. Stages 1 to 3
concatenate tensors and are refused.
"""

import os
import tempfile
from types import SimpleNamespace

import deepspeed
import torch
from torch import nn

import trimtab as tt  # line 1

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 0},
}


def main(steps: int = 40) -> SimpleNamespace:
    if "RANK" not in os.environ:  # python instead of the launcher
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29511")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer = tt.optim.StableAdamW.for_model(model, lr=1e-2, bits=8)  # line 2
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    rows = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0)).to(engine.device)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(engine(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)  # 8-bit state continues bit for bit
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}\n{optimizer.describe().summary()}")
    return SimpleNamespace(losses=losses, optimizer=optimizer)


if __name__ == "__main__":
    main()
