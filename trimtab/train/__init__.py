"""ONE RUN: config, loop, log, checkpoints, processes. `trimtab train RECIPE` is `train(config, folder)`."""

from trimtab.runs import RunError, RunLog, read_lines
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.config import (
    BatchConfig,
    CLIPRun,
    DataConfig,
    GPTRun,
    ModuleRun,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SeqLenConfig,
)
from trimtab.train.evaluate import evaluate, load_run, load_tokenizer, sample
from trimtab.train.loop import resume, train
from trimtab.train.processes import ProcessLost
from trimtab.train.tensors import CheckpointError

__all__ = [
    "BatchConfig",
    "CLIPRun",
    "CheckpointError",
    "Checkpoints",
    "DataConfig",
    "GPTRun",
    "ModuleRun",
    "OptimConfig",
    "ProcessLost",
    "RunConfig",
    "RunError",
    "RunLog",
    "ScheduleConfig",
    "SeqLenConfig",
    "evaluate",
    "load_run",
    "load_tokenizer",
    "read_lines",
    "resume",
    "sample",
    "train",
]
