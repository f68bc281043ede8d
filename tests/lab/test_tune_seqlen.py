"""The cheap tuning of a sequence length warmup: what the search finds, what it costs, and what it refuses."""

import io
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.train.runs import quiet, tiny, tiny_clip
from trimtab.lab import tune_seqlen as module
from trimtab.lab.tune_search import Found, find_fluctuation, find_longest, find_warmup, max_cost, max_trials
from trimtab.lab.tune_seqlen import tune_seqlen
from trimtab.recipes import gpt_tiny
from trimtab.runs import End, EventKind, Result, RunError, RunLog
from trimtab.train import GPTRun, RunConfig
from trimtab.train.config import ConfigError, to_json

# --- The search


@given(count=st.integers(0, 300), steady=st.integers(0, 300), unit=st.integers(1, 50))
def test_halving_finds_the_planted_longest_duration_within_its_number_of_questions(count, steady, unit):
    durations, asked = range(unit, unit * count + 1, unit), list[int]()
    largest = unit * min(steady, count)

    def ask(steps: int) -> bool:
        asked.append(steps)
        return steps <= largest

    assert find_longest(durations, ask) == (largest or None)
    assert len(asked) <= math.ceil(math.log2(count + 1))
    assert len(asked) == len(set(asked))


@given(
    starts=st.lists(st.integers(1, 64), min_size=1, unique=True).map(sorted),
    count=st.integers(1, 200),
    first=st.integers(1, 200),
    good=st.integers(0, 70),
    longest=st.integers(0, 220),
)
def test_the_search_finds_the_planted_start_and_duration_and_keeps_its_bound(starts, count, first, good, longest):
    """A start from `good` on begins well; durations up to `longest` are steady."""
    durations, first, asked = range(1, count + 1), min(first, count), list[tuple[int, int]]()

    def ask(start: int, steps: int) -> tuple[bool, bool]:
        asked.append((start, steps))
        return start >= good, start >= good and steps <= longest

    found = find_warmup(starts, durations, first, ask)
    start = next((s for s in starts if s >= good), None)
    assert found == Found(start, min(longest, count) or None if start is not None else None)
    assert len(asked) <= max_trials(starts, durations, first)
    assert len(asked) == len(set(asked))


@given(costs=st.lists(st.integers(0, 100), max_size=60))
def test_what_halving_costs_at_most_is_what_some_answers_make_it_cost(costs):
    spent = []
    for planted in range(len(costs) + 1):
        asked: list[int] = []
        find_longest(range(len(costs)), lambda i, asked=asked, planted=planted: asked.append(i) or i < planted)
        spent.append(sum(costs[i] for i in asked))
    assert max_cost(range(len(costs)), costs.__getitem__) == max(spent)


def test_a_fluctuation_is_a_perplexity_above_the_limit_times_the_best_before_it():
    up = math.log(1.3)
    assert find_fluctuation([(0, 5.0), (1, 4.0), (2, 4.0 + up - 1e-9), (3, 3.0)], 1.3)[0] is None
    assert find_fluctuation([(0, 5.0), (1, 4.0), (2, 4.0 + up + 1e-9), (3, 3.0)], 1.3)[0] == 2
    assert find_fluctuation([(0, 5.0), (1, math.inf), (2, 4.9)], 1.3) == (1, math.inf)
    at, worst = find_fluctuation([(0, 5.0), (4, 3.0), (8, 3.1), (12, 3.5), (16, 4.0)], 1.3)
    assert at == 12
    assert worst == pytest.approx(math.e)
    assert find_fluctuation([], 1.3) == (None, 1.0)


# --- With runs that are planted


def plant(monkeypatch: pytest.MonkeyPatch, steady: Any, why: End = End.DONE) -> list[tuple[int, int]]:
    """Runs that are written instead of trained; steady(start, steps) is None, or the step that fluctuates."""
    trained: list[tuple[int, int]] = []

    def write(folder: Path, config: RunConfig) -> bool:
        seqlen = config.schedule.seqlen
        trained.append((seqlen.start, seqlen.steps))
        log = RunLog(folder)
        log.create(to_json(config), sha256="a", params=1)
        bad = steady(seqlen.start, seqlen.steps)
        for step in range(0, config.steps + 1, config.eval_every):
            log.event(EventKind.EVALUATED, step=step, loss=5 - step / config.steps + (step == bad))
        log.finish(Result(why=why, step=config.steps, tokens=100, seconds=2.0))
        log.close()
        return True

    monkeypatch.setattr(module, "run_cell", write)
    return trained


def small(folder: Path, **changes: Any) -> GPTRun:
    """64 tokens: starts 8, 16 and 32. A warm-up of 4 steps, 40 steps, so ten durations."""
    run = gpt_tiny()
    lr = replace(run.schedule.lr, warmup=4)
    seqlen = replace(run.schedule.seqlen, start=None, steps=1)
    model = replace(run.model, context=64)
    run = replace(run, model=model, schedule=replace(run.schedule, lr=lr, seqlen=seqlen), steps=40, eval_every=100)
    return replace(run, **changes)


def test_the_smallest_start_that_begins_well_and_the_longest_steady_duration_are_found(tmp_path, monkeypatch):
    def fluctuates(start: int, steps: int) -> int | None:
        if start < 16:
            return 2
        return None if steps <= 24 else 11

    trained, said = plant(monkeypatch, fluctuates), io.StringIO()
    config = small(tmp_path)
    tuning = tune_seqlen(config, tmp_path / "t", multiples=5, recipe="gpt-tiny", console=Console(file=said, width=200))
    assert (tuning.start, tuning.steps) == (16, 24)
    assert trained[:2] == [(8, 20), (16, 20)]
    assert len(trained) == tuning.budget.trials <= tuning.budget.max_trials == 3 + 3
    assert tuning.budget.tokens == 100 * len(trained) <= tuning.budget.max_tokens
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("each trial trains the first 20 of 40 steps; at most 6 trials and ")
    assert (
        lines[1]
        == "trial 1 of at most 6: start 8, 20 steps: fluctuates at step 2 (perplexity up to 2.59 times its best)"
    )
    assert (
        "start 16, warmup over 24 steps: no perplexity above 1.3 times its best in 20 steps; 5 trials" in tuning.words
    )
    saved = json.loads((tmp_path / "t" / "tuning.json").read_text())
    assert (saved["start"], saved["steps"], saved["words"]) == (16, 24, tuning.words)
    assert [trial["start"] for trial in saved["trials"]] == [start for start, _ in trained]


def test_the_command_trains_the_same_config_with_the_warmup(tmp_path, monkeypatch):
    from trimtab.cli.options import override

    plant(monkeypatch, lambda start, steps: None if steps <= 12 else 15)
    config = replace(small(tmp_path), optim=replace(gpt_tiny().optim, lr=0.01, betas=(0.8, 0.9)), tokens=None)
    config = replace(config, model=replace(config.model, qk_norm="off", bias=True))
    tuning = tune_seqlen(config, tmp_path / "t", multiples=5, recipe="gpt-tiny", console=quiet())
    words = shlex.split(tuning.command or "")
    assert words[:3] == ["trimtab", "train", "gpt-tiny"]
    assert words[-4:] == ["--schedule.seqlen.start", "8", "--schedule.seqlen.steps", "12"]
    seqlen = replace(config.schedule.seqlen, start=8, steps=12)
    assert override(gpt_tiny(), tuple(words[3:]), "") == replace(
        config, schedule=replace(config.schedule, seqlen=seqlen)
    )


def test_trials_keep_the_learning_rate_of_the_whole_run(tmp_path):
    search = module._Search(small(tmp_path), tmp_path, quiet(), (), multiples=5, limit=1.3)
    trial = search.trial_config(8, 20)
    assert trial.steps == 20
    whole = module.simulate(search.config_for(8, 20))
    assert trial.schedule.lr.decay == (whole.steps if trial.schedule.lr.decay_unit == "steps" else whole.tokens)
    assert trial.eval_every == 1
    assert trial.schedule.seqlen.start == 8


def test_a_trial_that_diverges_counts_as_fluctuating_and_no_start_is_said(tmp_path, monkeypatch):
    plant(monkeypatch, lambda start, steps: 1, why=End.DIVERGED)
    tuning = tune_seqlen(small(tmp_path), tmp_path / "t", multiples=5, console=quiet())
    assert (tuning.start, tuning.steps, tuning.command) == (None, None, None)
    assert "every start of 8, 16, 32 fluctuates" in tuning.words
    assert "Try a lower optim.lr" in tuning.words
    assert json.loads((tmp_path / "t" / "tuning.json").read_text())["trials"][0]["worst"] is None


def test_where_no_duration_is_steady_it_says_so(tmp_path, monkeypatch):
    plant(monkeypatch, lambda start, steps: 15)
    tuning = tune_seqlen(small(tmp_path), tmp_path / "t", multiples=5, console=quiet())
    assert (tuning.start, tuning.steps, tuning.command) == (8, None, None)
    assert "start 8 is steady at the beginning, but no duration from 4 steps is steady for 20 steps" in tuning.words


def test_where_everything_is_steady_the_upper_end_is_said(tmp_path, monkeypatch):
    plant(monkeypatch, lambda start, steps: None)
    tuning = tune_seqlen(small(tmp_path), tmp_path / "t", multiples=5, console=quiet())
    assert (tuning.start, tuning.steps) == (8, 40)
    assert "the whole run, the longest duration tried" in tuning.words


def test_finished_trials_are_not_run_again(tmp_path, monkeypatch):
    trained = plant(monkeypatch, lambda start, steps: None if steps <= 12 else 15)
    first = tune_seqlen(small(tmp_path), tmp_path / "t", multiples=5, console=quiet())
    count = len(trained)
    again = tune_seqlen(small(tmp_path), tmp_path / "t", multiples=5, console=quiet())
    assert len(trained) == count
    assert (again.start, again.steps, again.budget) == (first.start, first.steps, first.budget)
    assert all(trial.reused for trial in again.trials)
    assert not any(trial.reused for trial in first.trials)
    changed = replace(small(tmp_path), optim=replace(small(tmp_path).optim, lr=0.1))
    with pytest.raises(RunError, match=r"another config: optim\.lr was 0\.003 and is now 0\.1; use another --out"):
        tune_seqlen(changed, tmp_path / "t", multiples=5, console=quiet())


def test_an_interrupted_search_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_cell", lambda folder, config: False)
    with pytest.raises(RunError, match=r"stopped in trial 1; the same command with --out .* continues the search"):
        tune_seqlen(small(tmp_path), tmp_path / "t", multiples=5, console=quiet())


# --- What is refused


def with_schedule(config: GPTRun, **changes: Any) -> GPTRun:
    return replace(config, schedule=replace(config.schedule, **changes))


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    config = small(tmp_path)
    rate, seqlen = config.schedule.lr, config.schedule.seqlen
    cases: list[tuple[RunConfig, dict[str, Any], str]] = [
        (tiny_clip(tmp_path), {}, "captions cannot be cut; try a recipe of a GPT"),
        (with_schedule(config, lr=replace(rate, warmup=0)), {}, "warmup=0: .* try schedule.lr.warmup=2"),
        (with_schedule(config, lr=replace(rate, warmup=4096, warmup_unit="tokens")), {}, "'steps' with .*warmup=4"),
        (with_schedule(config, seqlen=replace(seqlen, kind="mixed")), {}, "kind='mixed'.* try .*kind='linear'"),
        (config, {"starts": (12,)}, "start=12 is not a multiple of schedule.seqlen.multiple=8; try 8"),
        (config, {"starts": (64,)}, "start=64 is not below the full length 64"),
        (config, {"starts": (16, 8)}, r"must rise; try starts=\(8, 16\)"),
        (config, {"limit": 1.0}, "limit=1.0 must be a ratio above one; try limit=1.3"),
        (config, {"multiples": 0}, "multiples=0 is too small"),
        (config, {"multiples": 11}, "more than the run's 40 steps; try multiples=10"),
    ]
    short = replace(config, model=replace(config.model, context=8))
    cases.append((short, {}, "model.context=8 with schedule.seqlen.multiple=8 has no start length"))
    for bad, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            tune_seqlen(bad, tmp_path / "t", console=quiet(), **options)
    assert not (tmp_path / "t").exists()


# --- With real runs


def test_a_real_search_ends_with_runs_that_can_be_read_and_goes_on_after_a_kill(tmp_path):
    config = tiny(tmp_path, eval_batches=1, steps=9)  # a warm-up of three
    out = tmp_path / "t"
    tuning = tune_seqlen(config, out, starts=(8,), multiples=2, limit=100.0, console=quiet())
    assert (tuning.start, tuning.steps) == (8, 9)
    assert [(trial.start, trial.steps) for trial in tuning.trials] == [(8, 6), (8, 9)]
    assert tuning.budget.tokens <= tuning.budget.max_tokens
    for trial in tuning.trials:
        assert trial.tokens == config.batch * replace(config.seqlen_warmup, start=8, steps=trial.steps).count_tokens(
            1, 6
        )
        assert json.loads((out / trial.folder / "result.json").read_text())["step"] == 6
    # As after a kill: a trial without its end goes on from its checkpoint, to the same end.
    last = out / tuning.trials[-1].folder
    before = (last / "log.jsonl").read_text()
    (last / "result.json").unlink()
    again = tune_seqlen(config, out, starts=(8,), multiples=2, limit=100.0, console=quiet())
    assert [trial.reused for trial in again.trials] == [True, False]
    assert (again.start, again.steps) == (8, 9)
    assert [json.loads(line)["loss"] for line in (last / "log.jsonl").read_text().splitlines()] == [
        json.loads(line)["loss"] for line in before.splitlines()
    ]


def test_a_real_run_that_is_torn_apart_fluctuates(tmp_path):
    config = tiny(tmp_path, eval_batches=1)
    config = replace(config, optim=replace(config.optim, name="sgd", lr=3000.0, bits=32, clip_norm=None))
    tuning = tune_seqlen(config, tmp_path / "t", starts=(8,), multiples=2, console=quiet())
    assert tuning.start is None
    assert tuning.trials[0].fluctuates_at is not None
