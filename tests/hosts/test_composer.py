"""Composer's Trainer with int8 layers and an 8-bit optimizer."""

import gc
import signal
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import seed
from tests.hosts import zoo
from tests.hosts.test_examples import run_example
from tests.hosts.vision import on_path, use_vision
from trimtab import optim
from trimtab.nn import convert_linears


@pytest.fixture(autouse=True)
def _composer() -> Iterator[None]:
    """Import it; it replaces the handlers of signals, which are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    use_vision()
    with on_path(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import composer  # noqa: F401
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.filterwarnings("ignore")  # Composer is older than this PyTorch, and warns of everything
def test_composer_trains_a_few_steps():
    from composer import Trainer
    from composer.loggers import InMemoryLogger
    from composer.models import ComposerModel

    class Net(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = zoo.timm_vit()[0]

        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.net(batch[0])

        def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(outputs, batch[1])

    torch.manual_seed(0)
    model = Net()
    assert convert_linears(model, when="always").share > 0.7
    images, labels = torch.randn(4, 3, 32, 32, generator=seed(0)), torch.arange(4)
    data = DataLoader(TensorDataset(images.repeat(5, 1, 1, 1), labels.repeat(5)), batch_size=4)
    optimizer = optim.StableAdamW(model.named_parameters(), lr=1e-2, bits=8)
    log = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        max_duration="5ba",
        optimizers=optimizer,
        device="cpu",
        loggers=[log],
        progress_bar=False,
    )
    trainer.fit()
    losses = [float(loss) for _, loss in log.data["loss/train/total"]]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.filterwarnings("ignore")
def test_composer_resumes_with_8_bit_state(tmp_path):
    from composer import Trainer
    from composer.models import ComposerModel

    class Net(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))

        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.net(batch[0])

        def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(outputs, batch[1])

    def run(folder, batches, **resume):
        model = Net()
        rows, labels = torch.randn(24, 64, generator=seed(0)), torch.arange(24) % 8
        optimizer = optim.StableAdamW(model.named_parameters(), lr=1e-2, bits=8, min_8bit_size=1)
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(TensorDataset(rows, labels), batch_size=4),
            max_duration=f"{batches}ba",
            optimizers=optimizer,
            device="cpu",
            progress_bar=False,
            save_folder=str(tmp_path / folder),
            save_interval="3ba",
            save_overwrite=True,
            save_weights_only=False,
            **resume,
        )
        trainer.fit()
        trainer.close()
        return model

    whole = run("whole", 6)
    run("parts", 3)
    found = sorted((tmp_path / "parts").glob("*.pt"))
    parts = run("parts", 6, load_path=str(found[0]))
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(p, q)
    gc.collect()  # while warnings are ignored: Composer leaves temporary folders to the collector


@pytest.mark.filterwarnings("ignore")
def test_the_example_learns(capsys):
    run_example("composer_trainer", capsys)
    gc.collect()
