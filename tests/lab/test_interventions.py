"""Interventions: each switch changes what it says and nothing else, and refuses what it does not fit."""

import pytest
import torch

from trimtab.lab.interventions import SWITCHES, apply, list_switches, steadied
from trimtab.lab.subjects import open_subject, with_steps
from trimtab.nn import GPT, ConfigError
from trimtab.recipes import RECIPES
from trimtab.train.build import build_optimizer
from trimtab.train.config import differences, with_values
from trimtab.train.module import module_run
from trimtab.train.plan import simulate

LAB = with_steps(open_subject("gpt-lab"), 500)
OWN = module_run("tests.lab.own_model:build")

# What each switch changes of the lab's GPT: the field, and its value as JSON.
CHANGES = {
    "qk-norm": {"model.qk_norm": '"shared"'},
    "qk-norm=whole": {"model.qk_norm": '"whole"'},
    "z-loss": {"model.z_loss": "0.0001"},
    "z-loss=0.01": {"model.z_loss": "0.01"},
    "kappa=100": {"model.kappa": "100.0"},
    "no-layers": {"model.depth": "0"},
    "attention=squared-relu": {"model.attention": '"squared-relu"'},
    "attention-scale=linear": {"model.attention_scale": '"linear"'},
    "layer-scale": {"model.layer_scale": "0.0"},
    "stable-embedding": {"model.embedding": '"stable"'},
    "stable-embedding=norm": {"model.embedding": '"norm"'},
    "mup": {"model.mup": '"simple"', "model.mup_base_width": "16"},
    "mup=full:32": {"model.mup": '"full"', "model.mup_base_width": "32"},
    "linear=llm-int8": {"model.linear": '"llm-int8"'},
    "switchback": {"model.linear": '"switchback"'},
    "switchback-m": {"model.linear": '"switchback-m"'},
    "switchback-q": {"model.linear": '"switchback-q"'},
    "llm-int8": {"model.linear": '"llm-int8"'},
    "fp8-switchback": {"model.linear": '"fp8-switchback"'},
    "fp8-tensorwise": {"model.linear": '"fp8-tensorwise"'},
    "independent-decay=0.1": {"optim.weight_decay": "0.1"},
    "coupled-decay": {"optim.independent_decay": "false", "optim.weight_decay": str(0.02 / 0.03)},
    "weight-decay=0": {"optim.weight_decay": "0.0"},
    "weight-decay=10x": {"optim.weight_decay": "0.2"},
    "eps=1e-15": {"optim.eps": "1e-15"},
    "beta1=0.8": {"optim.betas": "[0.8, 0.95]"},
    "adagrad": {"optim.name": '"adagrad"'},
    "adafactor": {"optim.name": '"adafactor"'},
    "beta2-power=0.5": {"optim.name": '"stable-adamw"', "optim.beta2_power": "0.5"},
    "beta2=0.999": {"optim.betas": "[0.9, 0.999]"},
    "rms-scaled": {"optim.rms_scaled": "true"},
    "stable-adamw": {"optim.name": '"stable-adamw"'},
    "8-bit": {"optim.bits": "8"},
    "8-bit-embedding": {"optim.bits": "8", "optim.embedding_bits": "8"},
    "8-bit=dynamic:64": {"optim.bits": "8", "optim.codebook": '"dynamic"', "optim.block": "64"},
    "8-bit=dynamic-flush:tensor": {
        "optim.bits": "8",
        "optim.codebook": '"dynamic-flush"',
        "optim.block": str(2**30),
    },
    "clip=0.5": {"optim.clip_norm": "0.5"},
    "no-clip": {"optim.clip_norm": "null"},
    "warmup=0.25": {"schedule.lr.warmup": "125"},
    "bfloat16": {"autocast": '"bfloat16"'},
}


@pytest.mark.parametrize("switch", CHANGES)
def test_a_switch_changes_what_it_says_and_nothing_else(switch):
    after = apply(LAB, switch, base_width=16)
    assert {name: new for name, _, new in differences(LAB, after)} == CHANGES[switch]


def test_every_switch_is_in_the_table_and_tested():
    scheduled = {"seqlen-warmup", "length", "decay-by-steps", "batch-warmup", "steps", "batch"}
    assert {switch.partition("=")[0] for switch in CHANGES} | scheduled == set(SWITCHES)
    assert [name for name, _ in list_switches()] == list(SWITCHES)
    assert all(text for _, text in list_switches())


def test_decay_of_both_kinds_is_the_same_at_the_learning_rate_of_the_recipe():
    back = apply(apply(LAB, "coupled-decay"), "independent-decay")
    assert back.optim.independent_decay
    assert back.optim.weight_decay == pytest.approx(LAB.optim.weight_decay)
    assert apply(LAB, "coupled-decay").optim.weight_decay * LAB.optim.lr == pytest.approx(LAB.optim.weight_decay)


def test_sequence_length_warmup_sees_as_many_tokens():
    before, after = LAB, apply(LAB, "seqlen-warmup=0.3")
    assert (after.schedule.seqlen.start, after.schedule.seqlen.steps) == (8, 150)
    assert after.schedule.lr.decay_unit == "tokens"
    assert after.steps > before.steps
    assert 0 <= simulate(after).tokens - simulate(before).tokens <= before.batch * before.model.context


@pytest.mark.parametrize("kind", ["linear", "root", "discrete", "two-stage", "mixed"])
def test_every_pacing_begins_short_and_ends_at_full_length(kind):
    after = apply(LAB, f"seqlen-warmup=0.3:{kind}")
    lengths = after.seqlen_warmup
    assert lengths.kind == kind
    assert lengths.at(1) in ((8,) if kind != "mixed" else lengths.buckets())
    assert lengths.at(after.steps) == LAB.model.context
    assert 0 <= simulate(after).tokens - simulate(LAB).tokens <= LAB.batch * LAB.model.context
    assert {"discrete": (8, 16, 32, 64)}.get(kind, ()) == lengths.lengths


def test_a_constant_shorter_length_sees_as_many_tokens_and_is_evaluated_as_often():
    after = apply(LAB, "length=16")
    assert (after.steps, after.eval_every) == (4 * LAB.steps, 4 * LAB.eval_every)
    assert {length for _, length in after.seqlen_warmup.table(after.steps)} == {16}
    assert simulate(after).tokens == simulate(LAB).tokens
    assert after.schedule.lr.decay_unit == "tokens"


def test_decay_by_steps_ends_where_it_would_at_full_length():
    after = apply(apply(LAB, "seqlen-warmup"), "decay-by-steps")
    assert (after.schedule.lr.decay, after.schedule.lr.decay_unit) == (LAB.steps, "steps")
    assert after.steps > LAB.steps


def test_batch_warmup_sees_as_many_samples():
    before, after = LAB, apply(LAB, "batch-warmup=0.3")
    assert (after.batch_warmup.start, after.batch_warmup.end) == (2, 16)
    assert after.steps > before.steps
    assert 0 <= simulate(after).tokens - simulate(before).tokens <= before.batch * before.model.context


def test_a_larger_batch_sees_the_same_data():
    after = apply(LAB, "batch=64")
    assert (after.batch, after.steps, after.eval_batches) == (64, 125, 8)
    assert after.batch * after.steps == LAB.batch * LAB.steps
    assert after.schedule.lr.warmup / after.steps == pytest.approx(LAB.schedule.lr.warmup / LAB.steps, rel=0.1)


def test_another_number_of_steps_scales_every_clock():
    after = apply(LAB, "steps=1000")
    assert (after.steps, after.schedule.lr.warmup, after.optim.weight_decay) == (1000, 50, 0.01)


def test_codebook_and_block_reach_the_optimizer():
    config = apply(LAB, "8-bit=dynamic:64")
    model = GPT(config.model)
    optimizer = build_optimizer(model, config.optim)
    assert {(g["bits"], g["codebook"], g["block"]) for g in optimizer.param_groups} == {(8, "dynamic", 64)}
    model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).loss.backward()
    optimizer.step()
    weight = model.transformer.blocks[0].mlp.up.weight
    sizes = {x.numel() for x in optimizer.state[weight].values() if isinstance(x, torch.Tensor)}
    assert {weight.numel(), weight.numel() // 64} <= sizes  # codes, and a scale for each block


def test_embeddings_have_8_bit_state_only_if_it_is_wanted():
    for switches, bits in (("8-bit",), 32), (("8-bit=dynamic:tensor", "8-bit-embedding", "stable-embedding"), 8):
        config = LAB
        for switch in switches:
            config = apply(config, switch)
        model = GPT(config.model)
        optimizer = build_optimizer(model, config.optim)
        group = next(g for g in optimizer.param_groups if any(p is model.embedding.weight for p in g["params"]))
        assert optimizer.storage_of(model.embedding.weight, group).bits == bits


@pytest.mark.parametrize(
    ("switch", "words"),
    [
        ("qknorm", "Did you mean 'qk-norm'"),
        ("", "there is no switch"),
        ("qk-norm=both", "try one of shared"),
        ("qk-norm=", "no value after the equals sign"),
        ("z-loss=-1", "not a number above 0"),
        ("z-loss=much", "not a number"),
        ("z-loss=nan", "not a number"),
        ("kappa", "not a number above 0"),
        ("eps=0", "not a number above 0"),
        ("beta2=1", "below 1"),
        ("warmup=1", "below 1"),
        ("warmup=-0.1", "not a number"),
        ("weight-decay", "not a number"),
        ("weight-decay=x", "not a number"),
        ("8-bit=huffman", "no codebook 'huffman'"),
        ("8-bit=dynamic:0", "not a whole number"),
        ("switchback=yes", "takes no value"),
        ("linear=int4", "try one of float"),
        ("mup", "needs a base width"),
        ("mup=most", "simple, intermediate or full"),
        ("mup=full:no", "'no' is not a width"),
        ("steps=0", "not a whole number from 1"),
        ("clip=0", "not a number above 0"),
    ],
)
def test_a_bad_switch_is_refused_in_words(switch, words):
    with pytest.raises(ConfigError, match=words):
        apply(LAB, switch)


@pytest.mark.parametrize(
    "switch", ["qk-norm", "z-loss", "mup=simple:16", "switchback", "linear=switchback", "kappa=10"]
)
def test_what_changes_our_models_does_not_fit_somebodys_own(switch):
    with pytest.raises(ConfigError, match=r"own_model:build is yours"):
        apply(OWN, switch)


@pytest.mark.parametrize("switch", ["z-loss", "stable-embedding", "mup=simple:16"])
def test_what_only_a_gpt_has_does_not_fit_a_clip(switch):
    with pytest.raises(ConfigError, match="does not apply to a clip"):
        apply(RECIPES["clip-tiny"](), switch)


def test_schedules_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="grows from 8 tokens"):
        apply(OWN, "seqlen-warmup")
    with pytest.raises(ConfigError, match="as large as it makes them"):
        apply(OWN, "batch-warmup")
    with pytest.raises(ConfigError, match="does not allow"):
        apply(with_values(LAB, {"batch": 12}), "batch-warmup")
    with pytest.raises(ConfigError, match="both warm up"):
        apply(apply(LAB, "seqlen-warmup"), "batch-warmup")
    with pytest.raises(ConfigError, match=r"caption.* cannot be cut"):
        apply(RECIPES["clip-tiny"](), "seqlen-warmup")


def test_torch_adamw_has_no_8_bit_state():
    plain = with_values(LAB, {"optim.name": "torch-adamw", "optim.independent_decay": False})
    with pytest.raises(ConfigError, match="32-bit state"):
        apply(plain, "8-bit")
    with pytest.raises(ConfigError, match="8-bit state"):
        with_values(plain, {"optim.block": 64})


def test_steadied_is_what_a_subject_lacks():
    assert steadied(LAB) == ("qk-norm", "z-loss")
    assert steadied(apply(LAB, "qk-norm=whole")) == ("z-loss",)
    assert steadied(OWN) == ("stable-adamw", "warmup=0.25")
