"""Run by torchrun on two processes: Composer with DDP and 8-bit state; prints the weights' sum on the first process.

torchrun --nproc-per-node 2 -m tests.hosts.two_composer FOLDER STEPS [CHECKPOINT]
"""

import os
import sys
import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.conftest import seed
from tests.hosts.vision import on_path, use_vision
from trimtab import optim


def main(folder: str, steps: str, checkpoint: str | None = None) -> None:
    from composer import Trainer
    from composer.models import ComposerModel
    from composer.utils import dist, get_device

    os.environ["NODE_RANK"] = "0"  # which Composer's own launcher sets
    dist.initialize_dist(get_device("cpu"))

    class Net(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))

        def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return self.net(batch[0])

        def loss(self, outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(outputs, batch[1])

    model, data = Net(), TensorDataset(torch.randn(48, 64, generator=seed(0)), torch.arange(48) % 8)
    optimizer = optim.StableAdamW(model.named_parameters(), lr=1e-2, bits=8, min_8bit_size=1)
    sampler = DistributedSampler(data, shuffle=False)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=sampler),
        max_duration=f"{steps}ba",
        optimizers=optimizer,
        device="cpu",
        progress_bar=False,
        save_folder=folder,
        save_interval="3ba",
        save_overwrite=True,
        load_path=checkpoint,
    )
    trainer.fit()
    state = [x for p in model.parameters() for x in (p, *optimizer.state[p].values())]
    total = sum(x.double().abs().sum().item() for x in state)
    gradients = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    everywhere = [torch.zeros_like(gradients) for _ in range(2)]
    torch.distributed.all_gather(everywhere, gradients)
    assert everywhere[0] == everywhere[1]  # the processes have the same weights
    if torch.distributed.get_rank() == 0:
        print(f"TOTAL {total!r}", flush=True)
    trainer.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    use_vision()
    with on_path():
        main(*sys.argv[1:])
