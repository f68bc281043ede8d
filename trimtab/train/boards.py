"""Scalars of a run for TensorBoard, Weights & Biases and MLflow. The files of the run have all of them anyway.

A board is one class with `open`, `add` and `close`. W&B and MLflow write to where their own settings say
(WANDB_MODE=offline, MLFLOW_TRACKING_URI=...). A resumed run continues the same curves. If one of them fails during the
run, it is left out.
"""

import hashlib
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.hints import load_extra
from trimtab.runs import RunFolder
from trimtab.runs.records import flatten

_NOT_PLOTTED = ("step", "warmup_steps", "warmup_tokens")  # the axis, and constants


class Board:
    """Writes scalars to one service."""

    package: str  # also the name of the option and of the extra

    def __init__(self) -> None:
        load_extra(self.package, extra=self.package, purpose=f"{self.package}=True")

    def open(self, paths: RunFolder, config: Mapping[str, Any], step: int) -> None:
        """Begin or continue after `step`."""
        raise NotImplementedError

    def write(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class TensorBoard(Board):
    """What an earlier process wrote after the step is removed."""

    package = "tensorboard"

    def open(self, paths: RunFolder, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(paths.tensorboard), purge_step=step + 1)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB(Board):
    """One run of W&B for a run folder. Its own step only rises, so ours is the axis of all curves."""

    package = "wandb"

    def open(self, paths: RunFolder, config: Mapping[str, Any], step: int) -> None:
        import wandb

        folder = paths.path.resolve()
        same = identify(folder)
        self.run = wandb.init(
            project="trimtab", id=same, name=folder.name, dir=str(folder), config=dict(config), resume="allow"
        )
        self.run.define_metric("*", step_metric="step")

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


class MLflow(Board):
    """One run of MLflow for a run folder, in the experiment "trimtab"."""

    package = "mlflow"

    def open(self, paths: RunFolder, config: Mapping[str, Any], step: int) -> None:
        from mlflow import MlflowClient

        self.client, folder = MlflowClient(), paths.path.resolve()
        experiment = self.client.get_experiment_by_name("trimtab")
        home = self.client.create_experiment("trimtab") if experiment is None else experiment.experiment_id
        found = self.client.search_runs([home], f"tags.`trimtab.id` = '{identify(folder)}'", max_results=1)
        if found:
            self.run = found[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        self.run = self.client.create_run(home, run_name=folder.name, tags={"trimtab.id": identify(folder)}).info.run_id
        for name, value in flatten(config).items():
            self.client.log_param(self.run, name, value)

    def write(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.run, [Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Boards:
    """All boards that the config names; none on other processes than the first."""

    def __init__(self, config: Any, *, writes: bool) -> None:
        kinds = (TensorBoard, WandB, MLflow)
        self.boards: list[Board] = [kind() for kind in kinds if writes and getattr(config, kind.package)]
        self._opened: list[Board] = []

    def __bool__(self) -> bool:
        return bool(self.boards)

    def open(self, paths: RunFolder, config: Mapping[str, Any], step: int) -> None:
        for board in self.boards:
            board.open(paths, config, step)
            self._opened.append(board)

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        numbers = {k: x for k, x in values.items() if isinstance(x, int | float) and k not in _NOT_PLOTTED}
        for board in list(self._opened) if numbers else ():
            try:
                board.write({f"{group}/{name}": float(x) for name, x in numbers.items()}, step)
            except Exception as error:  # of another program or its server: no reason to lose a training
                self._opened.remove(board)
                warnings.warn(
                    f"{board.package} gets no more scalars of this run, whose own files have them all: {error}",
                    stacklevel=2,
                )

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


def identify(folder: Path) -> str:
    """The same for the same folder, so that a resumed run is found again."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]
