"""Recipes: each builds, and the large ones have the numbers of their papers."""

import pytest
import torch

from tests.conftest import seed
from trimtab import optim
from trimtab.nn import CLIP, GPT
from trimtab.recipes import RECIPES
from trimtab.train.build import build_optimizer
from trimtab.train.plan import draw_plan, simulate

NAMES = ["gpt-tiny", "gpt-small", "gpt-lab", "gpt2-117m", "gpt2-1.5b", "gpt3-125m"]
NAMES += ["clip-tiny", "clip-lab", "clip-vit-b32", "clip-vit-l14", "clip-vit-h14"]


def build(config):
    return GPT(config.model) if hasattr(config.model, "z_loss") else CLIP(config.model)


def test_the_names_of_the_recipes():
    assert list(RECIPES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_model_builds_and_every_parameter_is_trained(name):
    config = RECIPES[name]()
    with torch.device("meta"):
        model = build(config)
    grouped = [p for group in optim.groups(model, lr=1.0, weight_decay=0.1) for p in group["params"]]
    params = [p[1] if isinstance(p, tuple) else p for p in grouped]
    assert {id(p) for p in params} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("name", ["gpt-tiny", "clip-tiny"])
def test_the_optimizer_decays_matrices_and_nothing_else(name):
    config = RECIPES[name]()
    model = build(config)
    optimizer = build_optimizer(model, config.optim)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed
    assert {p.dim() for p in model.parameters() if id(p) in decayed} <= {2, 4}


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("gpt2-117m", 123e6, 126e6),  # what its authors call 117M has 124M
        ("gpt2-1.5b", 1.55e9, 1.56e9),
        ("gpt3-125m", 124e6, 127e6),
        ("clip-vit-b32", 150e6, 153e6),
        ("clip-vit-l14", 426e6, 430e6),
        ("clip-vit-h14", 984e6, 989e6),
    ],
)
def test_the_large_models_have_the_size_in_their_name(name, least, most):
    with torch.device("meta"):
        count = sum(p.numel() for p in build(RECIPES[name]()).parameters())
    assert least < count < most


@pytest.mark.parametrize(
    ("name", "shape", "start", "warmup_steps"),
    [("gpt2-117m", (12, 768, 12), 8, 20_000), ("gpt2-1.5b", (48, 1600, 25), 64, 45_000)],
)
def test_gpt2_has_the_numbers_of_sequence_length_warmup(name, shape, start, warmup_steps):
    config = RECIPES[name]()
    assert (config.model.depth, config.model.width, config.model.heads) == shape
    assert (config.model.context, config.model.vocab) == (1024, 50_257)
    assert (config.model.positions, config.model.tied, config.model.bias) == ("learned", True, True)
    assert (config.batch, config.tokens, config.steps) == (4096, 157_286_400_000, 75_000)
    assert (config.optim.lr, config.optim.betas, config.optim.weight_decay) == (6e-4, (0.9, 0.95), 0.01)
    assert config.optim.clip_norm == 1.0
    lr, seqlen = config.schedule.lr, config.seqlen_warmup
    assert (lr.kind, lr.warmup, lr.warmup_unit, lr.decay_unit, lr.floor) == ("cosine", 3000, "steps", "tokens", 1e-5)
    assert (seqlen.start, seqlen.end, seqlen.steps, seqlen.multiple) == (start, 1024, warmup_steps, 8)


def test_gpt2_1_5b_takes_the_steps_that_the_paper_needs():
    future = simulate(RECIPES["gpt2-1.5b"]())
    assert future.steps == 58_769
    assert future.rate.decay >= 157_286_400_000
    assert round(future.cut_off, 2) == 0.36


def test_gpt3_has_the_numbers_of_its_script():
    config = RECIPES["gpt3-125m"]()
    assert (config.model.depth, config.model.width, config.model.heads, config.model.context) == (12, 768, 12, 2048)
    assert (config.batch, config.tokens) == (2048, 300_000_000_000)
    assert (config.optim.lr, config.optim.betas, config.optim.weight_decay) == (2.4e-3, (0.9, 0.95), 0.1)
    lr, seqlen = config.schedule.lr, config.seqlen_warmup
    assert (lr.warmup, lr.warmup_unit, lr.decay, lr.decay_unit) == (375_000_000, "tokens", 260_000_000_000, "tokens")
    assert lr.floor == 6e-5
    assert (seqlen.start, seqlen.end, seqlen.steps) == (72, 2048, 27_638)
    assert simulate(config).tokens >= config.tokens  # the cap on steps does not end it first


@pytest.mark.parametrize("name", ["clip-vit-b32", "clip-vit-l14", "clip-vit-h14"])
def test_clip_has_the_numbers_of_stable_adamw(name):
    config = RECIPES[name]()
    assert (config.steps, config.batch, config.schedule.lr.warmup) == (20_000, 16_384, 5000)
    assert (config.schedule.lr.kind, config.schedule.lr.floor) == ("cosine", 0.0)
    assert (config.optim.name, config.optim.lr, config.optim.betas) == ("stable-adamw", 2e-3, (0.9, 0.98))
    assert (config.optim.eps, config.optim.weight_decay, config.optim.clip_norm) == (1e-6, 0.2, None)
    assert (config.model.patch_dropout, config.model.linear, config.model.image_size) == (0.5, "switchback", 224)
    assert (config.autocast, config.seed) == ("bfloat16", 0)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_simulated_and_drawn(name):
    picture = draw_plan(RECIPES[name]())
    assert "learning rate" in picture.text
    assert picture.svg.startswith("<svg")


def test_the_small_recipes_use_switchback_and_8_bit_state():
    config = RECIPES["gpt-small"]()
    assert (config.model.linear, config.optim.name, config.optim.bits) == ("switchback", "stable-adamw", 8)
    model = build(RECIPES["gpt-tiny"]())
    tokens = torch.randint(257, (2, 16), generator=seed(0))
    assert model(tokens, tokens).loss.isfinite()


def test_the_old_name_of_simulate_works_with_a_warning():
    from trimtab.train import plan

    with pytest.warns(DeprecationWarning, match="foretell is now called simulate"):
        assert plan.foretell is simulate
    with pytest.raises(AttributeError, match="has no attribute 'fortell'"):
        _ = plan.fortell
