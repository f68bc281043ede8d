"""Callbacks for Lightning's Trainer.

    trainer = L.Trainer(callbacks=[WatchCallback(every=10), SeqLenWarmupCallback(warmup)])

With Fabric the loop is yours: use `trimtab.Watch` and `warmup.cut` as in a plain loop.
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from trimtab.hosts.versions import check_version
from trimtab.hosts.watching import Watching
from trimtab.schedule.seqlen import Lengths

_HOOK = "on_before_batch_transfer"
check_version("lightning")


class WatchCallback(Watching, Callback):
    """`trimtab.Watch` in a Trainer with one optimizer; takes its options.

    Every `log_every_n_steps` of the Trainer its loggers get the signals of the whole model as "watch/<signal>" and the
    number of alarms so far as "alarms/<kind>". The text of an alarm is a warning of Python's `logging`, at once. The
    state is saved in the Trainer's checkpoints.

    Args:
        log_tensors: also log the signals of every tensor and layer.
        every, deep_every: as in `Watch`, where they are 1 and 10. At every step a small step takes 3 to 7 % longer.
    """

    _saved: Mapping[str, Any] | None = None  # of the checkpoint, until the training starts

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            count = len(trainer.optimizers)
            raise ValueError(
                f"WatchCallback watches one optimizer, got {count}; use one trimtab.Watch for each instead"
            )
        watch = self._start(trainer.strategy.model, trainer.optimizers[0], trainer.global_step)
        if self._saved is not None:
            watch.load_state_dict(self._saved)
            self._saved = None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        # Lightning has divided it by the number of batches of a step.
        self._losses.append(
            loss.detach() * (trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1)
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.watch is not None
        if trainer.global_step == self.watch.steps:
            return  # the optimizer waits for more batches
        self._step(mean=True)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(self._scalars(), step=trainer.global_step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        if self.watch is None:
            return {}
        self.watch.share()  # Lightning calls this in all processes; the first one saves
        return self.watch.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None


class SeqLenWarmupCallback(Callback):
    """Sequence length warmup in a Trainer: training batches are cut to the length of their optimizer step.

    Other batches (validation, test, prediction) have their full length, and a resumed run continues with the length of
    its step. The module's `training_step` must take the mean over the tokens that are left, as cross entropy does.
    """

    def __init__(self, warmup: Lengths) -> None:
        if not isinstance(warmup, Lengths):
            raise TypeError(f"SeqLenWarmupCallback takes a trimtab.SeqLenWarmup, got {type(warmup).__name__}")
        self.warmup = warmup
        self._wrapped: Any = None  # whose hook is wrapped

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # A Trainer calls the hook of the data module if it has its own, else that of the module.
        self._wrapped = trainer.datamodule if is_overridden(_HOOK, trainer.datamodule) else pl_module
        original = getattr(self._wrapped, _HOOK)

        def cut(batch: Any, dataloader_idx: int) -> Any:
            if trainer.training:
                batch = self.warmup.cut(batch, trainer.global_step + 1)
            return original(batch, dataloader_idx)

        setattr(self._wrapped, _HOOK, cut)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for logger in trainer.loggers if (trainer.global_step + 1) % trainer.log_every_n_steps == 0 else ():
            logger.log_metrics({"seqlen": self.warmup.at(trainer.global_step + 1)}, step=trainer.global_step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._wrapped is not None:
            delattr(self._wrapped, _HOOK)
            self._wrapped = None
