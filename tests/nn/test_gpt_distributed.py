"""GPT and its chunked loss on two processes, DDP and FSDP2, have the gradients of one process with the whole batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import seed
from tests.processes import mesh, on_two_processes
from trimtab.nn import loss as loss_module
from trimtab.nn.gpt import GPT, GPTConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")


def build(**switches: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(depth=2, width=16, heads=2, vocab=53, context=8, z_loss=1e-2, qk_norm="shared", **switches))


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(53, (6, 9), generator=seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def own_part(*tensors: Tensor) -> list[Tensor]:
    return [x.chunk(dist.get_world_size())[dist.get_rank()] for x in tensors]


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard(model: GPT, how: str) -> GPT:
    if how == "blocks":
        for block in model.transformer.blocks:
            fully_shard(block, mesh=mesh())
    fully_shard(model, mesh=mesh())
    return model


def assert_same_gradients(got: nn.Module, expected: nn.Module, rtol: float) -> None:
    for (name, p), q in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None
        error = (whole(p.grad) - q.grad).norm() / q.grad.norm()
        assert error <= rtol, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("switches", [{}, {"tied": True, "positions": "learned"}, {"checkpointing": True}])
@pytest.mark.parametrize("wrap", ["ddp", "root", "blocks"])
@on_two_processes
def test_two_processes_have_the_gradients_of_one(wrap, switches, monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 1)  # two chunks each
    plain, shared = build(**switches), build(**switches)
    expected = plain.loss(*batch())
    expected.loss.backward()
    if wrap == "ddp":
        replica = DistributedDataParallel(shared)  # it must live until backward
        got = replica(*own_part(*batch()))
    else:
        got = shard(shared, wrap).loss(*own_part(*batch()))
    got.loss.backward()
    mean = got.loss.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / dist.get_world_size(), expected.loss.detach())
    assert_same_gradients(shared, plain, 1e-5)


@on_two_processes
def test_fsdp_in_bfloat16_stays_close():
    plain, shared = build(), build()
    plain.loss(*batch()).loss.backward()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(shared, mesh=mesh(), mp_policy=policy)
    shared.loss(*own_part(*batch())).loss.backward()
    assert_same_gradients(shared, plain, 0.05)  # 8 bits of precision


@on_two_processes
def test_a_head_sharded_by_itself_works_and_a_tied_one_is_refused_with_words():
    plain, shared = build(), build()
    fully_shard(shared.head, mesh=mesh())
    torch.testing.assert_close(shared.loss(*batch()), plain.loss(*batch()))
    tied = build(tied=True)
    fully_shard(tied.embedding, mesh=mesh(), reshard_after_forward=True)
    with pytest.raises(ValueError, match=r"weight is sharded.*fully_shard\(model\)"):
        tied.loss(*batch())
