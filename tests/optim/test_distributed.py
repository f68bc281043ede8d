"""On several processes an optimizer does what it does on one: DDP, FSDP2, and checkpoints that change their number.

The reference is always the same optimizer on whole tensors in one process. Blocks of 8-bit state are cut within a
shard, so where shards end at the end of a block the bits are the same; `EVEN` are such shapes.
"""

import time
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests import processes
from tests.conftest import assert_same, seed
from tests.processes import PROCESSES, mesh, on_two_processes, together
from trimtab import optim
from trimtab.ops.sharding import local

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")

BLOCK = 64

# Hyper-parameters that move a parameter by about 1e-2 a step. Decay is there wherever it is done element by element.
CHOICES: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "StableAdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "LAMB": {"lr": 1e-2, "weight_decay": 0.1},
    "LARS": {"lr": 1e-2},
    "Lion": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2},
    "AdEMAMix": {"lr": 1e-2, "weight_decay": 0.1},
}
TWO_PASS = ("StableAdamW", "LAMB", "LARS")
# Sums over a tensor are added up in another order on two processes; the rest is the same arithmetic.
ROUNDING = dict.fromkeys(TWO_PASS, 1e-6)

# Two scales where there was one make other codes, and a moment in 8 bits is good to about 1 in 100. The tests move
# their parameters by about 5 in 100.
CUT = 2e-3

# Cut over two processes: evenly; 2 rows and 1; 1 row and none; a vector. Every shard ends at the end of a block.
EVEN = [(8, 64), (3, 128), (1, 128), (256,)]
# 3 rows and 2 of 33 values: the second shard begins within what is one block on one process. A single row.
UNEVEN = [(5, 33), (1, 33), (7,)]


# --- What is trained


class Tensors(nn.Module):
    """Parameters of these shapes and nothing to compute: the gradients are given."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = seed(0)
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=generator)))


def build(name: str, model: nn.Module, **options: Any) -> optim.Optimizer:
    given = {"block": BLOCK, "min_8bit_size": 0, **CHOICES.get(name, {}), **options}
    return getattr(optim, name)(model.named_parameters(), **given)


def gradients(shape: tuple[int, ...], number: int, step: int) -> Tensor:
    """Of one tensor at one step. They grow, so that RMS_t is above 1 and StableAdamW has something to do."""
    return torch.randn(shape, generator=seed(1000 * number + step)) * (1 + step)


def take_steps(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    """Give every parameter its gradient, or its shard of it, and step."""
    for step in steps:
        for number, p in enumerate(model.parameters()):
            give(p, gradients(tuple(p.shape), number, step))
        optimizer.step()


def give(p: Tensor, grad: Tensor) -> None:
    if isinstance(p, DTensor):
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
    else:
        p.grad = grad


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_close(got: nn.Module, expected: nn.Module, rtol: float = 0.0) -> None:
    """Parameter by parameter: the length of the difference, relative to that of the parameter. 0 is bit for bit."""
    for (name, p), q in zip(got.named_parameters(), expected.parameters(), strict=True):
        p, q = whole(p).detach(), whole(q).detach()
        if rtol == 0:
            assert_same(p, q)
        difference = (p - q).norm() / q.norm()
        assert difference <= rtol, f"{name} of shape {tuple(q.shape)} is off by {difference:.2e}, allowed {rtol:.0e}"


def assert_moved(model: nn.Module, start: nn.Module) -> None:
    for p, q in zip(model.parameters(), start.parameters(), strict=True):
        assert not torch.equal(whole(p), whole(q))


def shard_and_whole(
    name: str, shapes: list[tuple[int, ...]], **options: Any
) -> tuple[tuple[nn.Module, optim.Optimizer], tuple[nn.Module, optim.Optimizer]]:
    sharded, plain = fully_shard(Tensors(shapes), mesh=mesh()), Tensors(shapes)
    return (sharded, build(name, sharded, **options)), (plain, build(name, plain, **options))


def count_collectives(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all sums over processes from now on."""
    calls: list[int] = []
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return calls


# --- DDP


@pytest.mark.parametrize(("name", "bits"), [*product(CHOICES, (32, 8)), ("Adafactor", 32), ("AdafactorMomentum", 32)])
@on_two_processes
def test_ddp_ends_where_one_process_with_the_whole_batch_does(name, bits):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))

    start, plain, replica = make(), make(), DistributedDataParallel(make())
    one, two = build(name, plain, bits=bits), build(name, replica, bits=bits)
    share = slice(dist.get_rank(), None, PROCESSES)
    for step in range(4):
        x, y = torch.randn(8, 16, generator=seed(step)), torch.randn(8, 8, generator=seed(100 + step))
        for model, optimizer, part in ((plain, one, slice(None)), (replica, two, share)):
            optimizer.zero_grad()
            (model(x[part]) - y[part]).square().mean().backward()
            optimizer.step()
    assert_moved(replica, start)
    for p in replica.parameters():
        copies = [torch.empty_like(p) for _ in range(PROCESSES)]
        dist.all_gather(copies, p.detach())
        assert_same(copies[0], copies[1])
    # An average of two averages rounds differently from one. At 8 bits another last bit is another dither, which may
    # take the next code of √v: within a few percent of it, of steps that are 1e-2 of the parameter.
    assert_close(replica, plain, 1e-5 if bits == 32 else 5 * CUT)


# --- FSDP2


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("name", CHOICES)
@on_two_processes
def test_shards_end_where_whole_tensors_do(name, bits):
    (sharded, two), (plain, one) = shard_and_whole(name, EVEN, bits=bits)
    for model, optimizer in ((sharded, two), (plain, one)):
        take_steps(model, optimizer, range(5))
    assert_moved(plain, Tensors(EVEN))
    assert_close(sharded, plain, ROUNDING.get(name, 0.0))


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("name", CHOICES)
@on_two_processes
def test_shards_that_cut_a_block_stay_close(name, bits):
    (sharded, two), (plain, one) = shard_and_whole(name, UNEVEN, bits=bits)
    for model, optimizer in ((sharded, two), (plain, one)):
        take_steps(model, optimizer, range(5))
    assert_moved(plain, Tensors(UNEVEN))
    assert_close(sharded, plain, ROUNDING.get(name, 0.0) if bits == 32 else CUT)


@pytest.mark.parametrize("bits", [32, 8])
@on_two_processes
def test_steps_relative_to_the_weights_are_those_of_whole_tensors(bits):
    (sharded, two), (plain, one) = shard_and_whole("AdamW", EVEN, bits=bits, rms_scaled=True)
    for model, optimizer in ((sharded, two), (plain, one)):
        take_steps(model, optimizer, range(5))
    assert_close(sharded, plain, 1e-6)
    other = Tensors(EVEN)
    take_steps(other, build("AdamW", other, bits=bits), range(5))
    assert max((p - q).abs().max() for p, q in zip(plain.parameters(), other.parameters(), strict=True)) > 1e-3


@pytest.mark.parametrize("bits", [32, 8])
@on_two_processes
def test_a_model_trains_under_fsdp2(bits):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 65), nn.Tanh(), nn.Linear(65, 1))

    sharded, plain = make(), make()
    for layer in sharded:
        fully_shard(layer, mesh=mesh())
    fully_shard(sharded, mesh=mesh())
    one, two = build("StableAdamW", plain, bits=bits), build("StableAdamW", sharded, bits=bits)
    share = slice(dist.get_rank(), None, PROCESSES)
    for step in range(4):
        x = torch.randn(8, 16, generator=seed(step))
        for model, optimizer, part in ((plain, one, slice(None)), (sharded, two, share)):
            optimizer.zero_grad()
            model(x[part]).square().mean().backward()
            optimizer.step()
    assert_close(sharded, plain, 1e-5 if bits == 32 else CUT)


@pytest.mark.parametrize("bits", [32, 8])
@on_two_processes
def test_rms_is_that_of_whole_tensors(bits):
    (sharded, two), (plain, one) = shard_and_whole("StableAdamW", EVEN, bits=bits)
    for step in range(4):
        take_steps(sharded, two, range(step, step + 1))
        take_steps(plain, one, range(step, step + 1))
        torch.testing.assert_close(two.rms, one.rms, rtol=1e-6, atol=0)
    assert one.rms.min() > 1.05  # or it would not matter


@pytest.mark.parametrize("name", [*TWO_PASS, "AdamW"])
@on_two_processes
def test_a_step_needs_one_collective_where_it_needs_any(name):
    sharded = fully_shard(Tensors(EVEN), mesh=mesh())
    half = [p for i, p in enumerate(sharded.parameters()) if i % 2]
    rest = [p for i, p in enumerate(sharded.parameters()) if not i % 2]
    # Two groups, and 8-bit beside 32-bit state: several batches, still one collective.
    groups = [{"params": half, "bits": 8}, {"params": rest, "lr": 1e-3}]
    optimizer = getattr(optim, name)(groups, min_8bit_size=300, **CHOICES[name])
    take_steps(sharded, optimizer, range(1))
    with pytest.MonkeyPatch.context() as patch:
        calls = count_collectives(patch)
        take_steps(sharded, optimizer, range(1, 3))
    assert len(calls) == (2 if name in TWO_PASS else 0)


@pytest.mark.parametrize("name", ["AdamW", *TWO_PASS])
@on_two_processes
def test_a_nan_in_one_shard_skips_the_tensor_everywhere(name):
    (sharded, two), (plain, one) = shard_and_whole(name, EVEN, bits=8, skip_nonfinite=True)
    for model, optimizer in ((sharded, two), (plain, one)):
        take_steps(model, optimizer, range(2))
        before = [whole(p).clone() for p in model.parameters()]
        for number, p in enumerate(model.parameters()):
            grad = gradients(tuple(p.shape), number, 2)
            if number == 0:
                grad[-1, 0] = torch.nan  # in the shard of the second process
            give(p, grad)
        optimizer.step()
        after = [whole(p) for p in model.parameters()]
        assert_same(after[0], before[0])
        assert not any(torch.equal(p, q) for p, q in zip(after[1:], before[1:], strict=True))
        assert optimizer.skipped.tolist() == [1, 0, 0, 0]
        assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [2, 3, 3, 3]
        take_steps(model, optimizer, range(3, 5))
    assert_close(sharded, plain, ROUNDING.get(name, 0.0))


@on_two_processes
def test_percentile_clipping_sees_the_norm_of_the_whole_gradient():
    (sharded, two), (plain, one) = shard_and_whole("SGD", EVEN, percentile_clipping=20)
    loose = Tensors(EVEN)
    for model, optimizer in ((sharded, two), (plain, one), (loose, build("SGD", loose))):
        take_steps(model, optimizer, range(6))
    assert_close(sharded, plain, 1e-6)  # the norm is added up in another order
    assert_moved(plain, loose)  # or nothing was clipped


@on_two_processes
def test_how_state_is_kept_follows_the_whole_parameter():
    # 16 and 8 values: the second process has none of the first and half of the second.
    (sharded, two), (plain, one) = shard_and_whole("AdamW", [(1, 16), (2, 4), (3, 5)], bits=8, min_8bit_size=15)
    for model, optimizer in ((sharded, two), (plain, one)):
        take_steps(model, optimizer, range(1))
        assert [entry.bits for entry in optimizer.describe().entries] == [8, 32, 8]
        assert ["exp_avg_codes" in optimizer.state[p] for p in model.parameters()] == [True, False, True]
    assert two.describe().entries == one.describe().entries


@on_two_processes
def test_gradients_that_are_cut_differently_are_brought_together():
    # What sequence parallelism leaves on a replicated parameter: each process has a part of the sum.
    plain = nn.Parameter(torch.ones(4, 8))
    ours = nn.Parameter(distribute_tensor(torch.ones(4, 8), mesh(), [Replicate()]))
    one, two = optim.SGD([plain], lr=0.5), optim.SGD([ours], lr=0.5)
    plain.grad = torch.full((4, 8), 3.0)
    part = torch.full((4, 8), 1.0 + dist.get_rank())
    ours.grad = DTensor.from_local(part, mesh(), [Partial()], run_check=False)
    one.step()
    two.step()
    assert_same(ours.to_local().detach(), plain.detach())


# --- Checkpoints

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"bits": 32}),
    ("AdamW", {"bits": 8, "codebook": "dynamic-symmetric", "skip_nonfinite": True}),
    ("StableAdamW", {"bits": 8}),
    ("LAMB", {"bits": 8, "percentile_clipping": 80}),
    ("SGD", {"bits": 8, "codebook": "dynamic-symmetric"}),
    ("Lion", {"bits": 8}),
    ("AdEMAMix", {"bits": 8}),
    ("Adagrad", {"bits": 8, "initial_accumulator_value": 0.1}),
]
kinds = pytest.mark.parametrize(("name", "options"), KINDS, ids=[f"{name}-{o['bits']}" for name, o in KINDS])
shapes_ = pytest.mark.parametrize("shapes", [EVEN, UNEVEN], ids=["even", "uneven"])


def start_over(name: str, options: dict[str, Any], shapes: list[tuple[int, ...]]) -> tuple[nn.Module, optim.Optimizer]:
    """A fresh model, sharded if there are two of us."""
    model = Tensors(shapes)
    if dist.is_initialized():
        fully_shard(model, mesh=mesh())
    return model, build(name, model, **options)


def save(path: Path, name: str, options: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    """Three steps, then a checkpoint, by as many processes as we are."""
    model, optimizer = start_over(name, options, shapes)
    take_steps(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optim": optim.distributed_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def resume(path: Path, name: str, options: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    model, optimizer = start_over(name, options, shapes)
    state = {"optim": optim.distributed_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    optim.load_distributed_state_dict(model, optimizer, state["optim"])
    assert all(isinstance(key, Tensor) for key in optimizer.state)
    # PyTorch makes room for the state by a step with lr=0.
    assert_close(model, Tensors(shapes))
    weights = {"model": model.state_dict()}
    dcp.load(weights, checkpoint_id=path)
    assert_continues(model, optimizer, name, options, shapes)


def assert_continues(
    model: nn.Module,
    optimizer: optim.Optimizer,
    name: str,
    options: dict[str, Any],
    shapes: list[tuple[int, ...]],
) -> None:
    """Three more steps end where six in one process do."""
    assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [3.0] * len(shapes)
    take_steps(model, optimizer, range(3, 6))
    straight = Tensors(shapes)
    take_steps(straight, build(name, straight, **options), range(6))
    # Shards that end inside a block have other blocks than the whole tensor.
    alike = options["bits"] == 32 or shapes == EVEN
    assert_close(model, straight, ROUNDING.get(name, 0.0) if alike else CUT)


@shapes_
@kinds
def test_two_processes_save_and_one_continues(tmp_path, name, options, shapes):
    together(save, tmp_path, name, options, shapes)
    resume(tmp_path, name, options, shapes)


@shapes_
@kinds
def test_one_process_saves_and_two_continue(tmp_path, name, options, shapes):
    save(tmp_path, name, options, shapes)
    together(resume, tmp_path, name, options, shapes)


def save_and_go_on(path: Path, name: str, options: dict[str, Any]) -> None:
    """Three steps and a checkpoint; then thirty steps that a resume from it must repeat."""
    model, optimizer = start_over(name, options, UNEVEN)
    take_steps(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optim": optim.distributed_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    take_steps(model, optimizer, range(3, 33))
    torch.save(snapshot_of_shards(model, optimizer), path / f"end-{dist.get_rank()}.pt")


def repeat(path: Path, name: str, options: dict[str, Any]) -> None:
    model, optimizer = start_over(name, options, UNEVEN)
    state = {"model": model.state_dict(), "optim": optim.distributed_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    optim.load_distributed_state_dict(model, optimizer, state["optim"])
    take_steps(model, optimizer, range(3, 33))
    expected = torch.load(path / f"end-{dist.get_rank()}.pt")
    for mine, theirs in zip(snapshot_of_shards(model, optimizer), expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_same(mine[key], theirs[key])


def snapshot_of_shards(model: nn.Module, optimizer: optim.Optimizer) -> list[dict[str, Tensor]]:
    return [
        {"param": local(p.detach()).clone()} | {key: local(x).clone() for key, x in optimizer.state[p].items()}
        for p in model.parameters()
    ]


@kinds
def test_the_same_number_of_processes_resumes_bit_for_bit(tmp_path, name, options):
    together(save_and_go_on, tmp_path, name, options)
    together(repeat, tmp_path, name, options)


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_full(path: Path, name: str, options: dict[str, Any]) -> None:
    model, optimizer = start_over(name, options, EVEN)
    take_steps(model, optimizer, range(3))
    weights = get_model_state_dict(model, options=FULL)
    state = weights, optim.distributed_state_dict(model, optimizer, options=FULL)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(state, path)


def resume_full(path: Path, name: str, options: dict[str, Any], broadcast: bool) -> None:
    model, optimizer = start_over(name, options, EVEN)
    weights, state = torch.load(path, weights_only=True)
    given = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    if broadcast and dist.get_rank() > 0:
        state = {}
    set_model_state_dict(model, weights, options=given)
    optim.load_distributed_state_dict(model, optimizer, state, options=given)
    assert_continues(model, optimizer, name, options, EVEN)


@kinds
def test_a_full_state_dict_goes_from_two_processes_to_one_and_back(tmp_path, name, options):
    together(save_full, tmp_path / "of two", name, options)
    resume_full(tmp_path / "of two", name, options, broadcast=False)
    save_full(tmp_path / "of one", name, options)
    together(resume_full, tmp_path / "of one", name, options, broadcast=False)
    together(resume_full, tmp_path / "of one", name, options, broadcast=True)


def save_packed(path: Path, shapes: list[tuple[int, ...]]) -> None:
    model, optimizer = start_over("AdamW", {"bits": 8}, shapes)
    take_steps(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(format="packed")}, path)


def resume_packed(path: Path, shapes: list[tuple[int, ...]]) -> None:
    plain, model = Tensors(shapes), Tensors(shapes)
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    fully_shard(model, mesh=mesh())
    optimizer = build("AdamW", model, bits=8)
    optimizer.load_state_dict(state["optim"])
    assert_continues(model, optimizer, "AdamW", {"bits": 8}, shapes)
    assert_moved(model, plain)


@shapes_
def test_two_processes_load_the_packed_state_of_one(tmp_path, shapes):
    save_packed(tmp_path / "packed.pt", shapes)
    together(resume_packed, tmp_path / "packed.pt", shapes)


@on_two_processes
def test_shards_are_not_saved_as_packed():
    model, optimizer = start_over("AdamW", {"bits": 8}, EVEN)
    take_steps(model, optimizer, range(1))
    with pytest.raises(
        ValueError, match=r"packed codes are valid only for the blocks .* save sharded state as portable"
    ):
        optimizer.state_dict(format="packed")


def flatten(name: str, before: int, after: int) -> None:
    """Every state by its full name in one flat dict, looked up by the names in memory."""
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = start_over(name, {"bits": before}, EVEN)
    take_steps(model, optimizer, range(3))
    for state in (
        optim.distributed_state_dict(model, optimizer, options=flattened),
        get_optimizer_state_dict(model, optimizer, options=flattened),
    ):
        assert not any(key.endswith("_codes") for key in state)  # which could not be sharded
        fresh = build(name, model, bits=after)
        fresh.zero_grad()  # with gradients there, PyTorch makes no room for the state
        set_optimizer_state_dict(model, fresh, state, options=flattened)
        assert_same_values(fresh.state_dict(format="portable"), optimizer.state_dict(format="portable"))
    if before == after:
        assert_continues(model, fresh, name, {"bits": before}, EVEN)


def assert_same_values(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for place, entry in expected["state"].items():
        for key, x in entry.items():
            assert_same(local(got["state"][place][key]), local(x))


@pytest.mark.parametrize("name", CHOICES)
def test_flattened_8_bit_state_is_taken_back(name):
    flatten(name, 8, 8)
    together(flatten, name, 8, 8)


@pytest.mark.parametrize(("before", "after"), [(32, 32), (8, 32)])
def test_flattened_state_of_other_bits_is_taken_back(before, after):
    flatten("AdamW", before, after)
    together(flatten, "AdamW", before, after)


def test_flattened_state_of_32_bits_is_rounded_to_8():
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = start_over("AdamW", {"bits": 32}, EVEN)
    take_steps(model, optimizer, range(1))
    state = get_optimizer_state_dict(model, optimizer, options=flattened)
    optimizer.zero_grad()
    fresh = build("AdamW", model, bits=8)
    set_optimizer_state_dict(model, fresh, state, options=flattened)
    for p in model.parameters():
        assert "exp_avg_codes" in fresh.state[p]


def call_dcp_directly(bits: int) -> None:
    model, optimizer = start_over("AdamW", {"bits": bits}, EVEN)
    take_steps(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer)
    fresh = build("AdamW", model, bits=bits)
    fresh.zero_grad()
    set_optimizer_state_dict(model, fresh, state)
    assert_continues(model, fresh, "AdamW", {"bits": bits}, EVEN)


@pytest.mark.parametrize("bits", [32, 8])
def test_dcp_gets_portable_state(bits):
    call_dcp_directly(bits)
    together(call_dcp_directly, bits)


def test_packed_state_is_loaded_as_plain_data(tmp_path):
    model, optimizer = start_over("AdamW", {"bits": 8}, EVEN)
    take_steps(model, optimizer, range(1))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert type(loaded["state"]) is OrderedDict
    build("AdamW", model, bits=8).load_state_dict(loaded)


# --- Concatenated tensors


@pytest.mark.parametrize("views", [False, True])
@on_two_processes
def test_fsdp1_is_refused(views):
    # With use_orig_params=True it hands out parameters with their names, but they are pieces all the same.
    model = FullyShardedDataParallel(Tensors(EVEN), device_id=torch.device("cpu"), use_orig_params=views)
    with pytest.raises(ValueError, match=r"concatenated tensors \(FSDP1 or ZeRO\).* Use FSDP2"):
        build("StableAdamW", model)


@on_two_processes
def test_fsdp1_is_refused_at_the_step_too():
    """A host may wrap the model after the optimizer was made; Accelerate does."""
    model = Tensors(EVEN)
    optimizer = build("StableAdamW", model)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    [group] = optimizer.param_groups
    group["params"] = list(wrapped.parameters())
    for p in group["params"]:
        p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match=r"concatenated .*(FSDP1|ZeRO).* Use FSDP2"):
        optimizer.step()


def test_zero_is_refused():
    p = nn.Parameter(torch.zeros(4))
    p.ds_id = 0  # type: ignore[attr-defined]  # how DeepSpeed numbers what it cuts up
    with pytest.raises(ValueError, match=r"concatenated tensors \(FSDP1 or ZeRO\).* Use FSDP2"):
        optim.AdamW([p])


@on_two_processes
def test_adafactor_refuses_shards():
    for kind in (optim.Adafactor, optim.AdafactorMomentum):
        with pytest.raises(ValueError, match="rows and columns are those of whole matrices"):
            kind(fully_shard(Tensors(EVEN), mesh=mesh()).parameters())


# --- The two processes themselves; last, because each of these ends a pair


@on_two_processes
def fail_in_the_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second process is not well")
    dist.barrier()


def test_what_fails_in_a_process_fails_here_with_its_traceback():
    with pytest.raises(AssertionError, match=r"(?s)in fail_in_the_second.*ValueError: the second process is not well"):
        fail_in_the_second()


@on_two_processes
def wait_in_the_second(seconds: float) -> None:
    time.sleep(seconds * dist.get_rank())


def test_a_process_that_hangs_is_given_up(monkeypatch):
    wait_in_the_second(0)  # starting takes longer than the patience below
    monkeypatch.setattr(processes, "PATIENCE_S", 0.5)
    with pytest.raises(TimeoutError, match=r"processes \[1\] are not done"):
        wait_in_the_second(3600)
