"""GPT: initialisation as in the paper, every option has an effect, muParam transfers learning rates."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import seed
from trimtab import optim
from trimtab.nn.gpt import GPT, GPT_SIZES, GPTConfig
from trimtab.nn.linear import SwitchBackLinear
from trimtab.nn.loss import IGNORE, cross_entropy
from trimtab.nn.tap import listen

VOCAB = 61


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(**switches: Any) -> GPTConfig:
    return GPTConfig(**{"depth": 2, "width": 32, "heads": 4, "vocab": VOCAB, "context": 12, **switches})


def build(**switches: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(config(**switches))


def batch(rows: int = 3, length: int = 12, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab, (rows, length + 1), generator=seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(model: GPT, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.get("autocast", False)):
        loss = model.loss(*batch()).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- How it starts


def test_matrices_start_truncated_with_one_over_the_root_of_the_fan_in():
    model = build(width=128, heads=4, depth=1)
    block = model.transformer.blocks[0]
    fans = {block.attention.qkv: 128, block.attention.out: 128, block.mlp.up: 128, block.mlp.down: 512, model.head: 128}
    for linear, fan_in in fans.items():
        std = fan_in**-0.5
        assert linear.weight.std().item() == pytest.approx(std, rel=0.03)
        assert 2.1 * std < linear.weight.abs().max() <= 2 * std / 0.8796 * 1.0001  # the cut, after widening
        assert linear.bias is None
    for part in block.attention.qkv.weight.chunk(3):
        assert part.std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert model.embedding.weight.std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert model.embedding.weight.abs().max() > 2.5 * 128**-0.5  # a whole normal
    gains = [p for p in model.parameters() if p.dim() == 1]
    assert len(gains) == 3
    assert all((p == 1).all() for p in gains)


def test_biases_exist_only_when_asked_for_and_start_at_zero():
    assert not any("bias" in name for name, _ in build().named_parameters())
    biases = {name: p for name, p in build(bias=True).named_parameters() if "bias" in name}
    assert len(biases) == 2 * 6 + 1
    assert all((p == 0).all() for p in biases.values())


@pytest.mark.parametrize("vocab", [256, 1000])
def test_the_first_loss_is_ln_of_the_vocabulary_and_a_half(vocab):
    model = build(vocab=vocab, width=128, context=64)
    ce = model.loss(*batch(8, 64, vocab)).ce.item()
    assert ce == pytest.approx(math.log(vocab) + 0.5, abs=0.1)  # 512 tokens of a deviation near 1


def test_sizes_are_12_depth_width_squared():
    golden = {"2.4M": 2_359_296, "42M": 42_467_328, "302M": 301_989_888, "4.8B": 4_831_838_208}
    for name, size in GPT_SIZES.items():
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab=100, qk_norm="shared", layer_scale=0.0, **size))
        count = model.count_params()
        assert count == golden.get(name, 12 * size["depth"] * size["width"] ** 2)
        number, unit = float(name[:-1]), {"K": 1e3, "M": 1e6, "B": 1e9}[name[-1]]
        assert number == pytest.approx(count / unit, rel=0.03)
        everything = sum(p.numel() for p in model.parameters())
        assert everything - model.embedding.weight.numel() - model.head.weight.numel() == pytest.approx(count, rel=0.05)


# --- Switches

SWITCHES: dict[str, dict[str, Any]] = {
    "mlp_ratio": {"mlp_ratio": 2},
    "bias": {"bias": True},
    "norm_eps": {"norm_eps": 0.1},
    "qk_norm shared": {"qk_norm": "shared"},
    "qk_norm per-head": {"qk_norm": "per-head"},
    "qk_norm whole": {"qk_norm": "whole"},
    "attention_scale": {"attention_scale": "linear"},
    "attention": {"attention": "squared-relu"},
    "zero_queries": {"zero_queries": True},
    "layer_scale": {"layer_scale": 0.1},
    "kappa": {"kappa": 100.0},
    "positions": {"positions": "learned"},
    "embedding": {"embedding": "stable"},
    "embedding norm": {"embedding": "norm"},
    "embedding xavier": {"embedding": "xavier"},
    "tied": {"tied": True},
    "z_loss": {"z_loss": 0.1},
    "mup intermediate": {"mup": "intermediate"},
    "mup full": {"mup": "full"},
    "depth": {"depth": 0},
    "linear": {"linear": "switchback"},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_changes_the_gradients_of_a_model_that_still_learns(name):
    # widths that int8 takes, too
    wide = {"width": 128, "heads": 4}
    plain, model = build(**wide), build(**wide, **SWITCHES[name])
    before, after = gradients(plain), gradients(model)
    if name == "bias":  # zero at first, so all it does is to learn
        assert after.keys() > before.keys()
        assert all(grad.abs().max() > 0 for key, grad in after.items() if "bias" in key and "qkv" not in key)
    else:
        shared = [key for key in before.keys() & after.keys() if before[key].shape == after[key].shape]
        assert any(not torch.equal(before[key], after[key]) for key in shared)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    first = model.loss(*batch()).ce.item()
    for _ in range(6):
        optimizer.zero_grad()
        model.loss(*batch()).loss.backward()
        optimizer.step()
    assert model.loss(*batch()).ce.item() < first - 0.2


def test_layer_scale_of_zero_starts_as_a_model_without_layers():
    """And a model without layers is embedding, norm and head."""
    tokens, _ = batch()
    scaled, empty = build(layer_scale=0.0), build(depth=0)
    empty.load_state_dict({name: p for name, p in scaled.state_dict().items() if "transformer" not in name})
    assert torch.equal(scaled(tokens), empty(tokens))
    by_hand = nn.functional.layer_norm(empty.embedding.weight[tokens], (32,), eps=1e-6) @ empty.head.weight.t()
    torch.testing.assert_close(empty(tokens), by_hand)
    assert empty.count_params() == 0
    scaled.loss(*batch()).loss.backward()
    block = scaled.transformer.blocks[0]
    assert block.scale1.grad.abs().max() > 0  # and it can leave the start
    assert block.mlp.up.weight.grad.abs().max() == 0


def test_layer_scale_starts_at_its_value():
    values = {p.unique().item() for name, p in build(layer_scale=0.25).named_parameters() if "scale" in name}
    assert values == {0.25}


def test_a_tied_head_is_the_embedding_and_learns_from_both_sides():
    tied, untied = build(tied=True), build()
    assert {n for n, _ in untied.named_parameters()} - {n for n, _ in tied.named_parameters()} == {"head.weight"}
    with torch.no_grad():
        untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    assert torch.equal(tied(batch()[0]), untied(batch()[0]))
    one, two = gradients(tied), gradients(untied)
    torch.testing.assert_close(one["embedding.weight"], two["embedding.weight"] + two["head.weight"])


def test_learned_positions_are_added_after_the_stable_embeddings_norm():
    model = build(depth=0, embedding="stable", positions="learned")
    with torch.no_grad():
        model.positions.weight.copy_(100 * torch.randn(12, 32, generator=seed(2)))
    tokens, _ = batch()
    x = model.embedding(tokens) + model.positions.weight
    torch.testing.assert_close(model(tokens), model.head(model.norm(x)))
    shorter = model(tokens[:, :5])
    torch.testing.assert_close(shorter, model(tokens)[:, :5])


@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("attention", ["softmax", "squared-relu"])
def test_no_logit_depends_on_a_later_token(positions, attention):
    model, (tokens, _) = build(positions=positions, attention=attention, qk_norm="whole"), batch(1)
    seen: list[Tensor] = []
    hook = model.embedding.register_forward_hook(
        lambda module, args, x: seen.append(x.detach().requires_grad_()) or seen[-1]
    )
    for time in (0, 4, 11):
        (grad,) = torch.autograd.grad(model(tokens)[0, time].square().sum(), seen[-1])
        assert (grad[0].abs().sum(-1) > 0).tolist() == [other <= time for other in range(12)]
    hook.remove()


def test_order_matters_to_a_model_with_positions():
    tokens, _ = batch(1)
    swapped = tokens[:, [1, 0, *range(2, 12)]]
    for positions in ("rope", "learned"):
        model = build(positions=positions, depth=1)
        assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1], atol=1e-4)


def test_z_loss_pulls_log_z_towards_zero():
    """At the same learning rate, after the same steps."""
    end = {}
    for z_loss in (0.0, 0.1):
        model, values = build(z_loss=z_loss), []
        optimizer = torch.optim.SGD(model.head.parameters(), lr=1.0)
        for _ in range(20):
            optimizer.zero_grad()
            model.loss(*batch()).loss.backward()
            optimizer.step()
        with listen(model, lambda name, x, values=values: values.append(x.mean().item()), patterns="logz"):
            model.loss(*batch())
        end[z_loss] = values[0]
    assert abs(end[0.1]) < 0.7 * abs(end[0.0])


# --- Two ways to the loss


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_that_of_the_logits(tied):
    model, (tokens, targets) = build(tied=tied, z_loss=0.01), batch()
    targets[0, :5] = IGNORE
    fast, plain = model.loss(tokens, targets), cross_entropy(model(tokens), targets, z_loss=0.01)
    torch.testing.assert_close(fast, plain)
    for mine, other in zip(
        *(torch.autograd.grad(out.loss, list(model.parameters())) for out in (fast, plain)), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_a_head_of_another_kind_is_used_as_it_is():
    class Louder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    model, (tokens, targets) = build(), batch()
    louder = Louder(32, VOCAB, bias=False)
    louder.load_state_dict(model.head.state_dict())
    model.head = louder
    torch.testing.assert_close(model.loss(tokens, targets).loss, cross_entropy(model(tokens), targets).loss)


def test_taps_have_the_whole_path_and_hearing_them_changes_nothing():
    model, (tokens, targets) = build(), batch()
    seen: dict[str, Tensor] = {}
    quiet = gradients(model)
    with listen(model, lambda name, x: seen.update({name: x.clone()})):
        listened = gradients(model)
    assert quiet.keys() == listened.keys()
    assert all(torch.equal(quiet[name], listened[name]) for name in quiet)
    blocks = [
        f"transformer.blocks.{i}.{name}"
        for i in range(2)
        for name in ("attention.q", "attention.k", "attention.logits", "out")
    ]
    assert list(seen) == [*blocks, "logits", "logz"]
    torch.testing.assert_close(seen["logits"], model(tokens).detach())
    torch.testing.assert_close(seen["logz"], seen["logits"].logsumexp(-1).flatten())
    assert targets.numel() == seen["logz"].numel()


# --- Conditions of training


@pytest.mark.parametrize("attention", ["softmax", "squared-relu"])
def test_checkpointing_gives_the_same_gradients_and_keeps_less(attention):
    kept = {}
    grads = {}
    for checkpointing in (False, True):
        model = build(checkpointing=checkpointing, attention=attention, qk_norm="shared", depth=3)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            model.loss(*batch())
        kept[checkpointing], grads[checkpointing] = sum(saved), gradients(model)
    assert kept[True] < kept[False] / 2
    assert all(torch.equal(grads[True][name], grads[False][name]) for name in grads[False])


def test_checkpointing_does_not_keep_the_codes_of_weights_and_changes_no_gradient():
    grads = {}
    for checkpointing in (False, True):
        model = build(checkpointing=checkpointing, linear="switchback-m", depth=3)
        layers = [layer for layer in model.modules() if isinstance(layer, SwitchBackLinear)]
        loss = model.loss(*batch()).loss
        assert [layer._made is None for layer in layers] == [checkpointing] * 12
        loss.backward()
        assert [layer._made is None for layer in layers] == [checkpointing] * 12
        grads[checkpointing] = {name: p.grad for name, p in model.named_parameters()}
    assert all(torch.equal(grads[True][name], grads[False][name]) for name in grads[False])


def test_checkpointing_allows_to_stop_listening_before_backward():
    model = build(checkpointing=True)
    with listen(model, lambda *_: None):
        loss = model.loss(*batch()).loss
    loss.backward()
    assert torch.equal(model.head.weight.grad, gradients(build())["head.weight"])


def test_autocast_trains_about_the_same():
    exact, rough = gradients(build(qk_norm="shared")), gradients(build(qk_norm="shared"), autocast=True)
    for name, grad in exact.items():
        assert rough[name].dtype == torch.float32
        error = (rough[name] - grad).norm() / grad.norm()
        assert 0 < error < 0.05, name  # bfloat16 has 8 bits


# torch.compile itself makes an object of every autograd function it meets
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
def test_the_model_and_its_loss_compile_into_one_graph():
    torch._dynamo.reset()
    model, (tokens, targets) = build(qk_norm="shared", z_loss=1e-4, checkpointing=True), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))
    expected = gradients(model)
    model.zero_grad()
    compiled(tokens, targets).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "where", ["embedding.weight", "transformer.blocks.0.attention.qkv.weight", "norm.weight", "head.weight"]
)
def test_a_non_finite_weight_reaches_the_loss_or_the_gradients(where, bad):
    model = build()
    with torch.no_grad():
        model.get_parameter(where).flatten()[0] = bad
    tokens, targets = batch()
    tokens[0, 0] = 0
    loss = model.loss(tokens, targets).loss
    loss.backward()
    # PyTorch's attention on AVX-512 returns zeros where all logits of a row are NaN; its gradient is NaN.
    values = [loss, *(p.grad for p in model.parameters())]
    assert not all(x.isfinite().all() for x in values)


# --- Input


def test_sequences_up_to_the_context_run_and_longer_ones_are_refused():
    for positions in ("rope", "learned"):
        model = build(positions=positions)
        assert model(batch(length=12)[0]).shape == (3, 12, VOCAB)
        with pytest.raises(ValueError, match=r"13 tokens is longer than context=12; .* context=13"):
            model(batch(length=13)[0])


def test_wrong_tokens_are_refused_with_words():
    model, (tokens, targets) = build(), batch()
    with pytest.raises(ValueError, match=r"tokens holds 61; try 0 to 60"):
        model(tokens.clone().fill_(61))
    with pytest.raises(ValueError, match=r"targets holds -1; try 0 to 60, or -100"):
        model.loss(tokens, targets.clone().fill_(-1))
    with pytest.raises(ValueError, match=r"\[batch, time\], got shape \(12,\); try tokens\[None\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"tokens must be whole numbers, got torch.float32"):
        model(tokens.float())


def test_empty_batches_and_single_tokens_run():
    model = build()
    assert model(torch.empty(0, 12, dtype=torch.long)).shape == (0, 12, VOCAB)
    assert model.loss(torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)).loss.isfinite()


# --- muParam


@pytest.mark.parametrize("mup", ["simple", "intermediate", "full"])
def test_mu_param_is_standard_at_the_base_width(mup):
    same = {"attention_scale": "linear", "zero_queries": True} if mup == "full" else {}
    model, standard = build(mup=mup, mup_base_width=32), build(**same)
    assert model.mup_ratio == standard.mup_ratio == 1
    for (name, p), q in zip(model.named_parameters(), standard.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert torch.equal(model(batch()[0]), standard(batch()[0]))


@pytest.mark.parametrize(
    ("mup", "std"), [("off", 0.03125), ("simple", 0.03125), ("intermediate", 0.015625), ("full", 0.015625)]
)
def test_golden_values_of_mu_param(mup, std):
    model = build(width=1024, heads=16, depth=1, mup=mup)
    assert model.head.weight.std().item() == pytest.approx(std, rel=0.02)
    rates = {
        name: group["lr"]
        for group in optim.groups(model, lr=1.0, mup_ratio=model.mup_ratio)
        for name, _ in group["params"]
    }
    scaled = 1.0 if mup == "off" else 0.25
    linears = {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}
    expected = {f"transformer.blocks.0.{name}.weight": scaled for name in linears} | {"head.weight": scaled}
    assert rates == {**dict.fromkeys(rates, 1.0), **expected}
    assert rates["embedding.weight"] == 1
    block = model.transformer.blocks[0].attention
    assert (block.scale == 1 / 64) == (mup == "full")
    assert bool((block.qkv.weight[:1024] == 0).all()) == (mup == "full")


def change_of_features(width: int, mup: str) -> dict[str, float]:
    """How far a few steps of Adam move what each block and the head put out."""
    torch.manual_seed(0)
    model = GPT(config(width=width, heads=width // 16, mup=mup, mup_base_width=32))
    tokens, targets = batch()

    def look() -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        with (
            torch.no_grad(),
            listen(model, lambda name, x: values.update({name: x.clone()}), patterns=("*.out", "logits")),
        ):
            model(tokens)
        return values

    before = look()
    optimizer = optim.AdamW(optim.groups(model, lr=3e-3, weight_decay=0.0, mup_ratio=model.mup_ratio), lr=3e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(tokens, targets).loss.backward()
        optimizer.step()
    after = look()
    return {name: (after[name] - before[name]).square().mean().sqrt().item() for name in before}


def test_features_move_alike_at_every_width_with_mu_param_and_ever_further_without():
    """The coordinate check, from width 32 to 512. What is left of growth with muParam is the embedding's."""
    changes = {mup: [change_of_features(width, mup) for width in (32, 128, 512)] for mup in ("off", "simple", "full")}
    for name in changes["off"][0]:
        standard, simple, full = ([change[name] for change in changes[mup]] for mup in ("off", "simple", "full"))
        assert all(wide > 1.5 * narrow for narrow, wide in pairwise(standard)), (name, standard)
        assert full[-1] < 1.4 * full[0], (name, full)
        if name != "logits":  # simple leaves the head's first weights as they are, and they grow with its input
            assert simple[-1] < 1.4 * simple[0], (name, simple)


# --- What the paper derives


def test_the_gradient_through_a_norm_is_divided_by_the_size_of_its_input():
    """dL/dx = (a gz - x <gz, a x> / (n m)) / sqrt(m) for z = a x / sqrt(m), m = mean(x^2) + eps."""
    x, a, gz = torch.randn(3, 9, generator=seed(3), dtype=torch.float64).unbind()
    x.requires_grad_()
    m = x.square().mean() + 1e-6
    (grad,) = torch.autograd.grad((nn.functional.rms_norm(x, (9,), a, eps=1e-6) * gz).sum(), x)
    derived = (a * gz - x * (gz @ (a * x)) / (9 * m)) / m.sqrt()
    torch.testing.assert_close(grad, derived.detach())
    # So it is in the model: features ten times as large get gradients a tenth as large.
    sizes = []
    for factor in (1.0, 10.0):
        model = build(depth=0)
        with torch.no_grad():
            model.embedding.weight.mul_(factor)
        sizes.append(gradients(model)["embedding.weight"].norm())
    assert (sizes[0] / sizes[1]).item() == pytest.approx(10, rel=1e-2)
