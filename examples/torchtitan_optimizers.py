"""TorchTitan's container of optimizers with an 8-bit StableAdamW, saved and loaded as TorchTitan does.

    pip install trimtab torchtitan
    python examples/torchtitan_optimizers.py    some seconds, on a CPU

In a TorchTitan config only the field `optimizer` changes; here the container is used in a small loop.
"""

import tempfile
from collections import OrderedDict

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F
from torchtitan.components.optimizer import ParamGroupConfig

from trimtab.hosts.torchtitan import Optimizers  # <- added

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "bits": 8}
CONFIG = Optimizers.Config(  # <- changed: the container of trimtab in the place of default_adamw(...)
    param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="StableAdamW", optimizer_kwargs=SETTINGS)]
)


def build() -> nn.Module:
    torch.manual_seed(0)
    parts = {"tok_embeddings": nn.Embedding(64, 128), "layer": nn.Linear(128, 128), "output": nn.Linear(128, 64)}
    return nn.Sequential(OrderedDict(parts))


def train(model: nn.Module, optimizers: Optimizers, steps: range) -> float:
    for step in steps:
        tokens = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    return loss.item()


def main() -> None:
    model = build()
    optimizers = CONFIG.build(model_parts=[model])
    train(model, optimizers, range(1, 5))
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": model.state_dict(), "optim": optimizers.state_dict()}, checkpoint_id=folder)
        again = build()
        other = CONFIG.build(model_parts=[again])
        state = {"model": again.state_dict(), "optim": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["optim"])
    assert train(again, other, range(5, 9)) == train(model, optimizers, range(5, 9))  # exactly


if __name__ == "__main__":
    main()
