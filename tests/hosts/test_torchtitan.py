"""TorchTitan: its flat checkpoints keep every optimizer's state, on one and two processes and between them.

Its functions for optimizer state need nothing but torch, and are loaded from their file. The container of optimizers
needs all of TorchTitan, also `spmd_types`.
"""

import importlib.util
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.conftest import assert_same, seed
from tests.optim.cases import CASES, OPTIMIZERS, QUANTIZED
from tests.processes import PROCESSES, mesh, together
from trimtab import optim
from trimtab.nn import SwitchBackLinear
from trimtab.ops.sharding import local
from trimtab.watch import Watch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")

# Every moment, and the state that options add.
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in OPTIMIZERS},
    "RMSprop": {"momentum": 0.9},
    "AdamW": {"percentile_clipping": 50, "skip_nonfinite": True},
    "Lion": {"rounding": "split"},
    "SGD": {"rounding": "kahan"},
}


class Model(nn.Module):
    """Shards end at the end of a block of 64, so 8-bit state is the same on one process and on two."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = seed(0)
        self.embed = nn.Parameter(torch.randn(16, 64, generator=generator).to(dtype))
        self.weight = nn.Parameter(torch.randn(8, 64, generator=generator).to(dtype))
        self.bias = nn.Parameter(torch.randn(128, generator=generator).to(dtype))


def start(name: str, bits: int) -> tuple[Model, optim.Optimizer]:
    kind, own = OPTIMIZERS[name]
    model = Model(torch.bfloat16 if "rounding" in OPTIONS[name] else torch.float32)
    if dist.is_initialized():
        fully_shard(model, mesh=mesh())
    options = own | OPTIONS[name] | {"bits": bits, "block": 64, "min_8bit_size": 256}
    return model, kind(model.named_parameters(), **options)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        generator = seed(number)
        for p in model.parameters():
            whole = torch.randn(p.shape, generator=generator).to(p.dtype) * 0.01
            if dist.is_initialized():
                from torch.distributed.tensor import distribute_tensor

                whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = whole
        optimizer.step()
        optimizer.zero_grad()


@cache
def titan() -> Any:
    """torchtitan/components/optimizer/utils.py"""
    package = importlib.util.find_spec("torchtitan")
    assert package is not None
    [folder] = package.submodule_search_locations or []
    path = Path(folder) / "components" / "optimizer" / "utils.py"
    spec = importlib.util.spec_from_file_location("torchtitan_optimizer_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(path: Path, name: str, bits: int, format: Any = None) -> None:
    model, optimizer = start(name, bits)
    optimizer.default_format = format
    take_steps(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optim": titan().get_flat_optim_state_dict(optimizer)}
    dcp.save(state, checkpoint_id=path)


def resume(path: Path, name: str, bits: int, format: Any = None) -> None:
    """As TorchTitan does it: make state, read into it, look it up by the names in memory."""
    model, optimizer = start(name, bits)
    optimizer.default_format = format
    titan().init_optim_state(optimizer)
    state = {"model": model.state_dict(), "optim": titan().get_flat_optim_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=path)
    titan().load_flat_optim_state_dict(optimizer, state["optim"])
    take_steps(model, optimizer, range(3, 6))
    straight, whole = start(name, bits)
    take_steps(straight, whole, range(6))
    for p, q in zip(model.parameters(), straight.parameters(), strict=True):
        assert_same(local(p).detach(), local(q).detach())
        assert optimizer.state[p].keys() == whole.state[q].keys()
        for key, x in whole.state[q].items():
            assert_same(optimizer.state[p][key], x)


@pytest.mark.parametrize(
    ("name", "bits", "format"),
    [(*case, "packed") for case in CASES] + [(name, 8, "portable") for name in ("AdamW", "StableAdamW", "RMSprop")],
)
def test_a_flat_checkpoint_of_one_process_continues_bit_for_bit(tmp_path, name, bits, format):
    save(tmp_path, name, bits, format)
    resume(tmp_path, name, bits, format)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_flat_checkpoint_of_fsdp2_continues_bit_for_bit(tmp_path, name):
    together(save, tmp_path, name, 8)
    together(resume, tmp_path, name, 8)


@pytest.mark.parametrize("name", ["Adam", "StableAdamW", "AdEMAMix"])
def test_a_flat_checkpoint_goes_from_two_processes_to_one_and_back(tmp_path, name):
    together(save, tmp_path / "two", name, 8)
    save(tmp_path / "one", name, 8, "portable")
    _, optimizer = start(name, 8)
    optimizer.default_format = "portable"
    titan().init_optim_state(optimizer)
    states = []
    for folder in ("one", "two"):
        state = {"optim": titan().get_flat_optim_state_dict(optimizer)}
        dcp.load(state, checkpoint_id=tmp_path / folder)
        states.append({key: x for key, x in state["optim"].items() if isinstance(x, torch.Tensor)})
    for key, x in states[0].items():
        assert_same(states[1][key], x)
    together(load_only, tmp_path / "one", name)


def load_only(path: Path, name: str) -> None:
    assert dist.get_world_size() == PROCESSES
    _, optimizer = start(name, 8)
    titan().init_optim_state(optimizer)
    state = {"optim": titan().get_flat_optim_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=path)
    titan().load_flat_optim_state_dict(optimizer, state["optim"])
    same, expected = start(name, 8)
    take_steps(same, expected, range(3))
    # The same values; a block whose scale has several forms may have another one.
    mine, theirs = optimizer.state_dict()["state"], expected.state_dict()["state"]
    for place, entry in theirs.items():
        for key, x in entry.items():
            assert_same(local(mine[place][key]), local(x))


def test_codes_of_another_optimizer_are_refused_also_without_group_keys():
    """AdamW's first moment is stored in units of the second; Lion has no second."""
    model, adamw = start("AdamW", 8)
    take_steps(model, adamw, range(1))
    lion = optim.Lion(Model(torch.float32).named_parameters(), bits=8, block=64, min_8bit_size=256)
    titan().init_optim_state(lion)
    flat = titan().get_flat_optim_state_dict(adamw)
    with pytest.raises(ValueError, match="codes mean something else there; save it as portable"):
        titan().load_flat_optim_state_dict(lion, flat)


def test_the_container_trains_saves_and_resumes(tmp_path):
    pytest.importorskip("spmd_types", reason="TorchTitan's container of optimizers imports it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchtitan.components.optimizer import ParamGroupConfig

        from trimtab.hosts.torchtitan import Optimizers

    def config(name: str, **more: Any) -> Any:
        own = {"lr": 1e-2, "weight_decay": 0.1, "bits": 8, "min_8bit_size": 256}
        group = ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs=own)
        return Optimizers.Config(param_groups=[group], **more)

    model = Model(torch.float32)
    container = config("StableAdamW").build(model_parts=[model])
    take_steps(model, container, range(3))
    [optimizer] = container.optimizers
    watch = Watch(model, optimizer)
    take_steps(model, container, range(1))
    assert watch.step(2.0) == []
    assert {"rms/weight", "grad_norm"} <= set(watch.scalars())
    watch.close()
    assert [entry.bits for entry in optimizer.describe().entries] == [32, 8, 32]  # the embedding is known by its name
    dcp.save({"model": model.state_dict(), "optim": container.state_dict()}, checkpoint_id=tmp_path)
    again = Model(torch.float32)
    fresh = config("StableAdamW").build(model_parts=[again])
    state = {"model": again.state_dict(), "optim": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    fresh.load_state_dict(state["optim"])
    take_steps(model, container, range(3, 6))
    take_steps(again, fresh, range(3, 6))
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert_same(p.detach(), q.detach())
    with pytest.raises(ValueError, match=r"optimizer_name must be one of .*AdamW.*, got 'Muon'"):
        config("Muon").build(model_parts=[model])
    with pytest.raises(ValueError, match="fused_opt_states_bf16' is for PyTorch's Adam"):
        config("AdamW", implementation="fused_opt_states_bf16").build(model_parts=[model])


def llama(*, quantized: bool) -> Any:
    """Two layers of TorchTitan's Llama 3 for debugging."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchtitan.models.llama3 import model_registry

        from trimtab.hosts.torchtitan import SwitchBackConverter

        converter = SwitchBackConverter.Config(when="always", skip=["layers.1.*"])
        config = model_registry("debugmodel", converters=[converter] if quantized else None).model
        config.layers = config.layers[:2]
        torch.manual_seed(0)
        model = config.build()
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def test_its_llama_is_built_with_int8_layers():
    """Forward and backward of its own blocks; the attention's backward pass needs a GPU."""
    pytest.importorskip("spmd_types", reason="TorchTitan's models import it")
    plain, model = llama(quantized=False), llama(quantized=True)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name  # same names, same initial values
    layers = {name for name, module in model.named_modules() if isinstance(module, SwitchBackLinear)}
    inside = ("attention.wo", "attention.qkv_linear.wqkv", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    assert layers == {f"layers.0.{name}" for name in inside}  # no head, and not what was skipped
    results = []
    for one in (plain, model):
        x = torch.randn(2, 16, 256, generator=seed(1), requires_grad=True)
        y = one.layers["0"].feed_forward(x)
        y.square().sum().backward()
        results.append((y, x.grad, one.layers["0"].feed_forward.w2.weight.grad))
    for exact, rounded in zip(*results, strict=True):
        error = torch.linalg.vector_norm(rounded - exact) / torch.linalg.vector_norm(exact)
        assert 0 < error < 0.06  # six products on the way, each rounded by about 1 %
    tokens, places = torch.randint(2000, (2, 128), generator=seed(2)), torch.arange(128).expand(2, -1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = [one(tokens, places, one.get_attention_masks(places)) for one in (plain, model)]
    assert torch.linalg.vector_norm(logits[1] - logits[0]) < 0.05 * torch.linalg.vector_norm(logits[0])
