"""Composer's Trainer with int8 layers and an 8-bit optimizer."""

import gc
import signal
import subprocess
import sys
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
from trimtab.schedule import SeqLenWarmup
from trimtab.watch import Watch


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


@pytest.mark.filterwarnings("ignore")
def test_composer_is_watched_and_cuts_its_batches():
    """A callback of Composer sees the loss of its own step, and an algorithm may change the batch."""
    from composer import Trainer
    from composer.core import Algorithm, Callback, Event
    from composer.models import ComposerModel

    class Net(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = zoo.Model()
            self.lengths: list[int] = []

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            self.lengths.append(batch["tokens"].shape[1])
            return self.net(batch["tokens"])

        def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())

    class Watched(Callback):
        def fit_start(self, state, logger):
            self.watch = Watch(state.model, state.optimizers[0])
            self.scalars: list[dict[str, float]] = []

        def batch_end(self, state, logger):
            self.watch.step(state.loss)
            self.scalars.append(self.watch.scalars())

        def fit_end(self, state, logger):
            self.watch.close()

    class Shorter(Algorithm):
        def match(self, event, state):
            return event == Event.AFTER_DATALOADER

        def apply(self, event, state, logger):
            state.batch = warmup.cut(state.batch, int(state.timestamp.batch) + 1)

    torch.manual_seed(0)
    warmup = SeqLenWarmup(start=8, end=16, steps=3, multiple=8)
    model, watched = Net(), Watched()
    rows = torch.randint(128, (20, 16), generator=seed(0))
    data = DataLoader([{"tokens": row, "targets": row} for row in rows], batch_size=4)
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        max_duration="5ba",
        optimizers=optim.StableAdamW(model.named_parameters(), lr=1e-2, bits=8),
        algorithms=[Shorter()],
        callbacks=[watched],
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    assert model.lengths == [warmup.at(step) for step in range(1, 6)]
    assert len(watched.scalars) == 5
    assert watched.scalars[-1]["loss"] < watched.scalars[0]["loss"]
    assert watched.scalars[-1]["grad_norm"] > 0
    assert "rms/net.fc.weight" in watched.scalars[-1]
    gc.collect()


@pytest.mark.slow
def test_composer_resumes_on_two_processes(tmp_path):
    def run(folder, steps, *checkpoint):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command = [*launch, "-m", "tests.hosts.two_composer", str(tmp_path / folder), str(steps), *checkpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if line.startswith("TOTAL"))

    whole = run("whole", 6)
    half = run("parts", 3)
    assert half != whole
    assert run("parts", 6, str(tmp_path / "parts" / "ep0-ba3-rank0.pt")) == whole
