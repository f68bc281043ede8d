"""CLIP: inputs, refusals, and a tiny model that learns."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import assert_same, seed
from trimtab.nn.clip import CLIP, CLIP_SIZES, CLIPConfig, drop_patches
from trimtab.nn.config import ConfigError
from trimtab.nn.convert import convert_linears
from trimtab.nn.linear import SwitchBackLinear
from trimtab.nn.tap import listen
from trimtab.nn.tokenizer import ByteTokenizer, WordTokenizer
from trimtab.optim import groups

TINY = CLIP_SIZES["tiny"]
SMALL = replace(TINY, depth=2, width=32, heads=2, text_depth=1, text_width=32, text_heads=2, embed=16, image_size=8)
COLOURS = ("red", "green", "blue", "white")
PLACES = ("left", "right", "top", "bottom")


def build(config: CLIPConfig = SMALL, **switches: Any) -> CLIP:
    torch.manual_seed(0)
    return CLIP(replace(config, **switches))


def batch(config: CLIPConfig = SMALL, pairs: int = 3) -> tuple[Tensor, Tensor]:
    images = torch.randn(pairs, config.channels, config.image_size, config.image_size, generator=seed(0))
    return images, ByteTokenizer(context=config.context).encode([f"caption {i}" * (i + 1) for i in range(pairs)])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def watch_input(module: nn.Module) -> list[Tensor]:
    seen: list[Tensor] = []
    module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    return seen


def watch_output(module: nn.Module) -> list[Tensor]:
    seen: list[Tensor] = []
    module.register_forward_hook(lambda module, args, out: seen.append(out))
    return seen


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and are much slower if another program uses the core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- Sizes


@pytest.mark.parametrize(
    ("name", "count"),
    # open_clip's, with the logit scale
    [("ViT-B/32", 151_277_313), ("ViT-B/16", 149_620_737), ("ViT-L/14", 427_616_513), ("ViT-H/14", 986_109_441)],
)
def test_the_named_sizes_have_as_many_parameters_as_open_clips(name, count):
    with torch.device("meta"):
        model = CLIP(CLIP_SIZES[name])
    assert sum(p.numel() for p in model.parameters()) == count


def test_shapes_and_names_others_rely_on():
    shapes = {name: tuple(p.shape) for name, p in build(TINY).named_parameters()}
    assert shapes["visual.conv1.weight"] == (64, 3, 4, 4)
    assert shapes["visual.positional_embedding"] == (65, 64)
    assert shapes["text.token_embedding.weight"] == (ByteTokenizer().vocab, 64)
    assert shapes["logit_scale"] == (1,)  # FSDP2 refuses scalars
    assert CLIP_SIZES["ViT-H/14"].head_width == 80


def test_everything_starts_with_the_deviation_stated():
    model = build(TINY, width=128, text_width=128, context=512, vocab=2000, embed=128)
    expected = {"visual.class_embedding": 128**-0.5, "visual.positional_embedding": 128**-0.5}
    expected |= {"text.token_embedding.weight": 0.02, "text.positional_embedding": 0.01}
    for tower, depth in (("visual", 4), ("text", 2)):
        expected[f"{tower}.proj"] = 128**-0.5
        block = f"{tower}.transformer.blocks.1."
        expected[f"{block}attention.qkv.weight"] = 128**-0.5
        expected[f"{block}attention.out.weight"] = 128**-0.5 * (2 * depth) ** -0.5
        expected[f"{block}mlp.up.weight"] = (2 * 128) ** -0.5
        expected[f"{block}mlp.down.weight"] = 128**-0.5 * (2 * depth) ** -0.5
    parameters = dict(model.named_parameters())
    for name, std in expected.items():
        p = parameters[name]
        assert p.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * p.numel())), name  # four deviations of a std


# --- Features


def test_features_have_length_one_and_forward_gives_both_and_the_scale():
    model, (images, tokens) = build(), batch()
    image, text, scale = model(images, tokens)
    assert image.shape == text.shape == (3, SMALL.embed)
    for features in (image, text):
        torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
    assert_same(image, model.encode_image(images))
    assert_same(text, model.encode_text(tokens))
    assert scale.item() == pytest.approx(1 / 0.07)


def test_each_feature_is_its_own_images_and_its_own_captions():
    model, (images, tokens) = build(), batch()
    for encode, x in ((model.encode_image, images), (model.encode_text, tokens)):
        together = encode(x)
        assert (together[0] - together[1]).norm() > 0.1
        torch.testing.assert_close(encode(x[1:2]), together[1:2])


def test_padding_and_what_follows_the_end_change_nothing():
    model, (_, tokens) = build(), batch()
    expected = model.encode_text(tokens)
    length = int((tokens == SMALL.vocab - 1).int().argmax(dim=1).max()) + 1
    torch.testing.assert_close(model.encode_text(tokens[:, :length]), expected)
    dirty = tokens.clone()
    dirty[0, int((tokens[0] == SMALL.vocab - 1).int().argmax()) + 1 :] = 7
    torch.testing.assert_close(model.encode_text(dirty), expected)
    # The first end token counts, also if there are more.
    dirty[0, -1] = SMALL.vocab - 1
    torch.testing.assert_close(model.encode_text(dirty), expected)


def test_the_end_token_sees_the_whole_caption():
    model, (_, tokens) = build(), batch()
    before = model.encode_text(tokens)[2]
    end = int((tokens[2] == SMALL.vocab - 1).int().argmax())
    for i in range(end):
        changed = tokens.clone()
        changed[2, i] = 1 + tokens[2, i] % 200
        assert (model.encode_text(changed)[2] - before).norm() > 1e-4, f"token {i} does not matter"


def test_each_tower_is_read_at_one_token():
    model, (images, tokens) = build(), batch()
    ends = [row.index(SMALL.vocab - 1) for row in tokens.tolist()]
    for tower, norm, x, places in (
        (model.visual, model.visual.ln_post, images, [0, 0, 0]),
        (model.text, model.text.ln_final, tokens, ends),
    ):
        after, read = watch_output(tower.transformer), watch_input(norm)
        tower(x)
        assert_same(read[0], torch.stack([after[0][i, place] for i, place in enumerate(places)]))


def test_every_patch_matters_and_its_place_too():
    model, (images, _) = build(), batch()
    before = model.encode_image(images[:1])
    for row in range(2):
        for column in range(2):
            changed = images[:1].clone()
            changed[..., 4 * row, 4 * column] += 1
            assert (model.encode_image(changed) - before).norm() > 1e-4
    assert (model.encode_image(images[:1].roll(4, dims=3)) - before).norm() > 1e-3


def test_every_parameter_gets_a_gradient():
    model = build(qk_norm="whole", layer_scale=0.1)
    model.loss(*batch()).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # Softmax does not see what is added to all its logits alike: q·(k + c) = q·k + q·c.
    assert not [name for name in missing if not name.endswith("k_norm.bias")]


# --- Patch dropout


@pytest.mark.parametrize(
    ("patches", "share", "kept"), [(4, 0.5, 2), (49, 0.5, 24), (10, 0.9, 1), (3, 0.9, 1), (5, 0.2, 4)]
)
def test_the_class_token_stays_and_the_right_number_of_patches(patches, share, kept):
    torch.manual_seed(0)
    x = torch.arange(patches + 1.0).expand(200, patches + 1)[..., None] * torch.ones(6)
    x = drop_patches(x, share)
    assert x.shape == (200, 1 + kept, 6)
    assert (x[:, 0] == 0).all()
    numbers = [tuple(sorted(row)) for row in x[:, 1:, 0].tolist()]
    assert all(0 < i <= patches for row in numbers for i in row)
    assert all(len(set(row)) == kept for row in numbers)
    assert {i for row in numbers for i in row} == set(range(1, patches + 1))  # each has its turn


def test_patch_dropout_is_for_training_and_follows_the_seed():
    model, plain, (images, _) = build(TINY, patch_dropout=0.5), build(TINY), batch(TINY)
    seen = watch_output(model.visual.transformer)
    torch.manual_seed(1)
    first = model.encode_image(images)
    again = model.encode_image(images)
    torch.manual_seed(1)
    assert_same(model.encode_image(images), first)
    assert not torch.equal(first, again)
    model.eval()
    assert_same(model.encode_image(images), plain.encode_image(images))
    assert [x.shape[1] for x in seen] == [33, 33, 33, 65]


# --- Switches


def test_layer_scale_from_zero_starts_with_blocks_that_do_nothing():
    model, (images, _) = build(layer_scale=0.0), batch()
    before, after = watch_input(model.visual.transformer), watch_output(model.visual.transformer)
    model.encode_image(images)
    assert_same(after[0], before[0])


def test_qk_norm_bounds_the_attention_logits_of_both_towers():
    seen: dict[str, float] = {}
    model, (images, tokens) = build(qk_norm="whole"), batch()
    with torch.no_grad():
        for tower in (model.visual, model.text):
            for block in tower.transformer.blocks:
                block.attention.qkv.weight.mul_(1000)
    with listen(model, lambda name, x: seen.update({name: x.max().item()}), patterns="*attention.logits"):
        model(images, tokens)
    assert sorted(name.split(".")[0] for name in seen) == ["text", "visual", "visual"]
    # Over the whole width 32 the norm is sqrt(32), and one head may hold all of it: 32 / sqrt(16).
    assert all(logit <= 8.01 for logit in seen.values())


def test_only_the_linears_of_the_blocks_follow_the_switch():
    built, converted = build(linear="switchback"), build()
    report = convert_linears(converted)
    layers = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    blocks = [f"visual.transformer.blocks.{i}" for i in range(2)] + ["text.transformer.blocks.0"]
    expected = {f"{block}.{layer}" for block in blocks for layer in layers}
    for model in (built, converted):
        assert {name for name, module in model.named_modules() if isinstance(module, SwitchBackLinear)} == expected
    assert set(report.converted) == expected
    assert not report.kept


def test_int8_changes_the_loss_a_little():
    exact, quantized = (build(TINY, linear=kind).loss(*batch(TINY, 8)).loss.item() for kind in ("float", "switchback"))
    assert quantized != exact
    assert quantized == pytest.approx(exact, rel=0.02)


def test_gains_and_the_logit_scale_do_not_decay():
    made = groups(build(layer_scale=0.0, qk_norm="whole"), lr=1e-3, weight_decay=0.2)
    decays = {name: group["weight_decay"] for group in made for name, _ in group["params"]}
    still = [name for name, decay in decays.items() if decay == 0]
    assert {"logit_scale", "visual.class_embedding", "text.transformer.blocks.0.scale1"} <= set(still)
    assert decays["visual.conv1.weight"] == decays["visual.proj"] == 0.2


def test_it_compiles_into_one_graph():
    model, (images, tokens) = build(patch_dropout=0.5), batch()
    torch.manual_seed(1)
    expected = model(images, tokens)
    torch.manual_seed(1)
    got = torch.compile(model, backend="eager", fullgraph=True)(images, tokens)
    torch.testing.assert_close(tuple(got), tuple(expected))


@pytest.mark.parametrize("linear", ["float", "switchback"])
def test_checkpointing_gives_the_same_gradients(linear):
    plain = build(patch_dropout=0.5, linear=linear)
    saving = build(patch_dropout=0.5, linear=linear, checkpointing=True)
    for model in (plain, saving):
        torch.manual_seed(3)
        model.loss(*batch()).loss.backward()
    expected = gradients(plain)
    assert expected.keys() == gradients(saving).keys()
    for name, grad in gradients(saving).items():
        torch.testing.assert_close(grad, expected[name], msg=name)


def test_both_towers_are_as_bfloat16_as_autocast_makes_them():
    model, (images, tokens) = build(), batch()
    expected = model.loss(images, tokens).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(images.bfloat16(), tokens).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.1)
    assert not torch.equal(loss, expected)


# --- Learning


def shapes() -> tuple[Tensor, list[str]]:
    """16 pictures of a bar: four colours at four places, with noise, and their captions."""
    images = 0.1 * torch.randn(16, 3, 16, 16, generator=seed(0))
    paint = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]])[:, :, None, None]
    half = {"left": (slice(None), slice(8)), "right": (slice(None), slice(8, 16))}
    half |= {"top": (slice(8), slice(None)), "bottom": (slice(8, 16), slice(None))}
    captions = []
    for i, (colour, place) in enumerate((c, p) for c in range(4) for p in PLACES):
        images[i, :, half[place][0], half[place][1]] += paint[colour]
        captions.append(f"a {COLOURS[colour]} bar on the {place}")
    return images, captions


@pytest.mark.parametrize(
    ("steps", "switches"),
    [
        (30, {}),
        (30, {"linear": "switchback"}),
        (80, {"qk_norm": "whole", "layer_scale": 0.1, "patch_dropout": 0.25}),
    ],
)
def test_a_tiny_clip_learns_sixteen_pairs_by_heart(steps, switches):
    images, captions = shapes()
    tokenizer = WordTokenizer.from_captions(captions, context=8)
    model = build(TINY, image_size=16, vocab=tokenizer.vocab, context=tokenizer.context, **switches)
    tokens = tokenizer.encode(captions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    with torch.no_grad():
        assert model.eval().loss(images, tokens).image_accuracy < 0.5
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(images, tokens).loss.backward()
        optimizer.step()
        model.clamp_logit_scale()
    with torch.no_grad():
        result = model.eval().loss(images, tokens)
    assert (result.image_accuracy.item(), result.text_accuracy.item()) == (1, 1)
    assert result.loss < 0.2


@pytest.mark.parametrize(("value", "kept"), [(-1.0, 0.0), (0.5, 0.5), (9.0, math.log(100))])
def test_the_logit_scale_is_kept_in_its_range(value, kept):
    model = build()
    storage = model.logit_scale.data_ptr()
    with torch.no_grad():
        model.logit_scale.fill_(value)
    model.clamp_logit_scale()
    assert model.logit_scale.item() == pytest.approx(kept)
    assert model.logit_scale.data_ptr() == storage  # the optimizer's own


def test_a_state_dict_makes_the_same_model():
    model, other = build(), CLIP(SMALL)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_same(other.loss(*batch()).loss, model.loss(*batch()).loss)


# --- Bad input


@pytest.mark.parametrize("linear", ["float", "switchback"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_pixel_reaches_the_loss(bad, linear):
    model, (images, tokens) = build(linear=linear), batch()
    assert model.loss(images, tokens).loss.isfinite()
    images[1, 0, 3, 3] = bad
    assert not model.loss(images, tokens).loss.isfinite()


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(2, 3, 8, 12), r"must have shape \(batch, 3, 8, 8\), got \(2, 3, 8, 12\)"),
        (torch.zeros(2, 1, 8, 8), r"got \(2, 1, 8, 8\)"),
        (torch.zeros(3, 8, 8), r"got \(3, 8, 8\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "must be float, got torch.uint8; .* / 255"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.float64), "are torch.float64 but the model is torch.float32"),
    ],
)
def test_images_that_do_not_fit_are_refused(images, words):
    with pytest.raises(ValueError, match=words):
        build().encode_image(images)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.zeros(2, 65, dtype=torch.int64), "captions of 65 tokens exceed context=64"),
        (torch.zeros(2, 0, dtype=torch.int64), "captions of 0 tokens"),
        (torch.zeros(5, dtype=torch.int64), r"ids \(batch, length\), got shape \(5,\)"),
        (torch.zeros(2, 5), "whole numbers, got torch.float32"),
        (torch.tensor([[257, 258], [257, 259]]), "tokens holds 259; try 0 to 258"),
        (torch.tensor([[-1, 258]]), "tokens holds -1; try 0"),
        (torch.tensor([[257, 258], [257, 5]]), r"caption 1 has no end token 258"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens, words):
    with pytest.raises(ValueError, match=words):
        build().encode_text(tokens)


def test_where_ids_cannot_be_looked_at_a_caption_without_end_is_nan(monkeypatch):
    monkeypatch.setattr("trimtab.nn.clip.check_tokens", lambda *args: None)
    features = build().encode_text(torch.tensor([[257, 258], [257, 5]]))
    assert features.isnan().all(dim=1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"patch": 3}, "image_size=8 does not split into patches of patch=3; try image_size=9"),
        ({"patch": 20}, "try image_size=20"),
        ({"text_heads": 5}, "text_width=32 does not split into text_heads=5; try text_width=30"),
        ({"heads": 5}, "width=32 does not split into heads=5; try width=30"),
        ({"context": 1}, "context=1 is too small; try context=2"),
        ({"vocab": 0}, "vocab=0 is too small"),
        ({"embed": 0}, "embed=0"),
        ({"text_depth": -1}, "text_depth=-1 is too small; try text_depth=0"),
        ({"patch_dropout": 1.0}, r"patch_dropout=1.0 is not in \[0, 1\); try patch_dropout=0.5"),
        ({"linear": "int9"}, "linear='int9' is not known; try 'float'"),
        ({"qk_norm": True}, "qk_norm=True is not known"),
        ({"image_size": 8.0}, "image_size=8.0 is not a whole number"),
    ],
)
def test_impossible_configs_are_refused_with_a_value_that_works(wrong, words):
    with pytest.raises(ConfigError, match=words):
        replace(SMALL, **wrong)


@given(
    sizes=st.fixed_dictionaries(
        {
            "image_size": st.integers(-1, 12),
            "patch": st.integers(-1, 6),
            "width": st.integers(0, 12),
            "heads": st.integers(0, 4),
            "text_width": st.integers(0, 12),
            "text_heads": st.integers(0, 4),
            "depth": st.integers(0, 2),
            "text_depth": st.integers(0, 2),
            "embed": st.integers(0, 3),
            "channels": st.integers(0, 4),
            "patch_dropout": st.floats(-0.5, 1.5),
            "qk_norm": st.sampled_from(["off", "shared", "per-head", "whole"]),
            "bias": st.booleans(),
        }
    )
)
@settings(max_examples=60, deadline=None)
def test_a_config_is_refused_or_its_model_works(sizes):
    try:
        config = replace(SMALL, **sizes)
    except ConfigError:
        return
    loss = build(config).loss(*batch(config, pairs=2)).loss
    loss.backward()
    assert loss.isfinite()
