"""Composer's Trainer with int8 layers and an 8-bit StableAdamW.

    pip install trimtab; pip install --no-deps mosaicml      (it asks for an older torch)
    python examples/composer_trainer.py         some seconds; no download

The task: which of four numbers was added to noise. Two lines of a Composer script change.
"""

import torch
from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trimtab as tt

Batch = tuple[Tensor, Tensor]


class Classifier(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))

    def forward(self, batch: Batch) -> Tensor:
        return self.net(batch[0])

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs, batch[1])


def main() -> None:
    torch.manual_seed(0)
    labels = torch.arange(512) % 4
    rows = torch.randn(512, 64) + labels[:, None]
    model = Classifier()
    report = tt.nn.convert_linears(model, "switchback", when="always")  # <- added; `when` only because it is so small
    print(str(report).splitlines()[0])
    log = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(rows, labels), batch_size=32),
        max_duration="16ba",
        optimizers=tt.optim.StableAdamW(model.named_parameters(), lr=1e-3, bits=8),  # <- changed
        loggers=[log],
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    for step, loss in enumerate((float(loss) for _, loss in log.data["loss/train/total"]), start=1):
        if step % 4 == 0 or step == 1:
            print(f"step {step:3d}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
