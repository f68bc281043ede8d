"""Lightning with int8 layers, an 8-bit optimizer, alarms and sequence length warmup.

pip install 'trimtab[lightning]'
python examples/lightning_module.py            a few seconds; no download
"""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import trimtab as tt
from trimtab.hosts.lightning import SeqLenWarmupCallback, WatchCallback

STEPS, BATCH, CONTEXT, TEXT = 20, 8, 64, b"the quick brown fox jumps over the lazy dog. " * 40


def rows() -> list[dict[str, Tensor]]:
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    pieces = [text[i : i + CONTEXT + 1] for i in range(0, 10 * BATCH * STEPS, 10)]
    return [{"tokens": x[:-1], "targets": x[1:]} for x in pieces]  # shifted before the cut


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tt.nn.GPT(tt.nn.GPTConfig(vocab=256, depth=2, width=128, heads=4, context=CONTEXT))
        tt.nn.convert_linears(self.model, "switchback", when="always")  # <- added; `when` only because it is so small

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss = self.model.loss(**batch).loss
        if number % 5 == 0 or number == STEPS - 1:
            print(f"step {number + 1:3d}  length {batch['tokens'].shape[1]:2d}  loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tt.optim.StableAdamW(self.named_parameters(), lr=3e-3, bits=8)  # <- changed


def main() -> None:
    torch.manual_seed(0)
    watch = WatchCallback(every=5)  # <- added
    warmup = SeqLenWarmupCallback(tt.SeqLenWarmup(start=16, end=CONTEXT, steps=10))  # <- added
    trainer = L.Trainer(
        callbacks=[watch, warmup],  # <- added
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(rows(), batch_size=BATCH))
    print(f"{len(watch.alarms)} alarms")


if __name__ == "__main__":
    main()
