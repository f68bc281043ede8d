"""The estimate of memory: exact for weights and optimizer state, and never above what a real training step uses."""

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trimtab.nn import GPT, ConfigError, contrastive_loss
from trimtab.recipes import RECIPES
from trimtab.schedule import LearningRate
from trimtab.train import ModuleRun, OptimConfig, RunConfig, ScheduleConfig, memory
from trimtab.train.build import build_model, build_optimizer
from trimtab.train.config import ModuleConfig, with_values
from trimtab.train.memory import check_memory, check_weights, device_memory, estimate
from trimtab.train.processes import Processes

GB = 10**9


def gpt(**changes: Any) -> RunConfig:
    return with_values(RECIPES["gpt-tiny"](), {"batch": 8, "model.context": 64} | changes)


def clip(**changes: Any) -> RunConfig:
    return with_values(RECIPES["clip-tiny"](), {"batch": 16} | changes)


def train_step(config: RunConfig, model: Any, optimizer: torch.optim.Optimizer) -> None:
    shape = config.batch, config.model.context
    vocab: int = config.model.vocab  # type: ignore[union-attr]
    tokens = torch.randint(vocab, shape)
    tokens[:, -1] = vocab - 1  # the end of a caption
    size = getattr(config.model, "image_size", 0)
    first, second = (
        (tokens, tokens.clone()) if isinstance(model, GPT) else (torch.randn(shape[0], 3, size, size), tokens)
    )
    rows = config.micro_batch or config.batch
    for i in range(0, config.batch, rows):
        with torch.autocast("cpu", torch.bfloat16, enabled=config.autocast == "bfloat16"):
            found = model(first[i : i + rows], second[i : i + rows])
            loss = found.loss if isinstance(model, GPT) else contrastive_loss(*found).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(config: RunConfig) -> int:
    """The largest number of bytes that PyTorch has allocated at one time, in two steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model = build_model(config)
        optimizer = build_optimizer(model, config.optim)
        for _ in range(2):
            train_step(config, model, optimizer)
    events: Any = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes))


@pytest.mark.parametrize(
    "config",
    [
        gpt(),
        gpt(**{"model.bias": True, "model.qk_norm": "off", "model.positions": "learned", "model.tied": True}),
        gpt(**{"model.checkpointing": True, "model.depth": 6}),
        gpt(**{"model.qk_norm": "per-head", "micro_batch": 2}),
        gpt(**{"model.attention": "squared-relu", "optim.bits": 32}),
        gpt(**{"model.linear": "switchback-m", "autocast": "bfloat16"}),
        gpt(**{"model.width": 256, "batch": 1}),  # more gradients than activations
        clip(),
        clip(**{"model.checkpointing": True, "model.patch_dropout": 0.0}),
    ],
    ids=["rope", "gpt2", "checkpointing", "micro-batches", "squared-relu", "low", "wide", "clip", "clip-checkpointing"],
)
def test_the_estimate_is_a_little_below_the_peak_of_a_real_step(config):
    found = estimate(config)
    assert found is not None
    assert 0.6 < found.total / peak(config) <= 1


SWITCHES: list[dict[str, Any]] = [
    {"model.depth": 0},
    {"model.bias": True, "model.qk_norm": "whole", "model.embedding": "stable"},
    {"model.qk_norm": "off", "model.kappa": 1.0, "model.positions": "learned", "model.layer_scale": 0.1},
    {"model.qk_norm": "per-head", "model.tied": True, "model.mlp_ratio": 3, "model.linear": "switchback"},
]


@pytest.mark.parametrize("config", [*(gpt(**switches) for switches in SWITCHES), clip(), clip(**{"model.bias": False})])
def test_the_weights_are_exact(config):
    found = estimate(config)
    assert found is not None
    assert found.weights == sum(p.nbytes for p in build_model(config).parameters())


@pytest.mark.parametrize("make", [gpt, clip])
@pytest.mark.parametrize(
    "name", ["adamw", "stable-adamw", "adam", "lion", "lamb", "ademamix", "sgd", "adagrad", "torch-adamw"]
)
def test_the_optimizer_state_is_that_of_a_real_optimizer(make: Callable[..., RunConfig], name):
    state: dict[str, Any] = {"optim.bits": 32} if name == "torch-adamw" else {"optim.bits": 8, "optim.block": 64}
    config = make(**{"optim.name": name, **state})
    model = build_model(config)
    optimizer = build_optimizer(model, config.optim)
    train_step(config, model, optimizer)
    real = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    found = estimate(config)
    assert found is not None
    assert found.optimizer == pytest.approx(real, rel=0.01)  # not counted: the step number of every tensor


def test_the_rows_and_columns_of_adafactor_are_not_counted():
    config = gpt(**{"optim.name": "adafactor", "optim.bits": 32})
    model = build_model(config)
    optimizer = build_optimizer(model, config.optim)
    train_step(config, model, optimizer)
    real = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    found = estimate(config)
    assert found is not None
    assert 0.95 * real < found.optimizer < real


def test_embeddings_with_8_bit_state_need_less():
    few, many = (estimate(gpt(**{"optim.bits": 8, "optim.embedding_bits": bits})) for bits in (8, 32))
    assert few is not None
    assert many is not None
    assert few.optimizer < many.optimizer


def test_momentum_zero_has_no_state():
    found = estimate(gpt(**{"optim.name": "sgd", "optim.betas": [0.0, 0.9]}))
    assert found is not None
    assert found.optimizer == 0


def test_lengths_that_the_run_does_not_reach_do_not_count():
    whole, short = (estimate(gpt(**{"steps": steps, "schedule.seqlen.steps": 100})) for steps in (200, 10))
    few = estimate(gpt(**{"tokens": 8 * 64 * 10, "schedule.seqlen.steps": 100}))
    assert whole is not None
    assert short is not None
    assert short == few
    assert (whole.length, short.length) == (64, 32)
    assert short.activations < whole.activations


def test_shards_divide_everything_but_activations():
    one, ddp, fsdp = estimate(gpt()), estimate(gpt(), 4), estimate(gpt(), 4, sharded=True)
    assert one is not None
    assert ddp is not None
    assert fsdp is not None
    assert (ddp.weights, fsdp.weights) == (one.weights, one.weights // 4)
    assert (ddp.rows, fsdp.rows) == (2, 2)
    assert (one.accumulates, ddp.accumulates, fsdp.accumulates) == (False, True, False)


# --- What does not fit


def limit(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(memory, "device_memory", lambda device: size)


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-small", "gpt-lab", "clip-tiny", "gpt2-117m"])
def test_recipes_that_fit_are_accepted(monkeypatch, name):
    limit(monkeypatch, 8 * GB)
    check_memory(RECIPES[name](), Processes())


LARGE: list[tuple[str, dict[str, Any], int, str]] = [
    ("gpt-small", {"batch": 4096}, 24 * GB, "micro_batch=256"),
    ("gpt-small", {"batch": 4095}, 24 * GB, "micro_batch=1"),
    ("gpt2-1.5b", {"micro_batch": 1, "optim.bits": 32}, 25 * GB, "optim.bits=8"),
    ("gpt2-1.5b", {"micro_batch": 1, "optim.bits": 8}, 20 * GB, "model.checkpointing=True"),
    ("clip-vit-b32", {"model.checkpointing": False, "batch": 1024}, 16 * GB, "model.checkpointing=True"),
    ("gpt2-1.5b", {"optim.bits": 8}, 18 * GB, "micro_batch=1 and model.checkpointing=True"),
]


@pytest.mark.parametrize(("name", "changes", "size", "remedy"), LARGE)
def test_the_remedy_makes_the_run_fit(monkeypatch, name, changes, size, remedy):
    limit(monkeypatch, size)
    config = with_values(RECIPES[name](), changes)
    with pytest.raises(ConfigError, match=rf"^this run needs at least .* and this machine has .*; try {remedy}$"):
        check_memory(config, Processes())
    offered = dict(part.split("=") for part in remedy.split(" and "))
    check_memory(with_values(config, offered), Processes())


def test_the_error_has_every_part(monkeypatch):
    limit(monkeypatch, 23_400_000_000)
    with pytest.raises(ConfigError) as error:
        check_memory(with_values(RECIPES["gpt2-1.5b"](), {"optim.bits": 8}), Processes())
    assert re.fullmatch(
        r"this run needs at least 50\.6 GB \(weights 6\.23 GB, optimizer state 3\.66 GB, gradients 6\.23 GB, "
        r"activations 34\.5 GB at length 864 and 8 rows\) and this machine has 23\.4 GB; try micro_batch=1",
        str(error.value),
    )


HUGE = 2**53
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("gpt-tiny", {"model.width": HUGE}),
    ("gpt-tiny", {"model.mlp_ratio": HUGE}),
    ("gpt-tiny", {"model.vocab": HUGE}),
    ("gpt-tiny", {"model.width": HUGE, "model.mlp_ratio": HUGE, "model.vocab": HUGE, "model.depth": 10**5}),
    ("gpt-tiny", {"model.context": HUGE, "model.positions": "learned"}),
    ("clip-tiny", {"model.image_size": HUGE, "model.patch": 1}),
    ("clip-tiny", {"model.channels": HUGE, "model.embed": HUGE, "model.text_width": HUGE}),
]


@pytest.mark.parametrize(("name", "changes"), MODELS)
def test_a_model_beyond_any_machine_is_refused_at_once(name, changes):
    config = with_values(RECIPES[name](), changes)
    begun = time.perf_counter()
    with pytest.raises(ConfigError, match=r"need \S+ \wB and this machine has"):
        check_weights(config, Processes())
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize("changes", [{"batch": HUGE}, {"batch": HUGE, "micro_batch": 1}, {"model.context": HUGE}])
def test_a_batch_beyond_any_machine_is_refused(changes):
    with pytest.raises(ConfigError, match=r"this run needs at least .* this machine has"):
        check_memory(with_values(RECIPES["gpt-tiny"](), {"schedule.seqlen.start": None, **changes}), Processes())


def test_the_estimate_is_quick():
    config, times = RECIPES["gpt2-1.5b"](), []
    for _ in range(5):
        begun = time.perf_counter()
        estimate(config)
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.02


def test_a_user_defined_model_is_not_checked(monkeypatch):
    limit(monkeypatch, 1)
    rate = ScheduleConfig(lr=LearningRate())
    config = ModuleRun(model=ModuleConfig(build="a:b"), optim=OptimConfig(), schedule=rate, steps=1, batch=1)
    assert estimate(config) is None
    check_memory(config, Processes())


# --- The machine


def test_processes_of_one_machine_share_its_memory(monkeypatch):
    config = with_values(RECIPES["gpt-small"](), {"batch": 64})
    alone = estimate(config, 4)
    assert alone is not None
    limit(monkeypatch, 3 * alone.total)
    check_memory(config, Processes(world=4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="this machine has"):
        check_memory(config, Processes(world=4))
    check_memory(config, Processes(world=4, device=torch.device("cuda", 1)))


def test_a_sharded_model_is_built_whole_first(monkeypatch):
    config = gpt()
    whole = estimate(config)
    assert whole is not None
    limit(monkeypatch, whole.weights - 1)
    with pytest.raises(ConfigError, match=r"^the weights of this model need .*; try a smaller model\.width"):
        check_memory(config, Processes(world=64, parallel="fsdp2"))


def test_a_gpu_has_its_own_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=5 * GB))
    assert device_memory(torch.device("cuda")) == 5 * GB
    with pytest.raises(ConfigError, match="and cuda:0 has 5 GB"):
        check_memory(RECIPES["gpt2-1.5b"](), Processes(device=torch.device("cuda", 0)))


def test_without_a_known_memory_nothing_is_refused(monkeypatch):
    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", unknown)
    assert device_memory(torch.device("cpu")) is None
    check_memory(with_values(RECIPES["gpt-tiny"](), {"model.width": HUGE}), Processes())


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "max"}, 1000),
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "700"}, 700),
        ("0::/not/mounted\n", {"memory.max": "900"}, 900),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "800\n"}, 800),
        ("5:cpu,memory:/a\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ("1:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "800"}, None),
        (None, {}, None),
    ],
    ids=["above", "own", "container", "version 1", "version 1 without limit", "no memory group", "no groups"],
)
def test_a_control_group_limits_the_memory(tmp_path: Path, monkeypatch, own, files, expected):
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    machine = device_memory(torch.device("cpu"))
    if own is not None:
        (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert device_memory(torch.device("cpu")) == (machine if expected is None else expected)
