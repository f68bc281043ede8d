"""Who keeps 32-bit state, who decays, whose rate is scaled; and a report whose bytes are the bytes in memory."""

import math
import pickle
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.optim.cases import OPTIMIZERS, QUANTIZED, make, params_of, set_grads, small_model, train
from trimtab import optim


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(101, 45)
        self.first = nn.Linear(45, 97)
        self.norm = nn.LayerNorm(97)
        self.last = nn.Linear(97, 101, bias=False)


def bits_of(optimizer: optim.Optimizer) -> dict[str, int]:
    """As `describe` reports it, and checked in the state itself."""
    train(optimizer, [0])
    table = {entry.name: entry.bits for entry in optimizer.describe().entries}
    for p, bits in zip(params_of(optimizer), table.values(), strict=True):
        assert (bits == 8) == (torch.uint8 in {x.dtype for x in optimizer.state[p].values()})
    return table


def kept(optimizer: optim.Optimizer) -> set[str]:
    """The big tensors with 32-bit state."""
    big = {"embed_tokens.weight", "first.weight", "last.weight"}
    return {name for name, bits in bits_of(optimizer).items() if bits == 32 and name in big}


# --- keep32


def test_embeddings_keep_32_bits_when_names_are_known():
    model = Model()
    assert kept(optim.AdamW(model.named_parameters(), bits=8)) == {"embed_tokens.weight"}
    assert kept(optim.AdamW(model.named_parameters(), bits=8, keep32=())) == set()
    assert 32 not in [e.bits for e in optim.AdamW([model.embed_tokens.weight], bits=8).describe().entries]


def test_parameters_without_names_are_told_once():
    model = Model()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    with pytest.warns(UserWarning, match=r"no names, .*named_parameters\(\), or call AdamW\.for_model") as told:
        optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], bits=8)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.AdamW(model.parameters(), bits=32)
        optim.AdamW(model.parameters(), bits=8, keep32=())
        optim.AdamW(model.parameters(), bits=8, keep32=model.embed_tokens)
        optim.AdamW(rest, bits=8)  # vectors are no embeddings
        optim.AdamW([{"params": [("first.weight", model.first.weight)]}], bits=8)
        optim.AdamW.for_model(model, bits=8)


# --- for_model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_for_model_makes_groups_with_names(name):
    model = Model()
    model.first.bias.requires_grad_(False)
    kind, _ = OPTIMIZERS[name]
    bits = 8 if name in QUANTIZED else 32
    optimizer = kind.for_model(model, lr=0.1, weight_decay=0.3, bits=bits, mup_ratio=0.5, no_decay="last.*")
    found = {
        name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in group["param_names"]
    }
    assert found == {
        "embed_tokens.weight": (0.1, 0.3),
        "first.weight": (0.05, 0.6),  # times lr as the others
        "last.weight": (0.05, 0.0),
        "norm.weight": (0.1, 0.0),
        "norm.bias": (0.1, 0.0),
    }
    if bits == 8 and name != "SGD":  # which has no state
        assert kept(optimizer) == {"embed_tokens.weight"}


def test_for_model_has_the_defaults_of_its_class():
    for kind in (optim.AdamW, optim.Lion, optim.LARS):
        plain, made = kind(Model().parameters()), kind.for_model(Model())
        assert {group["lr"] for group in made.param_groups} == {plain.defaults["lr"]}
        assert made.param_groups[0]["weight_decay"] == plain.defaults["weight_decay"]
    assert kept(optim.AdamW.for_model(Model(), bits=8, keep32="first.*")) == {"first.weight"}
    assert kept(optim.AdamW.for_model(Model(), bits=8, keep32=())) == set()


def test_for_model_without_a_model_is_the_factory_that_a_trainer_calls():
    optimizer = optim.StableAdamW.for_model()(Model(), lr=0.1, bits=8)
    assert type(optimizer) is optim.StableAdamW
    assert kept(optimizer) == {"embed_tokens.weight"}
    with pytest.raises(TypeError, match=r"StableAdamW\.for_model needs a model besides lr"):
        optim.StableAdamW.for_model(lr=0.1)
    with pytest.raises(TypeError, match="unknown options"):
        optim.AdamW.for_model(Model(), momentum=0.9)


# --- Hosts replace the tensors


@pytest.mark.parametrize("frozen", [False, True])
def test_exemptions_stay_with_the_place_when_the_tensors_are_replaced(frozen):
    """DeepSpeed puts float32 copies in place of bfloat16 parameters, and leaves out frozen ones."""
    model = Model().bfloat16()
    model.first.bias.requires_grad_(not frozen)
    optimizer = optim.AdamW(model.named_parameters(), bits=8, keep32=["*embed*", model.last])
    [group] = optimizer.param_groups
    group["params"] = [p.detach().float() for p in group["params"] if p.requires_grad]
    assert kept(optimizer) == {"embed_tokens.weight", "last.weight"}
    assert optimizer.names == [name for name, p in model.named_parameters() if p.requires_grad]
    assert kept(pickle.loads(pickle.dumps(optimizer))) == {"embed_tokens.weight", "last.weight"}


def test_empty_groups_may_be_removed():
    model = Model()
    groups = [{"params": []}, {"params": list(model.parameters())}]
    optimizer = optim.AdamW(groups, bits=8, keep32=model.embed_tokens)
    optimizer.param_groups[:] = optimizer.param_groups[1:]
    optimizer.param_groups[0]["params"] = [p.detach().clone() for p in model.parameters()]
    assert [entry.bits for entry in optimizer.describe().entries] == [32, 8, 32, 32, 32, 8]


def test_flat_partitions_are_refused_at_the_step():
    model = Model()
    optimizer = optim.AdamW(model.named_parameters())
    [group] = optimizer.param_groups
    group["params"] = [torch.cat([p.detach().flatten() for p in model.parameters()])]
    with pytest.raises(
        ValueError, match=r"6 parameters of a group .embed_tokens.weight, .*ZeRO stages 1 to 3.* stage 0"
    ):
        train(optimizer, [0])
    one = optim.AdamW([model.last.weight], bits=8, keep32=())
    one.param_groups[0]["params"] = [model.last.weight.detach().flatten()]
    with pytest.raises(ValueError, match="pieces of several concatenated parameters"):
        train(one, [0])
    two = optim.AdamW([{"params": [p]} for p in model.parameters()])
    two.param_groups = [{**two.param_groups[0], "params": [torch.ones(10)]}]  # as ZeRO does at its step
    with pytest.raises(ValueError, match="made with 6 parameter groups, and now has 1"):
        train(two, [0])


def test_state_is_not_lost_when_the_tensors_are_replaced():
    model = Model()
    optimizer = optim.AdamW(model.named_parameters(), bits=8)
    train(optimizer, [0])
    [group] = optimizer.param_groups
    old = group["params"]
    group["params"] = [p.detach().clone() for p in old]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"embed_tokens.weight has been replaced .* state would be lost; load"):
            train(optimizer, [1])
    for p in old:  # whoever replaces a parameter may give it its state, or none
        optimizer.state.pop(p)
    train(optimizer, [1])


def test_replaced_tensors_do_not_keep_the_old_ones_in_memory():
    p = nn.Parameter(torch.ones(64, 80))
    optimizer = optim.AdamW([("embed", p)], bits=8)
    freed = weakref.ref(p)
    optimizer.param_groups[0]["params"] = [p.detach().clone()]
    del p
    assert freed() is None
    assert optimizer.describe().entries[0].bits == 32


@pytest.mark.parametrize("how", ["pattern", "patterns", "module", "modules", "parameter", "predicate"])
def test_exemptions_by_pattern_module_parameter_and_predicate(how):
    model = Model()
    keep = {
        "pattern": "last.*",
        "patterns": ["la*", "*.nothing", "last.weight"],
        "module": model.last,
        "modules": nn.ModuleList([model.last]),
        "parameter": model.last.weight,
        "predicate": lambda name, p: name.startswith("last") and p.shape == (101, 97),
    }[how]
    if how == "patterns":
        with pytest.warns(UserWarning, match=r"exempts nothing: no parameter where name matches '\*\.nothing'"):
            optimizer = optim.AdamW(model.named_parameters(), bits=8, keep32=keep)
    else:
        optimizer = optim.AdamW(model.named_parameters(), bits=8, keep32=keep)
    assert kept(optimizer) == {"last.weight"}
    why = next(entry.why for entry in optimizer.describe().entries if entry.name == "last.weight")
    assert (
        why
        == {
            "pattern": "name matches 'last.*'",
            "patterns": "name matches 'la*'",
            "module": "in a module of class Linear",
            "modules": "in a module of class ModuleList",
            "parameter": "listed in keep32",
            "predicate": "chosen by <lambda>",
        }[how]
    )


def test_modules_and_parameters_need_no_names():
    model = Model()
    optimizer = optim.AdamW(model.parameters(), bits=8, keep32=[model.embed_tokens, model.last.weight])
    assert [e.bits for e in optimizer.describe().entries] == [32, 8, 32, 32, 32, 32]


def test_the_order_of_calls_does_not_matter():
    """A peer's override silently did nothing when it came after the parameters."""
    model = Model()
    named = list(model.named_parameters())
    backwards = optim.AdamW(named[::-1], bits=8, keep32=["last.*", "first.weight"])
    with pytest.warns(UserWarning, match="exempts nothing"):  # not yet
        late = optim.AdamW(named[:1], bits=8, keep32=lambda name, p: name in ("last.weight", "first.weight"))
    late.add_param_group({"params": named[1:]})
    both = optim.AdamW([{"params": named, "keep32": "last.*"}], bits=8, keep32="first.weight")
    assert kept(both) == kept(backwards)
    grouped = optim.AdamW([{"params": named[:1], "keep32": ()}, {"params": named[1:], "keep32": "[fl]*"}], bits=8)
    for optimizer in (backwards, late, grouped):
        assert kept(optimizer) == {"last.weight", "first.weight"}


def test_exemptions_that_cannot_be_meant_are_refused_or_told():
    model = Model()
    with pytest.warns(UserWarning, match="exempts nothing: no parameter where name matches 'head"):
        optim.AdamW(model.named_parameters(), bits=8, keep32="head.*")
    with pytest.raises(ValueError, match=r"no names; pass model\.named_parameters"):
        optim.AdamW(model.parameters(), bits=8, keep32="last.*")
    with pytest.raises(ValueError, match=r"no names; pass model\.named_parameters"):
        optim.AdamW([{"params": list(model.parameters()), "keep32": "*embed*"}], bits=8)
    with pytest.raises(TypeError, match=r"class Embedding, .* trimtab\.optim\.groups\(model, keep32=Embedding\)"):
        optim.AdamW(model.named_parameters(), bits=8, keep32=nn.Embedding)
    with pytest.raises(TypeError, match="got int"):
        optim.AdamW(model.named_parameters(), bits=8, keep32=3)


def test_an_exempt_tensor_takes_the_32_bit_step():
    kept_, full = small_model(), small_model()
    mine = make("AdamW", kept_.named_parameters(), 8, keep32="0.weight")
    theirs = make("AdamW", full.named_parameters(), 32)
    train(mine, range(3))
    train(theirs, range(3))
    assert torch.equal(kept_[0].weight, full[0].weight)
    assert not torch.equal(kept_[2].weight, full[2].weight)


@pytest.mark.parametrize(("size", "bits"), [(4096, 8), (4095, 32)])
def test_tensors_below_min_8bit_size_keep_32_bits(size, bits):
    assert [e.bits for e in optim.AdamW([torch.ones(size)], bits=8).describe().entries] == [bits]
    assert [e.bits for e in optim.AdamW([torch.ones(size)], bits=8, min_8bit_size=1).describe().entries] == [8]


# --- groups


def by_name(groups: list[dict]) -> dict[str, dict]:
    return {name: group for group in groups for name, _ in group["params"]}


def test_vectors_never_decay_and_patterns_exempt_more():
    found = by_name(optim.groups(Model(), lr=0.1, weight_decay=0.3, no_decay="last.*"))
    assert {name: group["weight_decay"] for name, group in found.items()} == {
        "embed_tokens.weight": 0.3,
        "first.weight": 0.3,
        "first.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "last.weight": 0.0,
    }


@pytest.mark.parametrize("independent", [False, True])
def test_mup_scales_the_rate_of_linear_weights_and_leaves_their_decay(independent):
    model = Model()
    groups = optim.groups(model, lr=0.1, weight_decay=0.3, mup_ratio=0.25, independent_decay=independent)
    found = by_name(groups)
    assert {name for name, group in found.items() if group["lr"] == 0.025} == {"first.weight", "last.weight"}
    assert all(group["lr"] in (0.1, 0.025) for group in groups)
    # What is really taken off a weight at a step without gradient is the same for every decaying tensor.
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optim.AdamW(groups, lr=1.0)
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    shrink = 1 - (0.3 if independent else 0.3 * 0.1)
    for name, p in model.named_parameters():
        factor = shrink if p.dim() >= 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor, rtol=1e-6, atol=0)


def test_groups_know_who_keeps_32_bits_by_class_too():
    model = Model()
    assert kept(optim.AdamW(optim.groups(model, lr=0.1), bits=8)) == {"embed_tokens.weight"}
    keep = [nn.Embedding, "last.*", model.first]
    everyone = {"embed_tokens.weight", "last.weight", "first.weight"}
    assert kept(optim.AdamW(optim.groups(model, lr=0.1, keep32=keep), bits=8)) == everyone
    assert kept(optim.AdamW(optim.groups(model, lr=0.1, keep32=()), bits=8)) == set()
    with pytest.raises(ValueError, match="mup_ratio is base width / width"):
        optim.groups(model, lr=0.1, mup_ratio=0)


@pytest.mark.parametrize(
    "name",
    ["tok_emb.weight", "h.word_emb.weight", "pos_emb.weight", "shared.weight", "encoder.shared.weight", "wte.weight"],
)
def test_embeddings_are_known_by_more_names(name):
    named = [(name, nn.Parameter(torch.ones(64, 80))), ("shared_expert.weight", nn.Parameter(torch.ones(64, 80)))]
    embedding, other = optim.AdamW(named, bits=8).describe().entries
    assert (embedding.bits, other.bits) == (32, 8)
    assert embedding.why.startswith("name matches")


def test_groups_look_at_the_class_first_and_at_names_after_it():
    model = nn.ModuleDict(
        {"lookup": nn.Embedding(64, 80), "bag": nn.EmbeddingBag(64, 80), "tok_emb": nn.Linear(80, 64, bias=False)}
    )
    model["dense"] = nn.Linear(80, 64, bias=False)
    declined = model["declined_embed"] = nn.Embedding(64, 80)
    declined.keep32 = False
    entries = optim.AdamW(optim.groups(model, lr=0.1), bits=8).describe().entries
    assert {entry.name: entry.why for entry in entries} == {
        "lookup.weight": "in a module of class Embedding",
        "bag.weight": "in a module of class EmbeddingBag",
        "tok_emb.weight": "name matches '*tok_emb*'",
        "dense.weight": "bits=8",
        "declined_embed.weight": "bits=8",
    }


# --- describe

MOMENTS = {"SGD": 1, "LARS": 1, "Adagrad": 1, "RMSprop": 1, "Lion": 1, "Adafactor": 1, "AdEMAMix": 3}


def nbytes(tensors: dict[str, Tensor]) -> int:
    factors = ("step", "exp_avg_sq_row", "exp_avg_sq_col")
    labels = [key.removesuffix("_codes") for key in tensors if key.endswith("_codes")]  # three numbers each
    return sum(x.numel() * x.element_size() for key, x in tensors.items() if key not in (*factors, *labels))


@pytest.mark.parametrize("block", [256, 2048])
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_report_is_the_formula_and_the_formula_is_the_memory(name, block):
    """k moments of n values, E of them in 32 bits: k (n - E) + 4 k ⌈(n - E) / B⌉ + 4 k E bytes."""
    model, k = Model(), MOMENTS.get(name, 2)
    optimizer = make(name, model.named_parameters(), 8, block=block)
    promised = optimizer.describe()
    train(optimizer, [0])
    table = optimizer.describe()
    assert str(promised) == str(table)
    for entry, p in zip(table.entries, params_of(optimizer), strict=True):
        n = p.numel()
        assert entry.bytes_now == nbytes(optimizer.state[p])
        assert entry.bytes_now == (k * n + 4 * k * math.ceil(n / block) if entry.bits == 8 else 4 * k * n)
        assert entry.bytes_at_32 == 4 * k * n
    full = make(name, Model().named_parameters(), 32)
    train(full, [0])
    assert table.bytes_at_32 == sum(nbytes(full.state[p]) for p in params_of(full)) == full.describe().bytes_now
    assert table.bytes_now == sum(entry.bytes_now for entry in table.entries)
    assert f"{name}: 2 of 6 tensors in 8 bits" in table.summary()


def test_state_per_parameter_is_what_was_promised():
    p = nn.Parameter(torch.ones(1000, 1024))
    assert optim.AdamW([p], bits=8).describe().bytes_now / p.numel() <= 2.04
    assert optim.Lion([p], bits=8).describe().bytes_now / p.numel() <= 1.03
    assert optim.SGD([p], bits=8).describe().bytes_now == 0  # no momentum, no state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_printed_report_names_tensors_bits_reasons_and_bytes(name):
    bits = 8 if name in QUANTIZED else 32
    text = str(make(name, Model().named_parameters(), bits).describe())
    assert "embed_tokens.weight  101×45" in text
    assert text.splitlines()[-1].startswith(f"{name}: ")
    if bits == 8:
        assert "name matches '*embed*'" in text
        assert "smaller than min_8bit_size=4096" in text


def test_unnamed_parameters_are_described_by_their_place():
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = optim.StableAdamW(groups, skip_nonfinite=True)
    assert optimizer.names == ["group 0, parameter 0", "group 1, parameter 0"]
    set_grads(model.parameters(), 0)
    optimizer.step()
    assert optimizer.rms.shape == optimizer.skipped.shape == (2,)
