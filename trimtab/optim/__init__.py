"""UPDATE: gradients in, parameters changed. One class per optimizer, `bits=8` or `bits=32`.

    optimizer = trimtab.optim.AdamW(model.named_parameters(), lr=3e-4, bits=8)

Each optimizer's file has its equations and coefficients. optimizer.py is the step they share, checkpoint.py the state
dicts, places.py finds parameters again that a host has replaced. trimtab/ops/step/storage.py stores the moments.
"""

from trimtab.optim.adafactor import Adafactor, AdafactorMomentum
from trimtab.optim.adagrad import Adagrad
from trimtab.optim.adam import Adam
from trimtab.optim.adamw import AdamW
from trimtab.optim.ademamix import AdEMAMix
from trimtab.optim.analysis import ErrorAnalysis
from trimtab.optim.checkpoint import (
    distributed_state_dict,
    from_bitsandbytes,
    from_torchao,
    load_distributed_state_dict,
)
from trimtab.optim.groups import EMBEDDINGS, groups
from trimtab.optim.lamb import LAMB
from trimtab.optim.lars import LARS
from trimtab.optim.lion import Lion
from trimtab.optim.memory.release import Release
from trimtab.optim.optimizer import Optimizer
from trimtab.optim.rmsprop import RMSprop
from trimtab.optim.sgd import SGD
from trimtab.optim.stable_adamw import StableAdamW

__all__ = [
    "EMBEDDINGS",
    "LAMB",
    "LARS",
    "SGD",
    "AdEMAMix",
    "Adafactor",
    "AdafactorMomentum",
    "Adagrad",
    "Adam",
    "AdamW",
    "ErrorAnalysis",
    "Lion",
    "Optimizer",
    "RMSprop",
    "Release",
    "StableAdamW",
    "distributed_state_dict",
    "from_bitsandbytes",
    "from_torchao",
    "groups",
    "load_distributed_state_dict",
]
