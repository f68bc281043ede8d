"""A loop with Lightning Fabric: int8 layers, an 8-bit optimizer, alarms and sequence length warmup.

    pip install 'trimtab[lightning]'
    python examples/fabric_loop.py                 a few seconds; no download

With several processes call `watch.share()` in all of them before you save `watch.state_dict()`.
"""

import lightning as L
import torch

import trimtab as tt

STEPS, BATCH, CONTEXT, TEXT = 20, 8, 64, b"the quick brown fox jumps over the lazy dog. " * 40


def main() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    torch.manual_seed(0)
    model = tt.nn.GPT(tt.nn.GPTConfig(vocab=256, depth=2, width=128, heads=4, context=CONTEXT))
    tt.nn.convert_linears(model, "switchback", when="always")  # <- added; `when` only because it is so small
    optimizer = tt.optim.StableAdamW(model.named_parameters(), lr=3e-3, bits=8)  # <- changed
    model, optimizer = fabric.setup(model, optimizer)
    model.mark_forward_method("loss")
    watch = tt.Watch(model, optimizer, every=5)  # <- added
    warmup = tt.SeqLenWarmup(start=16, end=CONTEXT, steps=10)  # <- added

    text, alarms = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long(), 0
    for step in range(1, STEPS + 1):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,)).tolist()
        rows = torch.stack([text[i : i + CONTEXT + 1] for i in starts])
        batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}  # shifted before the cut
        batch = warmup.cut(batch, step)  # <- added
        loss = model.loss(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for alarm in watch.step(loss):  # <- added
            alarms += 1
            print(alarm)
        if step % 5 == 0 or step == 1:
            print(f"step {step:3d}  length {batch['tokens'].shape[1]:2d}  loss {loss.item():.4f}", flush=True)
    print(f"{alarms} alarms")


if __name__ == "__main__":
    main()
