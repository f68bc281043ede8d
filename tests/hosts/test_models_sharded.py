"""FSDP2 over converted attention and experts: two processes compute what one does."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.conftest import seed
from tests.hosts import zoo
from tests.processes import mesh, on_two_processes
from trimtab.nn import convert_linears


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "experts too"])
@on_two_processes
def test_experts_sharded(whole):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of transformers, when it is imported
        model, loss = zoo.build(zoo.mixtral)
    plain = copy.deepcopy(model)
    for m in (model, plain):
        convert_linears(m, when="always")
    for layer in model.model.layers:
        if whole:
            fully_shard(layer.mlp.experts, mesh=mesh())
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    assert_same_training(model, plain, loss)


@on_two_processes
def test_attention_sharded():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
    plain, x = copy.deepcopy(model), torch.randn(3, 7, 32, generator=seed(0))
    for m in (model, plain):
        convert_linears(m, when="always")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    assert_same_training(model, plain, lambda m: (m(x) - x.flip(1)).square().mean())


def assert_same_training(sharded: nn.Module, plain: nn.Module, loss: zoo.Loss) -> None:
    losses: list[list[float]] = []
    for model in (sharded, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            value = loss(model)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(value.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.01
