"""Learning rate, batch size and the plan of a run: the published numbers, and what holds at every step."""

import functools
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.schedule import (
    BatchWarmup,
    LearningRate,
    Plan,
    SeqLenWarmup,
    check_one_warmup,
    draw,
    plan,
)
from trimtab.schedule.cut import kept
from trimtab.schedule.draw import _bars

FAST = settings(max_examples=60, deadline=None)

# GPT-2 1.5B with a batch of 4096, as the paper's authors ran it.
PAPER = LearningRate(warmup=3000, decay=157_286_400_000, decay_unit="tokens", floor=1e-5)
LENGTHS = SeqLenWarmup(start=64, end=1024, steps=45_000)
BATCH, PEAK = 4096, 6e-4


# --- The published numbers


@pytest.mark.parametrize(
    ("steps", "expected"), [(10_000, 5.9806e-4), (20_000, 5.7342e-4), (37_500, 3.5549e-4), (45_000, 1.8769e-4)]
)
def test_the_papers_learning_rate_after_so_many_steps(steps, expected):
    tokens = LENGTHS.count_tokens(BATCH, steps)
    assert PAPER.at(PEAK, steps + 1, tokens, warmup_tokens=1_130_758_144) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(("step", "expected"), [(10_000, 5.42e-4), (20_000, 3.12e-4), (37_500, 1e-5)])
def test_by_steps_the_paper_would_have_been_at_its_floor_too_early(step, expected):
    by_steps = LearningRate(warmup=3000, decay=37_500, floor=1e-5)
    assert by_steps.at(PEAK, step, tokens=0) == pytest.approx(expected, rel=1e-3)


def test_the_small_scale_papers_cosine_ends_at_an_absolute_floor():
    rate = LearningRate(warmup=5000, decay=100_000, floor=1e-5)
    for peak in (1e-4, 1e-2, 1.0):
        assert rate.at(peak, 5000, 0) == peak
        assert rate.at(peak, 2500, 0) == peak / 2
        assert rate.at(peak, 52_500, 0) == pytest.approx((peak + 1e-5) / 2)
        assert rate.at(peak, 100_000, 0) == rate.at(peak, 10**9, 0) == 1e-5


def test_gpt3s_batch_warmup():
    # 4 billion tokens of 2048 each; the batch rises from 32 to 256.
    warmup = BatchWarmup(start=32, increment=32, samples=1_953_125, end=256)
    part = 1_953_125 / 7
    assert [warmup.at(math.ceil(part * i)) for i in range(8)] == [32, 64, 96, 128, 160, 192, 224, 256]
    assert [warmup.at(math.ceil(part * i) - 1) for i in range(1, 8)] == [32, 64, 96, 128, 160, 192, 224]
    assert warmup.at(10**9) == 256


# --- Each kind


def test_linear_is_a_straight_line():
    rate = LearningRate(kind="linear", warmup=10, decay=110, floor=0.1)
    assert [rate.at(1.1, step, 0) for step in (10, 60, 110)] == pytest.approx([1.1, 0.6, 0.1])


def test_constant_stays_at_its_peak():
    rate = LearningRate(kind="constant", warmup=4)
    assert [rate.at(2.0, step, 0) for step in (1, 2, 3, 4, 5, 10**9)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_inverse_square_root_halves_when_time_is_four_times_the_warmup():
    rate = LearningRate(kind="inverse-sqrt", warmup=100, floor=0.1)
    assert [rate.at(1.0, step, 0) for step in (50, 100, 400, 900)] == pytest.approx([0.5, 1.0, 0.5, 1 / 3])
    assert rate.at(1.0, 10**6, 0) == 0.1


def test_a_warmup_by_tokens_starts_from_nothing():
    rate = LearningRate(warmup=1000, warmup_unit="tokens", decay=5000, decay_unit="tokens")
    assert [rate.at(1.0, 1, tokens) for tokens in (0, 500, 1000, 3000, 5000)] == pytest.approx([0, 0.5, 1, 0.5, 0])


def test_a_warmup_by_tokens_and_a_fall_by_steps():
    rate = LearningRate(kind="linear", warmup=1000, warmup_unit="tokens", decay=110)
    assert rate.at(1.0, 5, 900) == 0.9
    assert rate.at(1.0, 60, 2000, warmup_steps=10) == pytest.approx(0.5)


@pytest.mark.parametrize(("warmup_unit", "decay_unit"), [("steps", "tokens"), ("tokens", "steps")])
def test_different_units_need_the_end_of_the_warmup(warmup_unit, decay_unit):
    rate = LearningRate(warmup=10, warmup_unit=warmup_unit, decay=10_000, decay_unit=decay_unit)
    assert 0 < rate.at(1.0, 5, 5) < 1, "not before it has"
    with pytest.raises(ValueError, match=f"need warmup_{decay_unit}, the {decay_unit} when the warm-up ended"):
        rate.at(1.0, 500, 500)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "inverse-sqrt"])
def test_a_floor_above_the_peak_leaves_the_peak(kind):
    rate = LearningRate(kind=kind, warmup=10, decay=100, floor=1e-2)
    assert [rate.at(1e-3, step, 0) for step in (10, 50, 100)] == [1e-3] * 3


def test_a_warmup_that_lasts_past_the_end_falls_to_the_floor():
    assert PAPER.at(PEAK, 3001, 2 * 10**11, warmup_tokens=2 * 10**11) == 1e-5


# --- The end of the run


def test_an_open_end_is_filled_in_by_the_run():
    steps, tokens = LearningRate(warmup=5), LearningRate(warmup=5, decay_unit="tokens")
    assert steps.ending(steps=100).decay == 100
    assert tokens.ending(steps=100, tokens=6400).decay == 6400
    assert replace(steps, decay=50).ending(steps=100).decay == 50, "what was said is kept"
    constant = LearningRate(kind="constant")
    assert constant.ending() == constant


def test_an_open_end_is_never_guessed():
    with pytest.raises(ValueError, match=r"try ending\(tokens=...\)"):
        LearningRate(decay_unit="tokens").ending(steps=100)
    with pytest.raises(ValueError, match=r"try ending\(steps=...\).at"):
        LearningRate().at(1.0, 1, 0)


# --- What holds for all


@st.composite
def rates(draw: st.DrawFn) -> LearningRate:
    warmup = draw(st.integers(1, 200))
    warmup_unit, decay_unit = draw(st.sampled_from(["steps", "tokens"])), draw(st.sampled_from(["steps", "tokens"]))
    per_step = 100
    return LearningRate(
        kind=draw(st.sampled_from(["cosine", "linear", "constant", "inverse-sqrt"])),
        warmup=warmup * (per_step if warmup_unit == "tokens" else 1),
        warmup_unit=warmup_unit,  # type: ignore[arg-type]
        decay=draw(st.integers(400, 1000)) * (per_step if decay_unit == "tokens" else 1),
        decay_unit=decay_unit,  # type: ignore[arg-type]
        floor=draw(st.sampled_from([0.0, 1e-5, 0.3])),
    )


class Clock:
    """What a loop keeps, and saves. Rows of 100 tokens, cut by a warm-up of length."""

    lengths = SeqLenWarmup(start=20, end=100, steps=150, multiple=4)

    def __init__(self, rate: LearningRate, **state: Any) -> None:
        self.rate = rate
        self.state = {"step": 0, "tokens": 0, "warmup_tokens": None, "warmup_steps": None, **state}

    def take(self) -> tuple[int, int, float]:
        """One step: the tokens before it, its length and its learning rate."""
        state, step = self.state, self.state["step"] + 1
        before, length = state["tokens"], self.lengths.at(step)
        lr = self.rate.at(1.0, step, before, state["warmup_tokens"], state["warmup_steps"])
        state.update(step=step, tokens=before + length)
        if state["warmup_tokens"] is None and self.rate.warmed(step, state["tokens"]):
            state.update(warmup_tokens=state["tokens"], warmup_steps=step)
        return before, length, lr


@FAST
@given(rates(), st.integers(1, 1100))
def test_a_resumed_run_has_the_same_learning_rates(rate, killed_after):
    whole = Clock(rate)
    expected = [whole.take() for _ in range(1200)]
    first = Clock(rate)
    got = [first.take() for _ in range(killed_after)]
    second = Clock(LearningRate(**json.loads(json.dumps(asdict(rate)))), **json.loads(json.dumps(first.state)))
    got += [second.take() for _ in range(1200 - killed_after)]
    assert got == expected


@FAST
@given(rates())
def test_the_rate_has_no_jumps_and_stays_between_floor_and_peak(rate):
    clock = Clock(rate)
    taken = [clock.take()[2] for _ in range(1200)]
    assert all(0 <= lr <= 1 for lr in taken)
    top = taken.index(max(taken))
    assert all(a <= b for a, b in pairwise(taken[: top + 1])), "rises to its peak"
    assert all(a >= b for a, b in pairwise(taken[top:])), "and falls from there"
    assert all(lr >= rate.floor for lr in taken[top:])
    # The steepest pieces: a warm-up of one step rises by all at once; the shortest fall takes over 100 steps and is
    # π/2 times as steep in its middle; 1 / √t falls by 1 - 1/√2 after a warm-up of one step.
    warm = rate.warmup if rate.warmup_unit == "steps" else rate.warmup / 100
    assert all(b - a <= 1 / warm + 1e-9 for a, b in pairwise(taken))
    steepest = math.pi / 2 / 100 if rate.ends else 1 - 0.5**0.5 + 1e-9
    assert all(a - b <= steepest for a, b in pairwise(taken))


@FAST
@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 30), st.integers(1, 10_000), st.integers(0, 20_000))
def test_batches_rise_by_whole_increments_to_their_end(start, increment, increments, samples, consumed):
    warmup = BatchWarmup(start=start, increment=increment, samples=samples, end=start + increment * increments)
    batch = warmup.at(consumed)
    assert start <= batch <= warmup.end
    assert (batch - start) % increment == 0
    assert batch <= warmup.at(consumed + 1)
    assert warmup.at(0) == start
    assert warmup.at(samples) == warmup.end


def test_the_table_of_batches_is_what_a_loop_would_take():
    warmup = BatchWarmup(start=2, increment=2, samples=100, end=8)
    samples, rows = 0, []
    for step in range(1, 61):
        rows.append((step, warmup.at(samples)))
        samples += warmup.at(samples)
    changes = [row for before, row in pairwise([(0, 0), *rows]) if row[1] != before[1]]
    assert warmup.table(60) == changes
    assert [batch for _, batch in changes] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LearningRate(kind="cosin"), "kind='cosin' is not known; try 'cosine' or 'linear'"),
        (lambda: LearningRate(warmup=-1), "warmup=-1 is too small; try warmup=0"),
        (lambda: LearningRate(warmup=1.5), "warmup=1.5 is not a whole number; try warmup=2"),
        (lambda: LearningRate(warmup="many"), "warmup='many' is not a whole number; try warmup=0"),
        (lambda: LearningRate(decay_unit="seconds"), "decay_unit='seconds' is not known; try 'steps' or 'tokens'"),
        (lambda: LearningRate(warmup=10**20), "is more than any run can count; try warmup=0"),
        (lambda: LearningRate(warmup=1e30), r"warmup=1e\+30 is not a whole number; try warmup=9007199254740992"),
        (lambda: LearningRate(floor=10**400), "is not a finite number"),
        (lambda: LearningRate(floor=-1e-5), "floor=-1e-05 must be at least 0; try floor=0.0"),
        (lambda: LearningRate(floor=math.nan), "floor=nan is not a finite number"),
        (lambda: LearningRate(warmup=100, decay=100), "ends before warmup=100; try decay=1000"),
        (lambda: LearningRate(kind="inverse-sqrt"), "got warmup=0; try warmup=1000"),
        (lambda: LearningRate(decay=9).at(1.0, -1, 0), "step=-1 is before the start of a run"),
        (lambda: LearningRate(decay=9).at(1.0, 1, -5), "tokens=-5 is before the start of a run"),
        (lambda: BatchWarmup(start=16, increment=7, samples=9, end=32), "and then past end=32; try end=30"),
        (lambda: BatchWarmup(start=64, increment=7, samples=9, end=32), "start=64 is above end=32; try start=32"),
        (lambda: BatchWarmup(start=1, increment=1, samples=0, end=3), "samples=0 is too small; try samples=1"),
        (lambda: BatchWarmup(start=1, increment=1, samples=9, end=3).at(-1), "samples=-1 is before"),
    ],
)
def test_wrong_values_are_refused_with_one_that_would_work(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_two_warmups_at_once_are_refused_unless_forced():
    batch = BatchWarmup(start=16, increment=16, samples=1000, end=64)
    with pytest.raises(ValueError, match="both reduce the tokens per step"):
        check_one_warmup(LENGTHS, batch)
    with pytest.raises(ValueError, match="both reduce the tokens per step"):
        check_one_warmup(SeqLenWarmup.custom(lambda step: 8, end=64), batch)
    check_one_warmup(LENGTHS, batch, force=True)
    for seqlen, other in ((None, batch), (LENGTHS, None), (LENGTHS, 64), (LENGTHS, replace(batch, start=64))):
        check_one_warmup(seqlen, other)
    check_one_warmup(replace(LENGTHS, start=1024), batch)


# --- The plan


@functools.cache
def paper_plan(**changes: Any) -> Plan:
    given_ = {"rate": PAPER, "peak": PEAK, "batch": BATCH, "context": 1024, "tokens": 157_286_400_000}
    return plan(**{**given_, "seqlen": LENGTHS, **changes})


def test_the_papers_run_is_simulated():
    future = paper_plan(points=10)
    assert future.steps == 58_769
    assert future.samples == 58_769 * BATCH
    assert future.tokens == LENGTHS.count_tokens(BATCH, 58_769)
    assert future.warmup_tokens == 1_130_758_144
    assert round(future.cut_off, 2) == 0.36
    assert len(future.moments) <= 11
    assert (future.moments[0].step, future.moments[-1].step) == (1, 58_769)
    for moment in future.moments:
        assert moment.length == LENGTHS.at(moment.step)
        assert moment.samples == (moment.step - 1) * BATCH
        if moment.step > 1:
            assert moment.tokens == LENGTHS.count_tokens(BATCH, moment.step - 1)
        assert moment.lr == PAPER.at(PEAK, moment.step, moment.tokens, 1_130_758_144)


def test_a_plan_fills_in_the_end_of_the_rate():
    rate = LearningRate(kind="linear", decay_unit="tokens")
    future = plan(rate=rate, peak=1.0, batch=2, context=10, steps=5)
    assert future.rate.decay == future.tokens == 100
    assert [moment.lr for moment in future.moments] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_a_plan_notes_when_a_warmup_by_tokens_ended():
    rate = LearningRate(kind="linear", warmup=60, warmup_unit="tokens")
    future = plan(rate=rate, peak=1.0, batch=2, context=10, steps=7)
    assert future.warmup_tokens == 60
    # Steps 1 to 3 consume the 60 tokens; the fall goes from step 3 to step 7.
    assert [moment.lr for moment in future.moments] == pytest.approx([0, 1 / 3, 2 / 3, 1, 1 / 2, 1 / 4, 0])


def test_a_plan_with_a_batch_warmup():
    batch = BatchWarmup(start=1, increment=1, samples=6, end=3)
    future = plan(rate=LearningRate(), peak=1.0, batch=batch, context=10, steps=6)
    assert [moment.batch for moment in future.moments] == [1, 1, 1, 2, 2, 3]
    assert future.samples == 10
    assert future.tokens == 100
    with pytest.raises(ValueError, match="both reduce the tokens per step"):
        paper_plan(batch=batch)


def test_a_plan_with_rows_cut_up_cuts_nothing_off_that_divides():
    seqlen = SeqLenWarmup(start=16, end=64, steps=30, lengths=(16, 32, 64), cut_mode="reshape")
    future = plan(rate=LearningRate(), peak=1.0, batch=4, context=64, steps=50, seqlen=seqlen)
    assert future.cut_off == 0
    assert {moment.length for moment in future.moments} == {16, 32, 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "the run has no end"),
        ({"steps": 0}, "steps=0 is too small"),
        ({"points": 0}, "points=0"),
        ({"steps": 10**20}, "steps=100000000000000000000 is more than any run can count"),
        ({"batch": 2**53}, r"1 steps consume \d+ tokens, more than any run can count; try tokens=1000000000000"),
    ],
)
def test_an_invalid_plan_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        paper_plan(**changes)


def walk_every_step(batch: BatchWarmup, context: int, steps: int, tokens: int, seqlen: SeqLenWarmup) -> list[Any]:
    """The counters of every step, as the training loop counts them."""
    rows, samples, consumed = [], 0, 0
    while len(rows) < steps and consumed < tokens:
        size, length = batch.at(samples), min(seqlen.at(len(rows) + 1), context)
        rows.append((len(rows) + 1, samples, consumed, length, size))
        samples += size
        consumed += size * kept(context, length, seqlen.cut_mode)
    return [*rows, (len(rows), samples, consumed)]


@st.composite
def warmups(draw: st.DrawFn) -> SeqLenWarmup:
    kind = draw(st.sampled_from(["linear", "root", "two-stage", "mixed", "discrete"]))
    own: dict[str, Any] = {"steps": draw(st.integers(1, 60)), "multiple": draw(st.sampled_from([1, 4, 8]))}
    own |= {"degree": draw(st.floats(0.3, 4))}
    if kind == "discrete":
        until = draw(st.integers(1, 9)), draw(st.integers(10, 40))
        own = {"lengths": (8, 16, 30), "until": until, "steps": until[-1]}
    return SeqLenWarmup(start=8, end=30, kind=kind, cut_mode=draw(st.sampled_from(["truncate", "reshape"])), **own)


@FAST
@given(warmups(), st.integers(1, 9), st.integers(1, 300), st.integers(1, 90), st.integers(1, 20_000))
def test_a_plan_that_skips_over_equal_steps_counts_as_one_that_does_not(seqlen, size, samples, steps, tokens):
    batch = BatchWarmup(start=1, increment=1, samples=samples, end=size)
    future = plan(
        rate=LearningRate(), peak=1.0, batch=batch, context=30, steps=steps, tokens=tokens, seqlen=seqlen, force=True
    )
    expected = walk_every_step(batch, 30, steps, tokens, seqlen)
    assert [*(moment[:-1] for moment in future.moments), (future.steps, future.samples, future.tokens)] == expected
    assert seqlen.count_steps(3, tokens) == next(n for n in range(20_001) if seqlen_tokens(seqlen, 3, n) >= tokens)


def seqlen_tokens(seqlen: SeqLenWarmup, batch: int, steps: int) -> int:
    return seqlen.count_tokens(batch, steps) if steps else 0


@pytest.mark.parametrize("kind", ["linear", "root", "two-stage"])
def test_a_long_run_is_simulated_at_once(kind):
    lengths = SeqLenWarmup(start=64, end=1024, steps=10**11, kind=kind)
    growing = BatchWarmup(start=1, increment=1, samples=10**10, end=8)
    future = plan(rate=LearningRate(), peak=1.0, batch=growing, context=1024, steps=10**12, seqlen=lengths, force=True)
    assert future.steps == 10**12
    assert [future.moments[i].length for i in (0, -1)] == [64, 1024]
    assert len(growing.table(10**12)) == 8
    assert lengths.table(10**12)[-1][1] == 1024


def test_a_plan_that_changes_too_often_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["trimtab.schedule.plan"], "MAX_CHANGES", 1000)
    lengths = SeqLenWarmup(start=64, end=1024, steps=10**9, kind="mixed")
    with pytest.raises(ValueError, match="change more than 1,000 times; try a larger multiple of the lengths"):
        plan(rate=LearningRate(), peak=1.0, batch=1, context=1024, steps=10**9, seqlen=lengths)


def test_the_table_of_a_plan_has_its_ends_and_sums():
    lines = draw(paper_plan(), "table").splitlines()
    assert len(lines) == 18
    assert " ".join(lines[0].split()) == "step samples before tokens before length batch learning rate"
    assert lines[1].split() == ["1", "0", "0", "64", "4,096", "2.0000e-07"]
    assert lines[-2].split()[0] == "58,769"
    assert lines[-1].startswith("58,769 steps, 240,717,824 samples, 157,288,103,936 tokens; 36%")


@pytest.mark.parametrize("over", ["steps", "tokens"])
def test_the_picture_in_text_rises_with_the_lengths(over):
    lines = draw(paper_plan(), over=over).splitlines()
    panel = lines[lines.index("length: 64 at first, 1,024 at most, 1,024 at last") + 1 :][:4]
    assert {len(line) for line in panel} == {68}
    heights = [sum(" ▁▂▃▄▅▆▇█".index(row[column]) for row in panel) for column in range(3, 67)]
    assert all(a <= b for a, b in pairwise(heights))
    assert heights[0] == 2  # 64 of 1024, in 32 eighths
    assert heights[-1] == 32
    assert "batch: 4,096 throughout" in lines
    assert any(line.endswith(over) for line in lines)


def test_bars_are_as_high_as_their_parts():
    assert _bars([0.0, 0.25, 0.5, 0.78125, 1.0], height=4) == ["   ▁█", "   ██", "  ███", " ████"]


@pytest.mark.parametrize("over", ["steps", "tokens"])
def test_the_svg_draws_every_moment_inside_its_frame(over):
    future = paper_plan(points=100)
    root = ElementTree.fromstring(draw(future, "svg", over=over))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    lines = root.findall("{*}polyline")
    assert len(lines) == 3
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert len(points) == len(future.moments)
        assert all(0 < x < width and 0 < y < height for x, y in points)
        assert all(a[0] <= b[0] for a, b in pairwise(points))


def test_unknown_pictures_are_refused():
    with pytest.raises(ValueError, match="form='png' is not known; try 'table'"):
        draw(paper_plan(), "png")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="try 'steps' or 'tokens'"):
        draw(paper_plan(), over="seconds")  # type: ignore[arg-type]


# --- The room


def test_schedules_are_typed_on_a_command_line():
    words = "--start 64 --end 1024 --steps 9 --kind discrete --lengths 64 256 1024 --until 4 9"
    assert tyro.cli(SeqLenWarmup, args=words.split()) == SeqLenWarmup.discrete((64, 256, 1024), (4, 9))
    words = "--kind linear --warmup 5 --decay-unit tokens --floor 1e-5"
    rate = tyro.cli(LearningRate, args=words.split())
    assert rate == LearningRate(kind="linear", warmup=5, decay_unit="tokens", floor=1e-5)


def test_schedules_bring_no_torch():
    # Past trimtab/__init__.py, which brings the whole house.
    code = (
        "import sys, types; house = types.ModuleType('trimtab'); house.__path__ = ['trimtab']; "
        "sys.modules['trimtab'] = house; import trimtab.schedule; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
