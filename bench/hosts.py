"""What our callbacks add to a step of other trainers: Hugging Face's and Lightning's.

    python -m bench.hosts
    python -m bench.hosts --rounds 3           rougher

Every round trains a few steps with each setting, one after the other; a Trainer lives as long as its setting. The time
of a step is that between two calls of the model. The ratios of the bars are medians of the ratios of each round.
"""

import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from bench.measure import Bar, Timing, report, show, show_machine
from trimtab import optim
from trimtab.schedule import SeqLenWarmup

CONTEXT, VOCAB = 128, 512
Batch = dict[str, Tensor]
Setting = dict[str, Any]  # "every": of the watcher; "warmup": whether there is one
SETTINGS: dict[str, Setting] = {
    "plain": {},
    "SeqLenWarmup at full length": {"warmup": True},
    "Watch every 4": {"every": 4},
    "Watch every 1": {"every": 1},
}
FULL = SeqLenWarmup(start=CONTEXT, end=CONTEXT, steps=1)


def main(threads: int = 2, rounds: int = 9, steps: int = 12, batch: int = 8, depth: int = 4, width: int = 256) -> None:
    """Measure what the callbacks add to a step.

    Args:
        threads: for everything that is measured
        rounds: how often every setting has its turn
        steps: of each turn; a multiple of 4 has as many measurements as a long run
        batch: sequences of 128 tokens in a step
        depth: of the model
        width: of the model
    """
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    show_machine(threads)
    report([bar for host in HOSTS for bar in measure(host, rounds, steps, batch, depth, width)])


def measure(host: str, rounds: int, steps: int, batch: int, depth: int, width: int) -> list[Bar]:
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for counted in [False] + [True] * rounds:
        for name, setting in SETTINGS.items():
            clock = Clock(build_model(depth, width))
            HOSTS[host](clock, setting, steps, batch)
            if counted:
                # One number for a turn: a Watch every 4 steps has one expensive step in four, which a median of single
                # steps would not see.
                seconds[name].append(clock.mean())
    timings = {name: Timing(values) for name, values in seconds.items()}
    show(f"{host}, a step of {steps}", timings, baseline="plain")
    # The turns of a round are neighbours: the median of their ratios is steadier than the ratio of medians.
    ratios = {
        name: median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True))
        for name in SETTINGS
        if name != "plain"
    }
    return [Bar(f"{host}: {name}, time of a step over plain", x, 1.03) for name, x in ratios.items()]


class Clock(nn.Module):
    """A model that notes when it is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.called = model, list[float]()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.called.append(time.perf_counter())
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return {"loss": loss}

    def mean(self) -> float:
        """Seconds of a step, without the first one, which creates the state of the optimizer."""
        return (self.called[-1] - self.called[1]) / (len(self.called) - 2)


def build_model(depth: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": depth, "n_embd": width, "n_head": 4, "vocab_size": VOCAB, "n_positions": CONTEXT}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return optim.AdamW(model.named_parameters(), lr=1e-4, bits=8)


def rows(count: int) -> list[Batch]:
    tokens = torch.randint(VOCAB, (count, CONTEXT), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def run_hugging_face(clock: Clock, setting: Setting, steps: int, batch: int) -> None:
    from transformers import Trainer, TrainingArguments

    from trimtab.hosts.hf_trainer import SeqLenWarmupCallback, WatchCallback

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=steps + 2,
            per_device_train_batch_size=batch,
            logging_steps=10,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            use_cpu=True,
        )
        optimizers = (build_optimizer(clock), None)
        trainer = Trainer(clock, args, train_dataset=rows((steps + 2) * batch), optimizers=optimizers)
        trainer.callback_handler.callbacks = [
            x for x in trainer.callback_handler.callbacks if type(x).__name__ != "PrinterCallback"
        ]
        if "every" in setting:
            WatchCallback(every=setting["every"]).attach(trainer)
        if "warmup" in setting:
            SeqLenWarmupCallback(FULL).attach(trainer)
        trainer.train()


def run_lightning(clock: Clock, setting: Setting, steps: int, batch: int) -> None:
    import lightning as L
    from torch.utils.data import DataLoader

    from trimtab.hosts.lightning import SeqLenWarmupCallback, WatchCallback

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.clock = clock

        def training_step(self, batch: Batch, _: int) -> Tensor:
            loss: Tensor = self.clock(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self)

    callbacks: list[Any] = []
    if "every" in setting:
        callbacks.append(WatchCallback(every=setting["every"]))
    if "warmup" in setting:
        callbacks.append(SeqLenWarmupCallback(FULL))
    trainer = L.Trainer(
        max_steps=steps + 2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(Module(), DataLoader(rows((steps + 2) * batch), batch_size=batch))


HOSTS: dict[str, Callable[[Clock, Setting, int, int], None]] = {
    "Trainer of transformers": run_hugging_face,
    "Trainer of Lightning": run_lightning,
}

if __name__ == "__main__":
    tyro.cli(main)
