"""A config builds a model that runs, or is refused with its field, its value and a value that would work."""

import math
import re
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.nn.config import ConfigError, TransformerConfig
from trimtab.nn.gpt import GPT, GPTConfig
from trimtab.nn.transformer import Transformer

GOOD: dict[str, Any] = {"depth": 1, "width": 12, "heads": 3, "vocab": 7, "context": 5}

REFUSED = [
    ({"width": 13}, "width=13 does not split into heads=3; try width=12"),
    ({"width": 1, "heads": 3}, "width=1 does not split into heads=3; try width=3"),
    ({"width": 9}, "width=9 with heads=3 gives heads of 3, and rotary positions need an even head width; try width=12"),
    ({"width": 0}, "width=0 is too small; try width=1"),
    ({"heads": 0}, "heads=0 is too small; try heads=1"),
    ({"depth": -1}, "depth=-1 is too small; try depth=0"),
    ({"context": 0}, "context=0 is too small; try context=1"),
    ({"vocab": 0}, "vocab=0 is too small; try vocab=1"),
    ({"mlp_ratio": 0}, "mlp_ratio=0 is too small; try mlp_ratio=1"),
    ({"mup_base_width": 0}, "mup_base_width=0 is too small; try mup_base_width=1"),
    ({"width": 12.0}, "width=12.0 is not a whole number; try width=1"),
    ({"depth": True}, "depth=True is not a whole number; try depth=1"),
    ({"bias": 1}, "bias=1 is not True or False; try bias=True"),
    ({"norm_eps": 0.0}, "norm_eps=0.0 must be above zero; try norm_eps=1.0"),
    ({"norm_eps": math.nan}, "norm_eps=nan is not a finite number; try norm_eps=1.0"),
    ({"kappa": -2.0}, "kappa=-2.0 must be above zero; try kappa=2.0"),
    ({"layer_scale": "0"}, "layer_scale='0' is not a finite number or None; try layer_scale=1.0"),
    ({"layer_scale": math.inf}, "layer_scale=inf is not a finite number or None; try layer_scale=1.0"),
    ({"z_loss": -1e-4}, "z_loss=-0.0001 would reward drifting logits; try z_loss=0.0001"),
    ({"qk_norm": True}, "qk_norm=True is not known; try 'off' or 'shared' or 'per-head' or 'whole'"),
    ({"attention": "flash"}, "attention='flash' is not known; try 'softmax' or 'squared-relu'"),
    ({"linear": "int4"}, "linear='int4' is not known; try 'float' or 'switchback'"),
    ({"positions": "alibi"}, "positions='alibi' is not known; try 'rope' or 'learned'"),
    ({"mup": "half"}, "mup='half' is not known; try 'off' or 'simple' or 'intermediate' or 'full'"),
    *(
        ({name: 10**20}, f"{name}={10**20} is too large for any machine; try {name}={better}")
        for name, better in (("width", 1), ("heads", 1), ("vocab", 1), ("mlp_ratio", 4), ("context", 512))
    ),
    ({"depth": 10**9}, "depth=1000000000 is more blocks than can be built; try depth=100000"),
    ({"depth": -(10**400)}, "is too large for any machine; try depth=1"),
    ({"norm_eps": 10**400}, "is not a finite number; try norm_eps=1.0"),
    ({"kappa": 1.0, "qk_norm": "whole"}, "kappa=1.0 and qk_norm='whole' exclude each other"),
    ({"tied": True, "mup": "simple"}, "tied=True makes one matrix of embedding and head, and mup='simple' trains"),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED, ids=[words.split()[0] for _, words in REFUSED])
def test_impossible_configs_are_refused_with_words(wrong, words):
    GPTConfig(**GOOD)
    with pytest.raises(ConfigError, match=re.escape(words)):
        GPTConfig(**{**GOOD, **wrong})


@pytest.mark.parametrize("wrong", [wrong for wrong, words in REFUSED if re.search(r"try \w+=\S+$", words)])
def test_the_value_that_is_offered_works(wrong):
    with pytest.raises(ConfigError) as refusal:
        GPTConfig(**{**GOOD, **wrong})
    field, value = re.findall(r"try (\w+)=(\S+)$", str(refusal.value))[0]
    fixed = {**GOOD, **wrong, field: eval(value)}
    if field == "width":  # an example of the type may still not split
        fixed["heads"] = fixed["heads"] if fixed["width"] % fixed["heads"] == 0 else 1
        fixed["positions"] = "learned"
    if field == "heads":
        fixed["heads"] = 1
    GPTConfig(**fixed)


def test_an_odd_head_width_is_fine_without_rotation():
    assert GPTConfig(**{**GOOD, "width": 9, "positions": "learned"}).head_width == 3
    TransformerConfig(depth=1, width=9, heads=3, rope=False)
    with pytest.raises(ConfigError, match=r"rotary positions need an even head width; try width=12"):
        TransformerConfig(depth=1, width=9, heads=3, rope=True)


def test_configs_cannot_change_but_can_be_copied_and_written_down():
    config = GPTConfig(**GOOD, qk_norm="shared", layer_scale=0)
    with pytest.raises(FrozenInstanceError):
        config.width = 24  # type: ignore[misc]
    assert replace(config, width=24).width == 24
    with pytest.raises(ConfigError):
        replace(config, width=25)
    assert GPTConfig(**asdict(config)) == config


def test_the_blocks_config_is_the_models_and_full_mu_param_sets_two_more():
    config = GPTConfig(**GOOD, qk_norm="whole", mup="full", positions="learned")
    blocks = config.transformer
    assert (blocks.qk_norm, blocks.attention_scale, blocks.zero_queries) == ("whole", "linear", True)
    assert (blocks.causal, blocks.rope) == (True, False)
    assert replace(config, mup="intermediate", positions="rope").transformer.attention_scale == "sqrt"
    assert Transformer(blocks).config is blocks


SWITCHES = {
    "depth": st.integers(-1, 2),
    "width": st.integers(-1, 24),
    "heads": st.integers(-1, 5),
    "vocab": st.integers(0, 9),
    "context": st.integers(0, 6),
    "mlp_ratio": st.integers(0, 4),
    "bias": st.booleans(),
    "norm_eps": st.sampled_from([1e-6, 1e-2, 0.0, -1.0]),
    "qk_norm": st.sampled_from(["off", "off", "shared", "per-head", "whole", "none"]),
    "attention_scale": st.sampled_from(["sqrt", "linear"]),
    "attention": st.sampled_from(["softmax", "squared-relu"]),
    "zero_queries": st.booleans(),
    "layer_scale": st.sampled_from([None, 0.0, 1e-2, -1.0, 1]),
    "kappa": st.sampled_from([None, None, 1.0, 1e4, 0.0]),
    "checkpointing": st.booleans(),
    "positions": st.sampled_from(["rope", "learned"]),
    "embedding": st.sampled_from(["plain", "stable", "norm", "xavier"]),
    "tied": st.booleans(),
    "z_loss": st.sampled_from([0.0, 1e-4, 1.0, -1.0]),
    "mup": st.sampled_from(["off", "off", "simple", "intermediate", "full"]),
    "mup_base_width": st.integers(0, 64),
}
GOOD_SWITCHES = {
    **SWITCHES,
    "depth": st.integers(0, 2),
    "heads": st.integers(1, 3),
    "width": st.sampled_from([12, 24]),
    "vocab": st.integers(1, 9),
    "context": st.integers(1, 6),
    "norm_eps": st.sampled_from([1e-6, 1e-2]),
}


def build_or_refuse(switches: dict[str, Any]) -> GPTConfig | ConfigError:
    try:
        return GPTConfig(**switches)
    except ConfigError as refusal:
        return refusal


@settings(max_examples=60, deadline=None)
@given(switches=st.one_of(st.fixed_dictionaries(SWITCHES), st.fixed_dictionaries(GOOD_SWITCHES)))
def test_any_config_either_builds_a_model_that_runs_or_is_refused(switches):
    config = build_or_refuse(switches)
    if isinstance(config, ConfigError):
        assert any(f"{name}={value!r}" in str(config) for name, value in switches.items())
        assert "; try " in str(config)
        return
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(config.vocab, (2, config.context))
    loss = model.loss(tokens, tokens).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
