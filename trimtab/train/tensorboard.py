"""The scalars of a run for TensorBoard (extra `tensorboard`). The run's own log has the same numbers and more."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.extras import load_extra

_NOT_PLOTTED = ("step", "warmup_steps", "warmup_tokens")  # the axis, and constants


class TensorBoard:
    def __init__(self) -> None:
        load_extra("tensorboard", extra="tensorboard", purpose="tensorboard=True")
        self.writer: Any = None

    def open(self, folder: Path, step: int) -> None:
        """Write to the run's folder, after this step; what an earlier process wrote after it is removed."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, name: str, values: Mapping[str, Any], step: int) -> None:
        for key, value in values.items():
            if isinstance(value, int | float) and key not in _NOT_PLOTTED:
                self.writer.add_scalar(f"{name}/{key}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
