"""Find a sequence length warmup for a recipe, at a small share of the cost of one run.

The warmup has two parameters: the start length s, and the number of steps T until full length. If T is too small, the
warmup does not stabilise training; if it is too large, the model overfits to short text. Both are visible early in the
validation perplexity at full length, so a trial trains only the first few multiples of the learning-rate warmup:

    fluctuation     perplexity > limit * its best so far (limit 1.3), or the run diverged
    1. s            the smallest start without a fluctuation during the learning-rate warmup
    2. T            the largest one without a fluctuation in the whole trial, by bisection (tune_search.py)

    tuning = tune_seqlen(config, Path("runs/tune"), recipe="gpt-tiny")
    print(tuning.words)

Trials are ordinary runs in out/trials. Complete ones are reused, so the same call continues a search.

Li et al. 2022, "The Stability-Efficiency Dilemma", section 4 (tuning).
"""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab.lab.executors.worker import run_cell
from trimtab.lab.tune_search import Found, find_fluctuation, find_warmup, max_cost, max_trials
from trimtab.recipes import RECIPES
from trimtab.report.numbers import count
from trimtab.runs import End, EventKind, RunError, RunFolder, check_ours, lock_folder, replace_json
from trimtab.screen import open_console
from trimtab.train import CLIPRun, GPTRun, RunConfig
from trimtab.train.config import FREE, ConfigError, differences, load_config, to_json
from trimtab.train.plan import simulate

EVALUATIONS = 4  # within one learning-rate warmup, at least
TRIALS, RESULT = "trials", "tuning.json"  # in the folder of a search
KINDS = ("linear", "root")  # schedules with a start and a duration only


@dataclass(frozen=True)
class Trial:
    start: int
    steps: int  # T
    folder: str
    why: End | str  # the run ended
    fluctuates_at: int | None  # the first step; None: steady
    worst: float  # the largest perplexity relative to the best one before it
    tokens: int
    seconds: float
    reused: bool

    def __str__(self) -> str:
        name = f"start {self.start}, {self.steps} steps"
        if self.fluctuates_at is None:
            return f"{name}: steady (perplexity at most {self.worst:.2f} times its best)"
        ended = str(getattr(self.why, "value", self.why))
        how = ended if self.why != End.DONE else f"perplexity up to {self.worst:.2f} times its best"
        return f"{name}: fluctuates at step {self.fluctuates_at} ({how})"


@dataclass(frozen=True)
class Budget:
    """The cost of the search; `seconds` are those of training steps, without evaluations."""

    trials: int
    max_trials: int
    tokens: int
    max_tokens: int
    seconds: float
    run_tokens: int  # of one full run

    @property
    def share(self) -> float:
        return self.tokens / self.run_tokens

    @property
    def run_seconds(self) -> float:
        """Of one full run, at the speed of the trials."""
        return self.seconds / self.share if self.tokens else math.nan


@dataclass(frozen=True)
class Tuning:
    start: int | None  # None: no warmup was found
    steps: int | None
    trials: tuple[Trial, ...]
    budget: Budget
    words: str
    command: str | None


def tune_seqlen(
    config: RunConfig,
    out: str | Path,
    *,
    starts: Sequence[int] = (),
    multiples: int = 3,
    limit: float = 1.3,
    recipe: str = "RECIPE",
    numbered: bool = False,
    console: Console | None = None,
) -> Tuning:
    """Train trials into `out`; return the start and duration to use, also as text. The folder is locked.

    Args:
        starts: start lengths to try, rising; default: 8, 16, 32, ... below the full length.
        multiples: length of a trial, in multiples of the learning-rate warmup.
        limit: largest perplexity relative to its best so far.
        recipe: the recipe in the command that is returned.
        numbered: use the first of `out`, `out`-2, `out`-3, ... that does not exist.
    """
    search = _Search(config, Path(out), console or open_console(), starts, multiples=multiples, limit=limit)
    with lock_folder(search.out, numbered=numbered) as search.out:
        check_ours(search.out, TRIALS, RESULT)
        return _tune(search, recipe)


def _tune(search: "_Search", recipe: str) -> Tuning:
    search.print_budget()
    found = find_warmup(search.starts, search.durations, search.window, search.trial)
    words, command = _describe(search, found), None
    if found.start is not None and found.steps is not None:
        command = _command(recipe, search.config_for(found.start, found.steps), found)
        words += f"\n{command}"
    tuning = Tuning(found.start, found.steps, tuple(search.trials), search.budget(), words, command)
    search.write(tuning)
    return tuning


# --- Trials


class _Search:
    def __init__(
        self, config: RunConfig, out: Path, console: Console, starts: Sequence[int], *, multiples: int, limit: float
    ) -> None:
        self.config, self.out, self.limit, self.console = _check_config(config), out, limit, console
        if not 1 < limit < math.inf:
            raise ConfigError(f"limit={limit} must be a ratio above one; try limit=1.3")
        if multiples < 1:
            raise ConfigError(f"multiples={multiples} is too small; try multiples=3")
        self.warmup = config.schedule.lr.warmup
        self.window = multiples * self.warmup
        if self.window > config.steps:
            raise ConfigError(
                f"multiples={multiples} of a warmup of {self.warmup} steps are more than the run's {config.steps} "
                f"steps; try multiples={max(config.steps // self.warmup, 1)}, or a shorter schedule.lr.warmup"
            )
        self.starts = _check_starts(config, tuple(starts))
        self.durations = range(self.warmup, config.steps + 1, self.warmup)
        self.run_tokens = simulate(config).tokens
        self.max_trials = max_trials(self.starts, self.durations, self.window)
        # All starts at the first duration, then the most expensive bisection: a longer start has more tokens.
        shorter = [steps for steps in self.durations if steps < self.window]
        longer = [steps for steps in self.durations if steps > self.window]
        self.max_tokens = sum(self._tokens(start, self.window) for start in self.starts)
        self.max_tokens += max(max_cost(rest, lambda x: self._tokens(self.starts[-1], x)) for rest in (shorter, longer))
        self.trials: list[Trial] = []

    def config_for(self, start: int, steps: int) -> RunConfig:
        """The full run with this warmup."""
        seqlen = replace(self.config.schedule.seqlen, start=start, steps=steps)
        return replace(self.config, schedule=replace(self.config.schedule, seqlen=seqlen))

    def trial_config(self, start: int, steps: int) -> RunConfig:
        full = self.config_for(start, steps)
        # The learning rate decays as in the full run, not to the end of the trial.
        schedule = replace(full.schedule, lr=simulate(full).rate)
        evals = min(self.config.eval_every, max(1, self.warmup // EVALUATIONS))
        saves = max(1, min(self.config.checkpoint_every, self.window // 2))
        return replace(full, schedule=schedule, steps=self.window, eval_every=evals, checkpoint_every=saves, keep=1)

    def trial(self, start: int, steps: int) -> tuple[bool, bool]:
        trial = self._run(start, steps)
        self.trials.append(trial)
        reused = " (reused)" if trial.reused else ""
        self.console.print(
            f"trial {len(self.trials)} of at most {self.max_trials}: {trial}{reused}", highlight=False, markup=False
        )
        at = trial.fluctuates_at
        return at is None or at > self.warmup, at is None

    def _run(self, start: int, steps: int) -> Trial:
        config, folder = self.trial_config(start, steps), Path(TRIALS) / f"start-{start}-steps-{steps}"
        run = RunFolder(self.out / folder)
        reused = run.intact
        if reused:
            _check_same(run.path, config)
        elif not run_cell(run.path, config):
            number = len(self.trials) + 1
            raise RunError(f"stopped in trial {number}; the same command with --out {self.out} continues the search")
        result = run.read_result()
        if result is None:
            raise RunError(f"{run.result} cannot be read; remove the folder {run.path} to run the trial again")
        losses = [(e.step or 0, e.loss) for e in run.read_events() if e.kind == EventKind.EVALUATED]
        at, worst = find_fluctuation(losses, self.limit)
        if result.why != End.DONE:
            at, worst = (result.step if at is None else at), math.inf
        return Trial(start, steps, str(folder), result.why, at, worst, result.tokens, result.seconds, reused)

    def _tokens(self, start: int, steps: int) -> int:
        return self.config_for(start, steps).seqlen_warmup.count_tokens(self.config.batch, self.window)

    def budget(self) -> Budget:
        tokens, seconds = sum(t.tokens for t in self.trials), sum(t.seconds for t in self.trials)
        return Budget(len(self.trials), self.max_trials, tokens, self.max_tokens, seconds, self.run_tokens)

    def print_budget(self) -> None:
        self.console.print(
            f"each trial trains the first {self.window} of {self.config.steps} steps; at most {self.max_trials} trials "
            f"and {self.max_tokens / self.run_tokens:.0%} of the {count(self.run_tokens)} tokens of one run",
            highlight=False,
        )

    def write(self, tuning: Tuning) -> None:
        data: dict[str, Any] = asdict(tuning) | {"limit": self.limit, "window": self.window, "starts": self.starts}
        data["budget"]["share"] = tuning.budget.share
        for trial in data["trials"]:
            trial["worst"] = trial["worst"] if math.isfinite(trial["worst"]) else None
        replace_json(self.out / RESULT, data | {"config": to_json(self.config)})


# --- Checks


def _check_config(config: RunConfig) -> RunConfig:
    if isinstance(config, CLIPRun):
        raise ConfigError("a CLIP reads the last token of a caption, so captions cannot be cut; try a recipe of a GPT")
    if not isinstance(config, GPTRun):
        raise ConfigError(f"the schedule cuts only the text of a GPT, got a {type(config).__name__}")
    rate, seqlen = config.schedule.lr, config.schedule.seqlen
    if rate.warmup == 0:
        raise ConfigError(
            "schedule.lr.warmup=0: the length of a trial is a multiple of the learning-rate warmup; "
            f"try schedule.lr.warmup={max(config.steps // 20, 1)}"
        )
    if rate.warmup_unit == "tokens":
        steps = max(round(rate.warmup / (config.batch * config.model.context)), 1)
        raise ConfigError(
            "schedule.lr.warmup_unit='tokens': shorter sequences would need more steps, and trials could not be "
            f"compared; try schedule.lr.warmup_unit='steps' with schedule.lr.warmup={steps}"
        )
    if seqlen.kind not in KINDS or seqlen.lengths:
        raise ConfigError(
            f"schedule.seqlen.kind={seqlen.kind!r} with lengths={seqlen.lengths}: only a start and a duration can be "
            "tuned; try schedule.seqlen.kind='linear' without lengths"
        )
    return config


def _check_starts(config: RunConfig, starts: tuple[int, ...]) -> tuple[int, ...]:
    end, multiple = config.model.context, config.schedule.seqlen.multiple
    if not starts:
        starts = tuple(8 * 2**i for i in range(end.bit_length()) if 8 * 2**i < end and 8 * 2**i % multiple == 0)
    if not starts:
        raise ConfigError(
            f"model.context={end} with schedule.seqlen.multiple={multiple} has no start length from 8; "
            f"try starts=({multiple},) or a longer model.context"
        )
    for start in starts:
        if not 1 <= start < end:
            raise ConfigError(f"start={start} is not below the full length {end}; try starts=({max(end // 8, 1)},)")
        if start % multiple:
            near = max(start - start % multiple, multiple)
            raise ConfigError(f"start={start} is not a multiple of schedule.seqlen.multiple={multiple}; try {near}")
    if list(starts) != sorted(set(starts)):
        raise ConfigError(f"starts={starts} must rise; try starts={tuple(sorted(set(starts)))}")
    return starts


def _check_same(folder: Path, config: RunConfig) -> None:
    """A trial is reused only if it has the same config, and the same evaluations."""
    evaluations = ("eval_every", "eval_batches")
    for name, old, new in differences(load_config(folder)[0], config):
        if name in evaluations or name not in FREE:
            raise RunError(f"{folder} has another config: {name} was {old} and is now {new}; use another --out")


# --- Text


def _describe(search: _Search, found: Found) -> str:
    budget = search.budget()
    cost = f"{budget.trials} trials, {budget.share:.0%} of the tokens of one run"
    cost += f" ({budget.seconds:.0f} of about {budget.run_seconds:.0f} seconds)"
    rule = f"perplexity above {search.limit:g} times its best"
    if found.start is None:
        return (
            f"every start of {', '.join(map(str, search.starts))} fluctuates ({rule}) within the {search.warmup} steps "
            f"of the learning-rate warmup: {cost}. Try a lower optim.lr, a longer schedule.lr.warmup, or larger starts"
        )
    if found.steps is None:
        return (
            f"start {found.start} is steady at the beginning, but no duration from {search.warmup} steps is steady for "
            f"{search.window} steps ({rule}): {cost}. Try a larger start, a lower optim.lr, or fewer multiples"
        )
    words = f"start {found.start}, warmup over {found.steps} steps: no {rule} in {search.window} steps; {cost}"
    if found.steps == search.durations[-1]:
        words += ". That is the whole run, the longest duration tried; a third of the run is the usual choice"
    tokens = simulate(search.config_for(found.start, found.steps)).tokens
    if tokens < budget.run_tokens:
        words += f". In {search.config.steps} steps the run trains on {tokens / budget.run_tokens:.0%} of the tokens"
    return words


def _command(recipe: str, config: RunConfig, found: Found) -> str:
    """The command that trains the full run: the recipe, its changed fields, and the warmup."""
    words = ["trimtab", "train", recipe]
    chosen = {"schedule.seqlen.start": found.start, "schedule.seqlen.steps": found.steps}
    for name, _, value in differences(RECIPES[recipe](), config) if recipe in RECIPES else []:
        if name not in chosen:
            parsed = json.loads(value)
            words += [f"--{name.replace('_', '-')}", *map(str, parsed if isinstance(parsed, list) else [parsed])]
    return shlex.join([*words, *(word for name, x in chosen.items() for word in (f"--{name}", str(x)))])
