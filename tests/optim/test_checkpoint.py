"""State dicts: packed and portable, to and from PyTorch's optimizers, and loads that must fail without a trace."""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import assert_same
from tests.optim.cases import (
    QUANTIZED,
    assert_same_snapshots,
    assert_stored_as_told,
    every_optimizer,
    make,
    params_of,
    set_grads,
    small_model,
    snapshot,
    train,
)
from trimtab import optim


def trained(name: str, bits: int = 8, steps: int = 3, **options: Any) -> optim.Optimizer:
    optimizer = make(name, small_model().named_parameters(), bits, **options)
    train(optimizer, range(steps))
    return optimizer


def assert_moments(got: dict[int, dict[str, Tensor]], expected: dict[int, dict[str, Tensor]]) -> None:
    assert got.keys() == expected.keys()
    for place, entry in expected.items():
        assert got[place].keys() == entry.keys()
        for key, x in entry.items():
            assert_same(got[place][key], x)


# --- Our own two formats


def portable_copy(first: optim.Optimizer, name: str, **options: Any) -> optim.Optimizer:
    """One with the same parameters, that loaded its portable state."""
    copied = make(name, small_model().named_parameters(), 8, **options)
    for p, q in zip(params_of(copied), params_of(first), strict=True):
        p.data.copy_(q)
    copied.load_state_dict(copy.deepcopy(first.state_dict(format="portable")))
    assert_stored_as_told(copied, 8)
    return copied


@pytest.mark.parametrize("codebook", ["dynamic-symmetric", "linear"])
@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "StableAdamW"])
def test_a_portable_round_trip_gives_the_same_codes(name, codebook):
    """With tables that hold 1 and -1, the largest value of a block decodes to the scale itself."""
    first = trained(name, codebook=codebook)
    for entry, p in zip(first.state_dict(format="portable")["state"].values(), params_of(first), strict=True):
        moments = {key: x for key, x in entry.items() if key != "step"}
        assert all(x.dtype == torch.float32 and x.shape == p.shape for x in moments.values())
    assert_same_snapshots(snapshot(portable_copy(first, name, codebook=codebook)), snapshot(first))


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_portable_round_trip_in_the_default_code_is_off_by_a_rounding_at_most(name):
    """A scale may come back off by its last bit; a value on the border of two codes may then change its code."""
    first = trained(name)
    second = portable_copy(first, name)
    for _ in range(2):  # and it does not creep
        second = portable_copy(second, name)
    pairs = zip(first.state_dict(format="portable")["state"].values(),
                second.state_dict(format="portable")["state"].values(), strict=True)  # fmt: skip
    for mine, theirs in pairs:
        for key, x in mine.items():
            wrong = (x - theirs[key]).abs() > 1e-6 * x.abs()
            assert wrong.sum() <= 3
            assert ((x - theirs[key]).abs() <= 0.05 * x.abs()).all()


@every_optimizer
def test_codes_load_into_32_bits_without_loss_and_back(name, bits):
    first = trained(name, bits, codebook="dynamic-symmetric")
    wide = make(name, small_model().named_parameters(), 32)
    wide.load_state_dict(first.state_dict())
    assert_stored_as_told(wide, 32)
    assert_moments(wide.state_dict(format="portable")["state"], first.state_dict(format="portable")["state"])
    assert wide.param_groups[0]["bits"] == 32
    back = make(name, small_model().named_parameters(), bits, codebook="dynamic-symmetric")
    back.load_state_dict(wide.state_dict())
    assert_stored_as_told(back, bits)
    for mine, theirs in zip(snapshot(back), snapshot(first), strict=True):
        assert_same_snapshots([mine | {"param": theirs["param"]}], [theirs])


@pytest.mark.parametrize("other", [{"block": 64}, {"codebook": "linear"}])
@pytest.mark.parametrize("name", QUANTIZED)
def test_other_blocks_or_codebooks_are_refused_and_converted_on_request(name, other):
    first = trained(name)
    second = trained(name, steps=2, **other)
    before = snapshot(second)
    with pytest.raises(ValueError, match=r"stored with block=256.*convert=True"):
        second.load_state_dict(copy.deepcopy(first.state_dict()))  # it shares the tensors otherwise
    assert_same_snapshots(snapshot(second), before)
    second.load_state_dict(first.state_dict(), convert=True)
    assert_stored_as_told(second, 8)
    assert all(second.param_groups[0][key] == value for key, value in other.items())
    train(second, [3])
    assert second.state[params_of(second)[0]]["step"] == 4


def test_the_state_cannot_change_its_block_by_itself():
    optimizer = trained("AdamW")
    optimizer.param_groups[0]["block"] = 64
    with pytest.raises(ValueError, match="made with bits=8, block=256"):
        train(optimizer, [3])


@every_optimizer
def test_what_options_remember_is_saved_too(name, bits):
    options = {"percentile_clipping": 20, "skip_nonfinite": True}
    first = make(name, small_model().parameters(), bits, **options)
    set_grads(params_of(first), 0)
    params_of(first)[0].grad[0, 0] = torch.nan  # its very first step is skipped
    first.step()
    train(first, range(1, 3))
    for form in ("packed", "portable"):
        second = make(name, small_model().parameters(), bits, **options)
        second.load_state_dict(first.state_dict(format=form))
        assert second.skipped.tolist() == [1, 0, 0, 0, 0, 0]
        for p, q in zip(params_of(first), params_of(second), strict=True):
            assert_same(second.state[q]["grad_norms"], first.state[p]["grad_norms"])


@pytest.mark.parametrize("form", ["packed", "portable"])
@every_optimizer
def test_state_that_was_skipped_from_the_start_survives_a_checkpoint(name, bits, form):
    first, second = (make(name, small_model().parameters(), bits, skip_nonfinite=True) for _ in range(2))
    for p in params_of(first):
        p.grad = torch.full_like(p, torch.nan)
    first.step()
    second.load_state_dict(first.state_dict(format=form))
    train(second, [1])
    fresh = make(name, small_model().parameters(), bits)
    train(fresh, [1])
    for mine, theirs in zip(snapshot(second), snapshot(fresh), strict=True):
        assert mine.pop("skipped") == 1
        assert_same_snapshots([mine], [theirs])


@pytest.mark.parametrize("format", ["packed", "portable"])
@pytest.mark.parametrize("bits", [8, 32])
def test_stable_adamw_keeps_the_same_state_as_adamw(bits, format):
    """Which is PyTorch's too: bias-corrected moments would be corrected a second time by whoever loads them."""
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0, "bits": bits}
    stable = optim.StableAdamW(small_model().named_parameters(), clip_threshold=1e9, **options)
    plain = optim.AdamW(small_model().named_parameters(), **options)
    for optimizer in (stable, plain):
        train(optimizer, range(5))
    assert_same_snapshots(snapshot(stable), snapshot(plain))
    plain.load_state_dict(stable.state_dict(format=format))
    # Windows of √v may end elsewhere, with other codes for the same values.
    values, others = (optimizer.state_dict(format="portable")["state"] for optimizer in (stable, plain))
    assert_same_snapshots(list(values.values()), list(others.values()))


# --- What PyTorch's optimizers do too


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch.compile imports what it calls deprecated
@pytest.mark.parametrize("wrap", [torch.compile, lambda m: nn.ModuleDict({"module": m})], ids=["compile", "ddp"])
@pytest.mark.parametrize("bits", [8, 32])
def test_the_state_of_a_wrapped_model_loads_into_the_bare_one_and_back(wrap, bits):
    bare, wrapped = small_model(), wrap(small_model())
    names = [name for name, _ in wrapped.named_parameters()]
    assert names[0].startswith(("_orig_mod.", "module."))
    first, second = (make("AdamW", model.named_parameters(), bits) for model in (bare, wrapped))
    train(first, range(3))
    train(second, range(5))
    first.load_state_dict(second.state_dict())
    assert first.param_groups[0]["param_names"] == [name for name, _ in bare.named_parameters()]
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["param_names"] == names
    assert first.state[params_of(first)[0]]["step"] == second.state[params_of(second)[0]]["step"] == 5


def test_other_names_are_still_refused():
    first = make("AdamW", small_model().named_parameters())
    saved = copy.deepcopy(first.state_dict())
    saved["param_groups"][0]["param_names"][1] = "module.0.gain"
    with pytest.raises(ValueError, match=r"expects '0.bias' where the state dict has 'module.0.gain'"):
        first.load_state_dict(saved)


@pytest.mark.parametrize("format", ["packed", "portable"])
def test_keys_that_are_no_parameters_survive(format):
    first, second = trained("AdamW"), trained("AdamW")
    first.state["global"] = {"seen": torch.tensor(7)}
    saved = first.state_dict(format=format)
    assert saved["state"]["global"] == {"seen": torch.tensor(7)}
    second.load_state_dict(saved)
    assert second.state["global"] == {"seen": torch.tensor(7)}
    train(second, range(1))


def test_parameters_that_are_listed_twice_have_pytorchs_places():
    a, b, c = (nn.Parameter(torch.ones(5)) for _ in range(3))
    places = []
    for kind in (torch.optim.AdamW, optim.AdamW):
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = kind([a, b, a])
        optimizer.add_param_group({"params": [c]})
        optimizer.param_groups[1]["params"].append(b)  # add_param_group would refuse it
        places.append([group["params"] for group in optimizer.state_dict()["param_groups"]])
    assert places[0] == places[1]
    a.grad = b.grad = c.grad = torch.ones(5)
    optimizer.step()
    assert_same(a.detach(), b.detach())  # each is updated once
    assert_same(b.detach(), c.detach())
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("bits", [8, 32])
def test_state_put_there_by_hand_is_used(bits):
    """As ZeroRedundancyOptimizer does. Kept in the way of the optimizer, whichever way it came."""
    source = trained("AdamW", bits, steps=4)
    for given in (source.state, dict(enumerate(source.state_dict(format="portable")["state"].values()))):
        target = make("AdamW", small_model().named_parameters(), bits)
        for i, (p, q) in enumerate(zip(params_of(target), params_of(source), strict=True)):
            p.data.copy_(q)
            target.state[p] = dict(given[q if given is source.state else i])
        for optimizer in (target, copy.deepcopy(source)):
            train(optimizer, range(4, 6))
        assert_same_snapshots(snapshot(target), snapshot(optimizer))
        # All of it replaced in mid-run, in the other format.
        portable = copy.deepcopy(target.state_dict(format="portable")["state"])
        expected = copy.deepcopy(target)
        target.state = defaultdict(dict, {p: portable[i] for i, p in enumerate(params_of(target))})
        for optimizer in (target, expected):
            train(optimizer, range(6, 8))
        assert_same_snapshots(snapshot(target), snapshot(expected))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_zero_redundancy_optimizer_saves_and_loads(tmp_path):
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, again = small_model(), small_model()
        make = lambda m: ZeroRedundancyOptimizer(m.parameters(), optim.AdamW, lr=1e-2, bits=8)  # noqa: E731
        first, second = make(model), make(again)
        train(first, range(3))
        first.consolidate_state_dict()
        second.load_state_dict(copy.deepcopy(first.state_dict()))  # it shares the tensors otherwise
        again.load_state_dict(model.state_dict())
        for optimizer in (first, second):
            train(optimizer, range(3, 5))
        assert_same_snapshots(snapshot(first.optim), snapshot(second.optim))
        assert_stored_as_told(second.optim, 8)
    finally:
        dist.destroy_process_group()


# --- Failures


def _lose_a_moment(saved: dict[str, Any]) -> None:
    saved["state"][0] = {"step": saved["state"][0]["step"]}


def _cut(saved: dict[str, Any]) -> None:
    saved["state"][3] = {key: x[:1] if x.dim() else x for key, x in saved["state"][3].items()}


def _cast(saved: dict[str, Any]) -> None:
    saved["state"][0] = {key: x.to(torch.bfloat16) if x.dim() else x for key, x in saved["state"][0].items()}


BROKEN = {
    "a parameter less": (lambda s: s["param_groups"][0]["params"].pop(), "has 5 parameters, that of this optimizer 6"),
    "a group more": (lambda s: s["param_groups"].append({"params": []}), "2 parameter groups, this optimizer has 1"),
    "state of no parameter": (lambda s: s["state"].update({17: s["state"][0]}), r"in no group: \[17\]"),
    "another name": (lambda s: s["param_groups"][0]["param_names"].reverse(), "expects '0.weight' where"),
    "a moment less": (_lose_a_moment, "the state of 0.weight has no exp_avg"),
    "another shape": (_cut, "of 1.bias has shape"),
    "cast": (_cast, "the state was cast or cut"),
}


@pytest.mark.parametrize(
    ("how", "form"),
    # Portable moments may have any float dtype, so nothing can be wrong with that of theirs.
    [(how, form) for how in BROKEN for form in ("packed", "portable") if (how, form) != ("cast", "portable")],
)
def test_a_load_that_fails_leaves_everything_as_it_was(how, form):
    change, message = BROKEN[how]
    saved = copy.deepcopy(trained("AdamW").state_dict(format=form))
    saved["param_groups"][0]["lr"] = 123.0
    change(saved)
    optimizer = trained("AdamW", steps=2)
    before, groups = snapshot(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same_snapshots(snapshot(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups
    train(optimizer, [2])


def test_loading_copies_and_does_not_share_memory():
    first = trained("AdamW", 32)
    second = make("AdamW", small_model().named_parameters(), 32)
    second.load_state_dict(first.state_dict(format="portable"))
    expected = snapshot(second)
    train(first, [5])
    assert_same_snapshots(snapshot(second), expected)


@pytest.mark.parametrize("bits", [8, 32])
def test_a_state_dict_shows_one_moment_as_torch_does(bits):
    optimizer = trained("AdamW", bits, percentile_clipping=50, skip_nonfinite=True)
    shown = optimizer.state_dict()["state"]
    train(optimizer, range(3, 5))
    for now, seen in zip(optimizer.state_dict()["state"].values(), shown.values(), strict=True):
        assert all(torch.equal(now[key], seen[key]) for key in now)  # every part moves, or none
        assert seen["step"] == 5


# --- Checkpoints of earlier versions


@pytest.mark.parametrize("name", QUANTIZED)
def test_packed_state_without_labels_still_loads(name):
    """Until now the groups said what the codes are."""
    optimizer = make(name, small_model().named_parameters(), 8)
    train(optimizer, range(3))
    saved = optimizer.state_dict()
    state = {
        place: {key: x for key, x in entry.items() if f"{key}_codes" not in entry}
        for place, entry in saved["state"].items()
    }
    groups = [group | {"packing": 3, "moments": list(optimizer.moments)} for group in saved["param_groups"]]
    model = small_model()
    model.load_state_dict({name: p.detach() for name, p in zip(optimizer.names, params_of(optimizer), strict=True)})
    again = make(name, model.named_parameters(), 8)
    again.load_state_dict({"state": state, "param_groups": groups})
    assert not {"packing", "moments"} & again.param_groups[0].keys()
    for o in (optimizer, again):
        train(o, [3])
    assert_same_snapshots(snapshot(again), snapshot(optimizer))
    if not any(f"{moment}_codes" in entry for entry in state.values() for moment in optimizer.moments):
        return  # no state
    older = [group | {"packing": 2} for group in groups]
    with pytest.raises(ValueError, match=r"codes of packing 2, this version reads packing 3: .*format='portable'"):
        again.load_state_dict({"state": state, "param_groups": older})
    others = [group | {"moments": ["something", "else"]} for group in groups]
    with pytest.raises(ValueError, match="codes mean something else there; save it as portable"):
        again.load_state_dict({"state": state, "param_groups": others})


def test_bias_corrected_state_of_an_early_version_still_loads():
    """StableAdamW once kept m̂ and v̂, and said so in its groups."""
    optimizer = make("StableAdamW", small_model().named_parameters(), 32)
    train(optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        for name, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.99)):
            entry[name] /= 1 - beta**3
    saved["param_groups"][0] |= {"debiased": True, "moments": ["exp_avg", "exp_avg_sq"]}
    again = make("StableAdamW", small_model().named_parameters(), 32)
    again.load_state_dict(saved)
    assert "debiased" not in again.param_groups[0]
    for p, q in zip(params_of(again), params_of(optimizer), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(again.state[p][name], optimizer.state[q][name], rtol=1e-6, atol=0)
