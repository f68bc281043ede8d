"""Train an open_clip model with int8 layers and an 8-bit StableAdamW: the set-up of the SwitchBack paper.

    pip install trimtab open_clip_torch
    python examples/open_clip_int8.py           about ten seconds; no download

Pictures are coloured noise and captions name the colour. In open_clip's own training script, `open_clip_train/main.py`,
change the same two lines: one after `create_model_and_transforms`, and the one that makes the optimizer.
"""

import torch
from open_clip import CLIP, ClipLoss
from torch import Tensor

import trimtab as tt

STEPS, BATCH, SIZE, WORDS = 20, 32, 32, 64


def draw_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    colours = torch.rand(BATCH, 3, generator=generator)
    noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    levels = (colours * 9).long()  # a caption: three words of ten, and the end token, which has the largest id
    captions = torch.cat([levels + torch.tensor([1, 11, 21]), torch.full((BATCH, 1), WORDS - 1)], dim=1)
    return colours[:, :, None, None] * 4 + 0.1 * noise, captions


def main() -> None:
    torch.manual_seed(0)
    vision = {"image_size": SIZE, "layers": 3, "width": 128, "head_width": 32, "patch_size": 8}
    text = {"context_length": 4, "vocab_size": WORDS, "width": 128, "heads": 4, "layers": 2}
    model, loss_of = CLIP(embed_dim=64, vision_cfg=vision, text_cfg=text), ClipLoss()

    report = tt.nn.convert_linears(model, "switchback", when="always")  # <- added; `when` only because it is so small
    print(str(report).splitlines()[0])
    optimizer = tt.optim.StableAdamW(model.named_parameters(), lr=1e-3, betas=(0.9, 0.99), bits=8)  # <- changed

    generator = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        images, captions = draw_batch(generator)
        loss = loss_of(*model(images, captions))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
        if step % 5 == 0 or step == 1:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
