"""Sequence length warmup: lengths equal the published ones; cut batches stay aligned."""

import copy
import json
import math
from collections import namedtuple
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import assert_same, seed
from trimtab.schedule import SeqLenWarmup, cut, read_deepspeed
from trimtab.schedule.seqlen import Lengths

FAST = settings(max_examples=60, deadline=None)


def lengths(warmup: Lengths, *steps: int) -> list[int]:
    return [warmup.at(step) for step in steps]


# --- The published numbers


def test_linear_as_in_deepspeeds_own_test():
    warmup = SeqLenWarmup(start=2, end=10, steps=8, multiple=2)
    assert lengths(warmup, *range(1, 11)) == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]


def test_discrete_as_in_deepspeeds_own_test():
    warmup = SeqLenWarmup.discrete([1, 2, 3, 4, 5], [2, 4, 6, 8])
    assert lengths(warmup, *range(1, 10)) == [1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_linear_starts_at_its_start():
    assert lengths(SeqLenWarmup(start=8, end=1024, steps=100), *range(6)) == [8, 16, 24, 32, 48, 56]


def test_a_start_below_the_multiple_is_refused_where_deepspeed_began_with_nothing():
    with pytest.raises(ValueError, match=r"start=8 is not a multiple of 16.*try start=16 or multiple=8"):
        SeqLenWarmup(start=8, end=1024, steps=100, multiple=16)


def test_the_lower_clamp_holds_where_rounding_would_go_below_the_start():
    warmup = SeqLenWarmup(start=16, end=1024, steps=100, multiple=16)
    object.__setattr__(warmup, "start", 8)  # past the check: DeepSpeed's example
    assert lengths(warmup, *range(6)) == [8, 16, 16, 32, 48, 48]


def test_an_end_that_is_no_multiple_is_reached_a_little_late():
    warmup = SeqLenWarmup(start=8, end=100, steps=50)
    assert lengths(warmup, *range(49, 53)) == [96] * 4
    assert lengths(warmup, 53, 54, 10_000) == [100] * 3
    assert warmup.settled() == 53


def test_root_and_linear_side_by_side():
    steps = 0, 1, 10, 50, 100, 250, 500, 1000
    linear = SeqLenWarmup(start=8, end=1024, steps=1000)
    assert lengths(linear, *steps) == [8, 8, 16, 56, 104, 256, 512, 1024]
    assert lengths(replace(linear, kind="root"), *steps) == [8, 40, 104, 232, 328, 512, 720, 1024]


def test_a_root_of_degree_one_is_linear():
    linear = SeqLenWarmup(start=8, end=1024, steps=777)
    root = replace(linear, kind="root", degree=1.0)
    assert lengths(root, *range(800)) == lengths(linear, *range(800))


def test_an_exact_root_is_not_rounded_away():
    # √(169/225) = 13/15, so the length is 8 + 120 · 13/15 = 112; in floats it comes out just below.
    assert SeqLenWarmup(start=8, end=128, steps=225, kind="root").at(169) == 112


def test_tokens_of_the_papers_run():
    warmup = SeqLenWarmup(start=64, end=1024, steps=45_000)
    assert warmup.count_tokens(4096, 45_000) == 99_536_732_160
    estimate = 4096 * 45_000 * ((64 + 1024) / 2 - 8 / 2)
    assert estimate == pytest.approx(99.53e9, rel=1e-4)
    assert warmup.count_tokens(4096, 3000) == 1_130_758_144
    assert lengths(warmup, 10_000, 20_000, 37_500, 45_000) == [272, 488, 864, 1024]
    assert [round(warmup.count_tokens(4096, step) / 1e9, 3) for step in (10_000, 20_000, 37_500)] == [
        6.829,
        22.395,
        70.659,
    ]


@pytest.mark.parametrize(
    ("start", "end", "steps", "batch", "tokens", "expected"),
    [
        (64, 1024, 45_000, 4096, 157_286_400_000, 58_769),
        (64, 1024, 110_000, 512, 157_286_400_000, 351_992),
        (72, 2048, 11_500, 2048, 30_000_000_000, 12_723),  # 12,722 are not quite enough
    ],
)
def test_steps_that_the_papers_tokens_take(start, end, steps, batch, tokens, expected):
    warmup = SeqLenWarmup(start=start, end=end, steps=steps)
    assert warmup.count_steps(batch, tokens) == expected
    assert warmup.count_tokens(batch, expected - 1) < tokens <= warmup.count_tokens(batch, expected)


# --- What holds for all


@st.composite
def warmups(draw: st.DrawFn, kinds: tuple[str, ...] = ("linear", "root", "two-stage", "mixed")) -> SeqLenWarmup:
    multiple = draw(st.sampled_from([1, 2, 8, 64]))
    start = multiple * draw(st.integers(1, 10))
    kind: Any = draw(st.sampled_from(kinds))
    return SeqLenWarmup(
        start=start,
        end=start + draw(st.integers(0, 1000)),
        steps=draw(st.integers(1, 500)),
        multiple=multiple,
        kind=kind,
        degree=draw(st.floats(0.3, 4)),
        seed=draw(st.integers(0, 5)),
        cut_mode=draw(st.sampled_from(["truncate", "reshape"])),  # type: ignore[arg-type]
        arithmetic=draw(st.sampled_from(["exact", "deepspeed"])) if kind in ("linear", "root") else "exact",
    )


@FAST
@given(warmups(), st.integers(0, 2000))
def test_lengths_stay_between_the_clamps_and_are_multiples_elsewhere(warmup, step):
    length = warmup.at(step)
    assert warmup.start <= length <= warmup.end
    assert length % warmup.multiple == 0 or length == warmup.end
    assert length in warmup.buckets()


@FAST
@given(warmups(("linear", "root", "two-stage")))
def test_lengths_never_fall(warmup):
    assert all(a <= b for a, b in pairwise(lengths(warmup, *range(600))))


@FAST
@given(warmups(), st.lists(st.integers(0, 1000), max_size=20))
def test_a_length_depends_on_the_step_alone(warmup, others):
    again = SeqLenWarmup(**json.loads(json.dumps(asdict(warmup))))  # as a resumed run reads it
    for step in others:
        again.at(step)
    assert again == warmup
    assert lengths(again, *range(0, 600, 7)) == lengths(warmup, *range(0, 600, 7))


@FAST
@given(warmups(), st.integers(1, 700))
def test_the_table_is_the_schedule(warmup, steps):
    rows = warmup.table(steps)
    starts = [step for step, _ in rows]
    assert starts[0] == 1
    expanded = [max((row for row in rows if row[0] <= step), key=lambda row: row[0])[1] for step in range(1, steps + 1)]
    assert expanded == lengths(warmup, *range(1, steps + 1))
    assert all(a[1] != b[1] for a, b in pairwise(rows))


@FAST
@given(warmups(), st.integers(1, 700), st.integers(1, 5))
def test_tokens_are_counted_as_a_loop_would(warmup, steps, batch):
    counted = 0
    for step in range(1, steps + 1):
        row = warmup.at(step)
        counted += batch * (warmup.end // row * row if warmup.cut_mode == "reshape" else row)
    assert warmup.count_tokens(batch, steps) == counted
    assert warmup.count_steps(batch, counted) == steps
    assert warmup.count_steps(batch, counted + 1) == steps + 1


@FAST
@given(warmups())
def test_settled_is_the_first_step_at_full_length(warmup):
    settled = warmup.settled()
    assert lengths(warmup, settled, settled + 1, settled + 500) == [warmup.end] * 3
    if warmup.kind in ("linear", "root", "two-stage") and settled > 0 and warmup.start < warmup.end:
        assert warmup.at(settled - 1) < warmup.end


def test_mixed_draws_short_and_long_until_its_end():
    warmup = SeqLenWarmup(start=8, end=64, steps=400, kind="mixed")
    drawn = lengths(warmup, *range(1, 401))
    assert set(drawn) == {8, 16, 24, 32, 40, 48, 56, 64}
    assert lengths(warmup, 401, 402) == [64, 64]
    assert drawn != lengths(replace(warmup, seed=1), *range(1, 401))
    # Written down, so that a run resumed under another version goes on as it began.
    assert drawn[:8] == [16, 16, 48, 48, 32, 40, 56, 64]


def test_two_stages_jump_once():
    assert SeqLenWarmup(start=16, end=128, steps=300, kind="two-stage").table(1000) == [(1, 16), (301, 128)]


@pytest.mark.parametrize("kind", ["linear", "root", "mixed"])
def test_buckets_are_the_only_lengths(kind):
    warmup = SeqLenWarmup(start=64, end=1000, steps=200, kind=kind, lengths=(64, 128, 300, 1000))
    assert {warmup.at(step) for step in range(500)} == {64, 128, 300, 1000}
    assert warmup.buckets() == (64, 128, 300, 1000)


def test_buckets_round_down():
    plain = SeqLenWarmup(start=64, end=1024, steps=200, multiple=1)
    bucketed = replace(plain, lengths=(64, 100, 512, 1024))
    for step in range(300):
        assert bucketed.at(step) == max(n for n in (64, 100, 512, 1024) if n <= plain.at(step))


def test_a_constant_length_may_be_any():
    warmup = SeqLenWarmup(start=100, end=100, steps=1)
    assert warmup.table(1000) == [(1, 100)]
    assert warmup.count_tokens(3, 7) == 2100


def test_a_custom_schedule_may_fall_again():
    warmup = SeqLenWarmup.custom(lambda step: 128 if step % 2 else 32, end=128)
    assert lengths(warmup, *range(1, 5)) == [128, 32, 128, 32]
    assert warmup.count_tokens(2, 5) == 2 * (3 * 128 + 2 * 32)
    assert warmup.count_steps(2, 2 * (128 + 32) + 1) == 3
    assert warmup.cut(torch.zeros(2, 128, dtype=torch.long), 2).shape == (2, 32)


@pytest.mark.parametrize("wrong", [0, 129, 3.0])
def test_a_custom_schedule_that_gives_no_length_is_refused(wrong):
    with pytest.raises(ValueError, match=f"gave {wrong} for step 7.*from 1 to end=128"):
        SeqLenWarmup.custom(lambda step: wrong, end=128).at(7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": 0}, "start=0 is too small; try start=1"),
        ({"steps": 0}, "steps=0 is too small; try steps=1"),
        ({"steps": 10.5}, "steps=10.5 is not a whole number; try steps=10"),
        ({"end": True}, "end=True is not a whole number"),
        ({"start": 2048}, "start=2048 is above end=1024; try start=1024"),
        ({"kind": "cubic"}, "kind='cubic' is not known; try 'linear' or 'root'"),
        ({"cut_mode": "fold"}, "cut_mode='fold' is not known; try 'truncate' or 'reshape'"),
        ({"kind": "root", "degree": 0.0}, "degree=0.0 must be above 0; try degree=1.0"),
        ({"kind": "root", "degree": 50.0}, "degree=50.0 is at nearly full length"),
        ({"kind": "root", "degree": 0.01}, "degree=0.01 is at nearly the first length until the end; try degree=0.5"),
        ({"kind": "root", "degree": 10**400}, "is not a finite number"),
        ({"end": 10**20}, "end=100000000000000000000 is more than any run can count; try end=1"),
        ({"kind": "root", "degree": float("nan")}, "degree=nan is not a finite number"),
        ({"kind": "discrete"}, "kind='discrete' has no lengths; try lengths="),
        ({"kind": "two-stage", "lengths": (64, 1024)}, "kind='two-stage' has no other lengths"),
        ({"lengths": (64, 512)}, r"lengths=\(64, 512\) but end=1024; try end=512"),
        ({"lengths": (8, 1024)}, "but start=64; try start=8"),
        ({"lengths": (64, 64, 1024)}, r"must rise; try lengths=\(64, 1024\)"),
        ({"lengths": (64, 0.5, 1024)}, "holds 0.5; every entry is a whole number"),
        ({"until": (5,)}, "belongs to kind='discrete', got kind='linear'"),
        ({"kind": "discrete", "lengths": (64, 1024), "until": (5, 9)}, "2 lengths need 1 entries of until"),
        ({"kind": "discrete", "lengths": (64, 1024), "until": (5,)}, "steps=100 disagree; try steps=5"),
    ],
)
def test_wrong_fields_are_refused_with_one_that_would_work(fields, message):
    with pytest.raises(ValueError, match=message):
        SeqLenWarmup(**{"start": 64, "end": 1024, "steps": 100, **fields})


def test_steps_before_the_run_are_refused():
    with pytest.raises(ValueError, match="step=-1 is before the start of a run"):
        SeqLenWarmup(start=8, end=64, steps=10).at(-1)


def test_discrete_without_lengths_is_refused():
    with pytest.raises(ValueError, match=r"try lengths=\(64, 1024\), until=\(1000,\)"):
        SeqLenWarmup.discrete([], [])


# --- Cutting


def ids(rows: int = 3, length: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens and their targets, shifted before any cut."""
    text = torch.arange(rows * (length + 1)).view(rows, length + 1)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def full_batch(rows: int = 3, length: int = 12) -> dict[str, Any]:
    tokens, targets = ids(rows, length)
    return {
        "input_ids": tokens,
        "labels": targets,
        "position_ids": torch.arange(length).expand(rows, length),
        "loss_mask": torch.rand(rows, length, generator=seed(0)),
        "attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool).tril(),
        "token_type_ids": torch.zeros(rows, length, dtype=torch.long),
        "my_own": torch.zeros(rows, length, dtype=torch.bool),
        "pixel_values": torch.zeros(rows, 3, length, length),
        "classes": torch.arange(rows),
        "names": ["a", "b", "c"],
        "none": None,
    }


def test_eight_tokens_cut_to_three():
    text = torch.arange(9)[None]
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    short = cut(batch, 3)
    assert short["tokens"].tolist() == [[0, 1, 2]]
    assert short["targets"].tolist() == [[1, 2, 3]]
    # The same from the raw text: one id more, shifted after.
    assert cut(text, 3, extra=1).tolist() == [[0, 1, 2, 3]]


def test_every_part_of_a_batch_is_cut_along_its_time():
    batch = full_batch()
    short = cut(batch, 5)
    for name in ("input_ids", "labels", "position_ids", "loss_mask", "token_type_ids", "my_own"):
        assert_same(short[name], batch[name][:, :5])
    assert_same(short["attention_mask"], batch["attention_mask"][:, :, :5, :5])
    for name in ("pixel_values", "classes", "names", "none"):
        assert short[name] is batch[name], "has no time dimension"
    assert all(value.is_contiguous() for value in short.values() if isinstance(value, Tensor))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 12), (3, 5)),  # padding
        ((12, 12), (5, 5)),  # one for all
        ((3, 12, 12), (3, 5, 5)),
        ((1, 1, 12, 12), (1, 1, 5, 5)),
        ((3, 4, 12, 12), (3, 4, 5, 5)),
        ((3, 1, 1, 12), (3, 1, 1, 5)),  # padding, to be broadcast
        ((3, 1), (3, 1)),
    ],
)
def test_attention_masks_of_every_shape(shape, expected):
    mask = torch.rand(shape, generator=seed(1))
    short = cut({"input_ids": ids()[0], "attention_mask": mask}, 5)["attention_mask"]
    assert_same(short, mask[tuple(slice(size) for size in expected)])


@pytest.mark.parametrize("shape", [(12,), (1, 12), (3, 12), (3, 3, 12)])
def test_positions_of_every_shape(shape):
    positions = torch.arange(12).expand(shape)
    short = cut({"input_ids": ids()[0], "position_ids": positions}, 5)["position_ids"]
    assert_same(short, torch.arange(5).expand(*shape[:-1], 5))


def test_embeddings_in_place_of_tokens():
    batch = {"inputs_embeds": torch.rand(3, 12, 4, generator=seed(2)), "labels": ids()[1]}
    short = cut(batch, 5)
    assert_same(short["inputs_embeds"], batch["inputs_embeds"][:, :5])
    assert_same(short["labels"], batch["labels"][:, :5])


Pair = namedtuple("Pair", ["tokens", "targets"])


@pytest.mark.parametrize("kind", [tuple, list, lambda pair: Pair(*pair)])
def test_tuples_stay_what_they_are(kind):
    batch = kind(ids())
    short = cut(batch, 5)
    assert type(short) is type(batch)
    assert_same(short[0], batch[0][:, :5])
    assert_same(short[1], batch[1][:, :5])


def test_a_tuple_as_megatron_makes_it():
    tokens, targets = ids()
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    loss_mask, positions = torch.ones(3, 12), torch.arange(12).expand(3, 12)
    shapes = [tuple(part.shape) for part in cut((tokens, targets, loss_mask, mask, positions), 5)]
    assert shapes == [(3, 5), (3, 5), (3, 5), (1, 1, 5, 5), (3, 5)]


def test_an_image_as_large_as_the_text_is_long_stays_whole():
    images, (tokens, targets) = torch.zeros(3, 1, 12, 12), ids()
    short = cut((images, tokens, {"input_ids": targets, "pixel_values": images}), 5)
    assert short[0] is images
    assert short[1].shape == (3, 5)
    assert short[2]["pixel_values"] is images
    assert short[2]["input_ids"].shape == (3, 5)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 3, 12, 12),
        (torch.zeros(3, 3, 12, 12), torch.arange(3)),
        {"pixel_values": torch.zeros(3, 3, 12, 12), "labels": torch.arange(3)},
        torch.zeros(3, 12),  # features: no whole numbers
        ["a caption", "another"],
        {},
    ],
)
def test_batches_without_text_are_returned_unchanged(batch):
    assert cut(batch, 5) is batch


def test_a_batch_that_is_short_enough_is_returned_unchanged():
    batch = full_batch()
    assert cut(batch, 12) is batch
    assert cut(batch, 100) is batch
    # The first text decides: what stands beside it is not text of this length.
    pair = (ids()[0], torch.zeros(3, 40, dtype=torch.long))
    assert cut(pair, 12) is pair


def test_numpy_batches_are_cut_too():
    batch = {"input_ids": np.arange(24).reshape(2, 12), "attention_mask": np.ones((2, 1, 12, 12), dtype=bool)}
    short = cut(batch, 5)
    assert short["input_ids"].tolist() == batch["input_ids"][:, :5].tolist()
    assert short["attention_mask"].shape == (2, 1, 5, 5)
    assert not np.shares_memory(short["input_ids"], batch["input_ids"])
    pieces = cut(batch, 6, mode="reshape")
    assert pieces["input_ids"].tolist() == batch["input_ids"].reshape(4, 6).tolist()
    assert pieces["attention_mask"].shape == (4, 1, 6, 6)


def test_a_hugging_face_batch_stays_one_and_trains():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding(
        {"input_ids": ids()[0], "attention_mask": torch.ones(3, 12, dtype=torch.long), "labels": ids()[0]}
    )
    short = SeqLenWarmup(start=4, end=12, steps=10, multiple=4).cut(batch, 1)
    assert type(short) is type(batch)
    assert {name: tuple(value.shape) for name, value in short.items()} == dict.fromkeys(batch, (3, 4))
    assert batch["input_ids"].shape == (3, 12)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=12)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        # Causal, so the short batch gives the first logits of the long one.
        torch.testing.assert_close(model(**short).logits, model(**batch).logits[:, :4])


def test_ends_of_packed_sequences_without_positions_are_refused():
    batch = {"input_ids": ids()[0], "cu_seq_lens_q": torch.tensor([0, 12])}
    with pytest.raises(ValueError, match=r"cu_seq_lens_q .* needs position_ids of shape \(1, 12\), got none"):
        cut(batch, 5)
    with pytest.raises(ValueError, match=r"got those of shape \(12,\)"):
        cut(batch | {"position_ids": torch.arange(12)}, 5)


def test_targets_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"targets has shape \(3, 11\).*shift targets before the cut"):
        cut({"tokens": ids()[0], "targets": ids()[1][:, 1:]}, 5)


def test_what_is_no_batch_is_refused():
    with pytest.raises(ValueError, match="a batch is a dict, a tuple, a list or a tensor, got str"):
        cut("text", 5)
    with pytest.raises(ValueError, match="length=0 would leave an empty batch"):
        cut(ids(), 0)


# --- Cut up, keeping the tokens


def test_rows_cut_up_keep_their_order_and_targets():
    tokens, targets = ids(rows=2, length=12)
    short = cut({"tokens": tokens, "targets": targets}, 4, mode="reshape")
    assert_same(short["tokens"], tokens.reshape(6, 4))
    assert_same(short["targets"], targets.reshape(6, 4))


def test_a_mask_cut_up_is_its_diagonal():
    mask = torch.rand(2, 3, 13, 13, generator=seed(3))
    pieces = cut({"tokens": ids(2, 13)[0], "attention_mask": mask}, 4, mode="reshape")["attention_mask"]
    expected = torch.stack([mask[b, :, i : i + 4, i : i + 4] for b in range(2) for i in (0, 4, 8)])
    assert_same(pieces, expected)


def test_one_causal_mask_for_all_rows_stays_one_when_cut_up():
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    pieces = cut((ids()[0], mask), 4, mode="reshape")
    assert_same(pieces[1], mask[:, :, :4, :4])
    mask[..., 5, 4] = False
    with pytest.raises(ValueError, match=r"one for all rows, and differs from piece to piece.*each of the 3 rows"):
        cut((ids()[0], mask), 4, mode="reshape")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"pixel_values": torch.zeros(3, 3, 8, 8)},
            "each row is split into 3, but pixel_values .* try cut_mode='truncate'",
        ),
        ({"position_ids": torch.arange(12)}, "needs positions for each row of tokens"),
        ({"attention_mask": torch.ones(3, 12, 12)}, r"supports masks \[B, L\] or \[B, 1, L, L\]"),
    ],
)
def test_what_cannot_be_cut_up_is_refused(other, message):
    with pytest.raises(ValueError, match=message):
        cut({"tokens": ids()[0], **other}, 4, mode="reshape")


def test_text_cannot_be_cut_up_before_it_is_shifted():
    with pytest.raises(ValueError, match="shift first"):
        cut(ids(), 4, mode="reshape", extra=1)


@FAST
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 50), st.sampled_from(["truncate", "reshape"]))
def test_any_cut_keeps_targets_aligned_counts_its_tokens_and_leaves_the_batch_alone(rows, length, to, mode):
    tokens, targets = ids(rows, length)
    batch = {"tokens": tokens, "targets": targets, "loss_mask": torch.ones(rows, length)}
    before = copy.deepcopy(batch)
    warmup = replace(SeqLenWarmup(start=to, end=to, steps=1), cut_mode=mode)
    short = warmup.cut(batch, 1)
    # Every id is the number of its place, so a target is its token plus one.
    assert_same(short["targets"], short["tokens"] + 1)
    assert short["tokens"].shape == short["loss_mask"].shape
    assert short["tokens"].shape[1] == min(to, length)
    kept = short["tokens"].flatten().tolist()
    assert len(set(kept)) == len(kept) == rows * (length - warmup.dropped(length, 1))
    assert set(kept) <= set(tokens.flatten().tolist())
    if mode == "reshape" and length % min(to, length) == 0:
        assert kept == tokens.flatten().tolist()
    if short is not batch:
        short["tokens"].zero_()
        short["new"] = None
    assert batch.keys() == before.keys()
    for name, value in batch.items():
        assert_same(value, before[name])


# --- DeepSpeed's JSON


def block(**changes: Any) -> dict[str, Any]:
    linear = {"total_curriculum_step": 45_000, "difficulty_step": 8}
    return {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 64,
        "max_difficulty": 1024,
        "schedule_type": "fixed_linear",
        "schedule_config": linear,
        **changes,
    }


def test_deepspeeds_block_is_read_from_a_dict_text_or_file(tmp_path):
    expected = SeqLenWarmup(start=64, end=1024, steps=45_000, multiple=8, arithmetic="deepspeed")
    config = {"train_batch_size": 4096, "curriculum_learning": block()}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    for source in (block(), config, json.dumps(config), path, str(path)):
        assert read_deepspeed(source) == expected


def test_deepspeeds_root_and_discrete_are_read():
    root = {"total_curriculum_step": 1000, "difficulty_step": 8, "root_degree": 2}
    warmup = read_deepspeed(block(schedule_type="fixed_root", schedule_config=root, min_difficulty=8))
    assert lengths(warmup, 1, 100, 500) == [40, 328, 720]
    stages = {"difficulty": [1, 2, 3, 4, 5], "max_step": [2, 4, 6, 8]}
    changes = {"schedule_type": "fixed_discrete", "schedule_config": stages, "min_difficulty": 1, "max_difficulty": 5}
    assert lengths(read_deepspeed(block(**changes)), 1, 2, 3, 8, 9) == [1, 1, 2, 4, 5]


def deepspeeds(step: int, block: dict[str, Any]) -> int:
    """DeepSpeed's CurriculumScheduler, transcribed: fixed_linear is fixed_root with degree 1."""
    settings, least, most = block["schedule_config"], block["min_difficulty"], block["max_difficulty"]
    root_degree = settings.get("root_degree", 1)
    difficulty = (float(step) / settings["total_curriculum_step"]) ** (1.0 / root_degree)
    difficulty = math.floor(difficulty * (most - least) + least)
    difficulty -= difficulty % settings["difficulty_step"]
    return min(difficulty, most)


def paced(first: int, last: int, total: int, multiple: int, degree: int | None) -> dict[str, Any]:
    settings = {"total_curriculum_step": total, "difficulty_step": multiple}
    kind = "fixed_linear" if degree is None else "fixed_root"
    settings |= {} if degree is None else {"root_degree": degree}
    return block(min_difficulty=first, max_difficulty=last, schedule_type=kind, schedule_config=settings)


@pytest.mark.parametrize("degree", [None, 1, 2, 3, 4, 5])  # None: fixed_linear
@pytest.mark.parametrize("total", [1, 7, 225, 1000, 4913, 11_500])
def test_every_step_has_deepspeeds_length(degree, total):
    for first, last, multiple in ((8, 128, 8), (64, 1024, 8), (16, 2048, 16), (1, 100, 1), (8, 100, 8), (64, 64, 64)):
        config = paced(first, last, total, multiple, degree)
        warmup, steps = read_deepspeed(config), range(total + total // 4 + 20)
        assert lengths(warmup, *steps) == [deepspeeds(step, config) for step in steps], (first, last, multiple)


def test_deepspeeds_floats_are_kept_where_they_fall_short_and_only_for_it():
    # √(8450/45000) = 13/30 and √(33800/45000) = 26/30, so the exact lengths are 480 and 896, both multiples of 8.
    config = paced(64, 1024, 45_000, 8, 2)
    warmup = read_deepspeed(config)
    assert lengths(warmup, 8_450, 33_800) == [472, 888]
    exact = replace(warmup, arithmetic="exact")
    assert lengths(exact, 8_450, 33_800) == [480, 896]
    steps = range(46_000)
    assert lengths(warmup, *steps) == [deepspeeds(step, config) for step in steps]
    assert [step for step in steps if warmup.at(step) != exact.at(step)] == [8_450, 33_800]
    # Linear: 1 + 100 · 29/50 is 59, and in floats just below.
    linear = read_deepspeed(paced(1, 101, 50, 1, None))
    assert (linear.at(29), replace(linear, arithmetic="exact").at(29)) == (58, 59)


def test_deepspeeds_arithmetic_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="is for linear and root, got kind='mixed'; try 'exact'"):
        SeqLenWarmup(start=8, end=64, steps=9, kind="mixed", arithmetic="deepspeed")
    with pytest.raises(ValueError, match="arithmetic='float' is not known; try 'exact' or 'deepspeed'"):
        SeqLenWarmup(start=8, end=64, steps=9, arithmetic="float")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (block(enabled=False), "enabled=False, so DeepSpeed used no warmup"),
        (block(curriculum_type="vocabulary_rarity"), "only 'seqlen' is read"),
        (block(schedule_type="custom"), r"try SeqLenWarmup.custom\(...\)"),
        (block(schedule_type="cubic"), "schedule_type='cubic' is not known; try 'fixed_linear'"),
        (block(difficulty_type="value"), "has difficulty_type, which is not supported"),
        (block(schedule_config={"difficulty_step": 8}), "lacks total_curriculum_step"),
        (block(schedule_config=[8]), r"schedule_config of fixed_linear is \[8\], which is not a JSON object"),
        (block(min_difficulty="64"), "start='64' is not a whole number"),
        (block(min_difficulty=8, schedule_config={"total_curriculum_step": 9, "difficulty_step": 16}), "try start=16"),
        ({k: v for k, v in block().items() if k != "max_difficulty"}, "lacks max_difficulty"),
        ({"curriculum_learning": True}, "is not a JSON object"),
        ({"data_efficiency": {}}, "chooses samples as well as lengths"),
        ({"zero_optimization": {}}, r"no curriculum_learning block among \['zero_optimization'\]"),
        ('{"min_difficulty": 45_000}', "numbers take no underscores"),
        ("no-such-file.json", "cannot read no-such-file.json"),
        (
            block(schedule_type="fixed_discrete", schedule_config={"difficulty": [64, 512], "max_step": [9]}),
            "try min_difficulty=64 and max_difficulty=512",
        ),
    ],
)
def test_deepspeed_settings_that_are_not_supported_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        read_deepspeed(config)


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_each_of_the_packed_sequences_of_one_row_is_truncated(make):
    positions = make([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2]])
    tokens = make([[10, 11, 12, 13, 14, 20, 21, 30, 31, 32]])
    batch = {"input_ids": tokens, "labels": -tokens, "position_ids": positions, "other": 5}
    part = cut(batch, 2)
    assert part["input_ids"].tolist() == [[10, 11, 20, 21, 30, 31]]
    assert part["labels"].tolist() == [[-10, -11, -20, -21, -30, -31]]
    assert part["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1]]
    assert part["other"] == 5
    assert cut(batch, 10) is batch
    plain = batch | {"position_ids": make([list(range(10))])}
    assert cut(plain, 3)["input_ids"].tolist() == [[10, 11, 12]]
    with pytest.raises(ValueError, match="truncate"):
        cut(batch, 2, mode="reshape")
    with pytest.raises(ValueError, match="attention_mask"):
        cut(batch | {"attention_mask": make([[[[1] * 10] * 10]])}, 2)


@pytest.mark.parametrize("make", [torch.tensor, np.array])
@pytest.mark.parametrize("lengths", [[5, 2, 3], [10]])
def test_the_ends_of_packed_sequences_move_with_the_cut(make, lengths):
    tokens, ends = make([list(range(10, 20))]), make(np.cumsum([0, *lengths]).tolist())
    batch = {
        "input_ids": tokens,
        "position_ids": make([[i for n in lengths for i in range(n)]]),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "seq_idx": make([[k for k, n in enumerate(lengths) for _ in range(n)]]),
    }
    part = cut(batch, 3)
    short = [min(n, 3) for n in lengths]
    assert part["cu_seq_lens_q"].tolist() == part["cu_seq_lens_k"].tolist() == np.cumsum([0, *short]).tolist()
    assert part["max_length_q"] == 3
    assert part["seq_idx"].tolist() == [[k for k, n in enumerate(short) for _ in range(n)]]
    assert part["input_ids"].shape == (1, sum(short))
    assert ends.tolist() == np.cumsum([0, *lengths]).tolist()
