"""Train a timm vision transformer with int8 layers and an 8-bit StableAdamW.

    pip install trimtab timm
    python examples/timm_vit.py                 about ten seconds; no download

The pictures are stripes in four directions. In timm's own `train.py`, change the same two lines: one after
`create_model`, and the one with `create_optimizer_v2`.
"""

import math

import timm
import torch
from torch import Tensor
from torch.nn import functional as F

import trimtab as tt

STEPS, BATCH, SIZE, CLASSES = 20, 32, 32, 4


def draw_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    angle = (labels * math.pi / CLASSES)[:, None, None]
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    shift = 6 * torch.rand(BATCH, 1, 1, generator=generator)
    stripes = torch.sin(x * angle.cos() + y * angle.sin() + shift)
    return stripes[:, None].expand(-1, 3, -1, -1) + torch.randn(BATCH, 3, SIZE, SIZE, generator=generator), labels


def main() -> None:
    torch.manual_seed(0)
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 128, "depth": 3, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=CLASSES, **sizes)

    report = tt.nn.convert_linears(model, "switchback", when="always")  # <- added; `when` only because it is so small
    print(str(report).splitlines()[0])
    optimizer = tt.optim.StableAdamW(tt.optim.groups(model, lr=1e-3, weight_decay=0.05), lr=1e-3, bits=8)  # <- changed

    generator = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        images, labels = draw_batch(generator)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == 1:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
