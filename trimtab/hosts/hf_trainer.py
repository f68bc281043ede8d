"""Callbacks for the Trainer of Hugging Face `transformers` and its subclasses, such as TRL's SFTTrainer.

    trainer = Trainer(model, args, train_dataset=...)
    WatchCallback(every=10).attach(trainer)
    SeqLenWarmupCallback(SeqLenWarmup(start=64, end=1024, steps=2000)).attach(trainer)

A Trainer gives its callbacks neither the loss of their own step nor the batch. So `attach` also wraps methods of this
Trainer: `training_step`, whose results add up to the loss of an optimizer step; `get_batch_samples`, where it takes the
batches of a step and counts their tokens; and `log`, to which it gives its loss.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from trimtab.hosts.versions import check_version
from trimtab.hosts.watching import Watching
from trimtab.schedule.seqlen import Lengths

_STATE = "trimtab.watch"  # its key in trainer_state.json, beside those of other callbacks
check_version("transformers")


class _Attached(TrainerCallback):
    """A callback that knows its Trainer."""

    trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Add this callback to a Trainer, before `train()`."""
        if self.trainer is not None:
            raise ValueError(f"this {type(self).__name__} is attached to a Trainer already; make another one")
        self._wrap(trainer)
        self.trainer = trainer
        trainer.add_callback(self)
        original = trainer.log

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            # Only with the loss: a call of our own would be in the place of the Trainer's.
            original(logs | self._shown() if "loss" in logs else logs, *args, **kwargs)

        trainer.log = log

    def _wrap(self, trainer: Any) -> None:
        """Wrap the methods that this callback needs."""
        raise NotImplementedError

    def _shown(self) -> dict[str, float]:
        """What this callback adds to the Trainer's log."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer is None:
            name = type(self).__name__
            raise RuntimeError(
                f"{name} has no Trainer: leave it out of callbacks= and call {name}(...).attach(trainer)"
            )


class WatchCallback(Watching, _Attached):
    """`trimtab.Watch` in a Trainer; takes its options.

    Beside the loss, the Trainer's log has the signals of the whole model as "watch/<signal>", and the number of alarms
    so far as "alarms/<kind>"; so has whatever it reports to (TensorBoard, W&B ...). The text of an alarm is a warning
    of Python's `logging`, at once. The state is saved in the Trainer's checkpoints.

    Args:
        log_tensors: also log the signals of every tensor and layer.
        every, deep_every: as in `Watch`, where they are 1 and 10. At every step a small step takes 3 to 7 % longer.
    """

    def _wrap(self, trainer: Any) -> None:
        if trainer.args.logging_nan_inf_filter:
            raise ValueError(
                "logging_nan_inf_filter=True puts an average of earlier losses in the place of a NaN in the Trainer's "
                "log, which hides a divergence; pass TrainingArguments(..., logging_nan_inf_filter=False)"
            )
        original = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = original(*args, **kwargs)
            self._losses.append(loss.detach())
            return loss

        trainer.training_step = training_step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        watch = self._start(self.trainer.model_wrapped, self.trainer.optimizer, state.global_step)
        saved = state.stateful_callbacks.get(_STATE)
        if saved is not None and state.global_step:
            watch.load_state_dict(saved["attributes"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.watch is not None
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.watch.skip()
        # Each has been divided by the number of micro-batches, or by the tokens of all of them.
        self._step(mean=False)

    def _shown(self) -> dict[str, float]:
        return self._scalars()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._keep_state(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._keep_state(state, control)

    def _keep_state(self, state: Any, control: Any) -> None:
        if control.should_save and self.watch is not None:
            self.watch.share()  # only the first process saves the Trainer's state
            state.stateful_callbacks[_STATE] = {"args": {}, "attributes": self.watch.state_dict()}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()


class SeqLenWarmupCallback(_Attached):
    """Sequence length warmup in a Trainer: training batches are cut to the length of their optimizer step.

    They are cut where the Trainer takes them from the loader, before it counts their tokens: the loss is the mean over
    the tokens that are left. Any collator and any number of workers will do; evaluation is at full length; a resumed
    run continues with the length of its step. The length is in the Trainer's log as "seqlen".
    """

    def __init__(self, warmup: Lengths) -> None:
        if not isinstance(warmup, Lengths):
            raise TypeError(f"SeqLenWarmupCallback takes a trimtab.SeqLenWarmup, got {type(warmup).__name__}")
        self.warmup = warmup

    def _wrap(self, trainer: Any) -> None:
        original = trainer.get_batch_samples

        def get_batch_samples(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            step = trainer.state.global_step + 1
            return original((self.warmup.cut(batch, step) for batch in batches), *args, **kwargs)

        trainer.get_batch_samples = get_batch_samples

    def _shown(self) -> dict[str, float]:
        return {"seqlen": self.warmup.at(self.trainer.state.global_step)}
