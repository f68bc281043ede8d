"""Find a sequence length warmup for a recipe, for a small share of what one run costs.

The warm-up has two numbers: the first length s, and the steps T until full length. Too small a T brings no stability,
too large a T overfits short text. Both show early, in the validation perplexity at full length, so a trial
trains only the first few multiples of the learning rate's warm-up:

    fluctuation     perplexity > limit * the best one so far                    (1.3 times; or the run diverged)
    1. s            the smallest start that does not fluctuate at the very beginning, while the rate still rises
    2. T            the largest one without a fluctuation in the whole window, by halving (tune_search.py)

    tuning = tune_seqlen(config, Path("runs/tune"), recipe="gpt-tiny")
    print(tuning.words)

Trials are plain runs in out/trials. Finished ones are not run again, so a search that was stopped goes on.

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

from trimtab.report.numbers import count, join
from trimtab.lab.executors.worker import run_cell
from trimtab.lab.tune_search import Found, dearest, find_warmup, most_trials, watch_perplexity
from trimtab.recipes import RECIPES
from trimtab.runs.files import replace_json
from trimtab.train import CLIPRun, GPTRun, RunConfig, RunError, read_lines
from trimtab.train.config import FREE, ConfigError, differences, load_config, to_json
from trimtab.train.plan import foretell

LOOKS = 4  # evaluations within one warm-up of the learning rate, at least
PACES = ("linear", "root")  # those that have a start and a duration, and nothing else


@dataclass(frozen=True)
class Trial:
    start: int
    steps: int  # T
    folder: str
    why: str  # the run ended: "done", "diverged", "not finite"
    fluctuates_at: int | None  # the first step that does; None: steady
    worst: float  # the largest perplexity over the best one before it
    tokens: int
    seconds: float
    reused: bool

    def __str__(self) -> str:
        name = f"start {self.start}, {self.steps} steps"
        if self.fluctuates_at is None:
            return f"{name}: steady (perplexity at most {self.worst:.2f} times its best)"
        how = self.why if self.why != "done" else f"perplexity up to {self.worst:.2f} times its best"
        return f"{name}: fluctuates at step {self.fluctuates_at} ({how})"


@dataclass(frozen=True)
class Budget:
    """What the search cost; `seconds` are those of training steps, without evaluations."""

    trials: int
    most_trials: int
    tokens: int
    most_tokens: int
    seconds: float
    run_tokens: int  # of one full run

    @property
    def share(self) -> float:
        return self.tokens / self.run_tokens

    @property
    def run_seconds(self) -> float:
        """Of one full run, at the trials' speed."""
        return self.seconds / self.share if self.tokens else math.nan


@dataclass(frozen=True)
class Tuning:
    start: int | None  # None: no warm-up was found
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
    console: Console | None = None,
) -> Tuning:
    """Train trials into `out`, and return the start and duration to use, in words too.

    Args:
        starts: first lengths to try, rising; 8, 16, 32 ... below the full length if left out.
        multiples: the window that a trial trains, in warm-ups of the learning rate.
        limit: on perplexity over the best one so far.
        recipe: what the command that is returned should train.
    """
    search = _Search(config, Path(out), starts, multiples, limit, console or Console())
    search.say_before()
    found = find_warmup(search.starts, search.durations, search.window, search.ask)
    command = (
        None
        if found.start is None or found.steps is None
        else _command(recipe, search.config_for(found.start, found.steps), found)
    )
    tuning = Tuning(found.start, found.steps, tuple(search.trials), search.budget(), _words(search, found), command)
    if command is not None:
        tuning = replace(tuning, words=f"{tuning.words}\n{command}")
    search.write(tuning)
    return tuning


# --- Trials


class _Search:
    def __init__(
        self, config: RunConfig, out: Path, starts: Sequence[int], multiples: int, limit: float, console: Console
    ) -> None:
        self.config, self.out, self.limit, self.console = _check_config(config), out, limit, console
        if not 1 < limit < math.inf:
            raise ConfigError(f"limit={limit} is no ratio above one; try limit=1.3")
        if multiples < 1:
            raise ConfigError(f"multiples={multiples} is too small; try multiples=3")
        self.warmup = config.schedule.lr.warmup
        self.window = multiples * self.warmup
        if self.window > config.steps:
            raise ConfigError(
                f"multiples={multiples} of a warm-up of {self.warmup} steps are more than the run's {config.steps} "
                f"steps; try multiples={max(config.steps // self.warmup, 1)}, or a shorter schedule.lr.warmup"
            )
        self.starts = _check_starts(config, tuple(starts))
        self.durations = range(self.warmup, config.steps + 1, self.warmup)
        self.run_tokens = foretell(config).tokens
        self.most = most_trials(self.starts, self.durations, self.window)
        self.most_tokens = self._most_tokens()
        self.trials: list[Trial] = []

    def config_for(self, start: int, steps: int) -> RunConfig:
        """The whole run with this warm-up."""
        seqlen = replace(self.config.schedule.seqlen, start=start, steps=steps)
        return replace(self.config, schedule=replace(self.config.schedule, seqlen=seqlen))

    def trial_config(self, start: int, steps: int) -> RunConfig:
        full = self.config_for(start, steps)
        # The learning rate falls as in the whole run, not to the end of the window.
        schedule = replace(full.schedule, lr=foretell(full).rate)
        looks = min(self.config.eval_every, max(1, self.warmup // LOOKS))
        saves = max(1, min(self.config.checkpoint_every, self.window // 2))
        return replace(full, schedule=schedule, steps=self.window, eval_every=looks, checkpoint_every=saves, keep=1)

    def ask(self, start: int, steps: int) -> tuple[bool, bool]:
        trial = self._run(start, steps)
        self.trials.append(trial)
        again = " (from before)" if trial.reused else ""
        self.console.print(f"trial {len(self.trials)} of at most {self.most}: {trial}{again}", highlight=False)
        at = trial.fluctuates_at
        return at is None or at > self.warmup, at is None

    def _run(self, start: int, steps: int) -> Trial:
        config, folder = self.trial_config(start, steps), Path("trials") / f"start-{start}-steps-{steps}"
        place = self.out / folder
        reused = (place / "result.json").exists()
        if reused:
            _check_same(place, config)
        elif run_cell(place, config) == "stopped":
            raise RunError(f"stopped in trial {len(self.trials) + 1}; the same command with --out {self.out} goes on")
        result = json.loads((place / "result.json").read_text())
        events = [event for event in read_lines(place / "events.jsonl") if event["event"] == "evaluated"]
        losses = [(event["step"], math.inf if event["loss"] is None else event["loss"]) for event in events]
        at, worst = watch_perplexity(losses, self.limit)
        if result["why"] != "done":
            at, worst = (result["step"] if at is None else at), math.inf
        return Trial(start, steps, str(folder), result["why"], at, worst, result["tokens"], result["seconds"], reused)

    def _most_tokens(self) -> int:
        """All starts at the first duration, then the dearest way to halve: the longer the start, the more tokens."""
        first = sum(self._tokens(start, self.window) for start in self.starts)
        shorter = [steps for steps in self.durations if steps < self.window]
        longer = [steps for steps in self.durations if steps > self.window]
        last = self.starts[-1]
        return first + max(dearest(rest, lambda steps: self._tokens(last, steps)) for rest in (shorter, longer))

    def _tokens(self, start: int, steps: int) -> int:
        seqlen = replace(self.config.schedule.seqlen, start=start, steps=steps)
        return seqlen.count_tokens(self.config.batch, self.window)

    def budget(self) -> Budget:
        tokens, seconds = sum(t.tokens for t in self.trials), sum(t.seconds for t in self.trials)
        return Budget(len(self.trials), self.most, tokens, self.most_tokens, seconds, self.run_tokens)

    def say_before(self) -> None:
        self.console.print(
            f"each trial trains the first {self.window} of {self.config.steps} steps; at most {self.most} trials and "
            f"{self.most_tokens / self.run_tokens:.0%} of the {count(self.run_tokens)} tokens of one run",
            highlight=False,
        )

    def write(self, tuning: Tuning) -> None:
        data: dict[str, Any] = {"start": tuning.start, "steps": tuning.steps, "words": tuning.words}
        data |= {"command": tuning.command, "limit": self.limit, "window": self.window, "starts": self.starts}
        data["budget"] = {**asdict(tuning.budget), "share": tuning.budget.share}
        data["trials"] = [asdict(trial) for trial in tuning.trials]
        for trial in data["trials"]:
            trial["worst"] = trial["worst"] if math.isfinite(trial["worst"]) else None
        self.out.mkdir(parents=True, exist_ok=True)
        replace_json(self.out / "tuning.json", data | {"config": to_json(self.config)})


# --- What is refused


def _check_config(config: RunConfig) -> RunConfig:
    if isinstance(config, CLIPRun):
        raise ConfigError("captions end with the token that is read out, so they cannot be cut; try a recipe of a GPT")
    if not isinstance(config, GPTRun):
        raise ConfigError(f"only the text of a GPT is cut by the schedule, got a {type(config).__name__}")
    rate, seqlen = config.schedule.lr, config.schedule.seqlen
    if rate.warmup == 0:
        raise ConfigError(
            "schedule.lr.warmup=0: the window is counted in warm-ups of the learning rate; "
            f"try schedule.lr.warmup={max(config.steps // 20, 1)}"
        )
    if rate.warmup_unit == "tokens":
        steps = max(round(rate.warmup / (config.batch * seqlen.end)), 1)
        raise ConfigError(
            "schedule.lr.warmup_unit='tokens': the shorter the sequences, the more steps it would take, and trials "
            f"would not compare; try schedule.lr.warmup_unit='steps' with schedule.lr.warmup={steps}"
        )
    if seqlen.kind not in PACES or seqlen.lengths:
        raise ConfigError(
            f"schedule.seqlen.kind={seqlen.kind!r} with lengths={seqlen.lengths}: a start and a duration are all that "
            "is tuned; try schedule.seqlen.kind='linear' without lengths"
        )
    return config


def _check_starts(config: RunConfig, starts: tuple[int, ...]) -> tuple[int, ...]:
    end, multiple = config.schedule.seqlen.end, config.schedule.seqlen.multiple
    if not starts:
        starts = tuple(8 * 2**i for i in range(end.bit_length()) if 8 * 2**i < end and 8 * 2**i % multiple == 0)
    if not starts:
        raise ConfigError(
            f"schedule.seqlen.end={end} with multiple={multiple} leaves no shorter length from 8 on to start with; "
            f"try starts=({multiple},) or a longer model.context"
        )
    for start in starts:
        if not 1 <= start < end:
            raise ConfigError(f"start={start} is not below the full length {end}; try starts=({max(end // 8, 1)},)")
        if start % multiple:
            near = max(start - start % multiple, multiple)
            raise ConfigError(f"start={start} is not a multiple of schedule.seqlen.multiple={multiple}; try {near}")
    if list(starts) != sorted(set(starts)):
        raise ConfigError(f"starts={starts} do not rise; try starts={tuple(sorted(set(starts)))}")
    return starts


def _check_same(folder: Path, config: RunConfig) -> None:
    """A trial from before counts only if it was of the same run, looked at as often."""
    saved, _ = load_config(folder)
    looks = ("eval_every", "eval_batches")
    changed = [row for row in differences(saved, config) if row[0] in looks or row[0] not in FREE]
    if changed:
        name, old, new = changed[0]
        raise RunError(f"{folder} is of another config: {name} was {old} and is now {new}; take another --out")


# --- What is said


def _words(search: _Search, found: Found) -> str:
    budget = search.budget()
    cost = f"{budget.trials} trials, {budget.share:.0%} of the tokens of one run"
    cost += f" ({budget.seconds:.0f} of about {budget.run_seconds:.0f} seconds)"
    rule = f"perplexity above {search.limit:g} times its best"
    if found.start is None:
        return (
            f"no start of {join([str(start) for start in search.starts])} begins without a fluctuation ({rule} within "
            f"the {search.warmup} steps of the learning rate's warm-up): {cost}. Try a lower optim.lr, a longer "
            "schedule.lr.warmup, or larger starts"
        )
    if found.steps is None:
        return (
            f"start {found.start} begins well, but no duration from {search.warmup} steps on is steady for "
            f"{search.window} steps ({rule}): {cost}. Try a larger start, a lower optim.lr, or fewer multiples"
        )
    words = f"start {found.start}, warm up over {found.steps} steps: no {rule} in {search.window} steps; {cost}"
    if found.steps == search.durations[-1]:
        words += ". That is the whole run, and the longest that was tried; a third of it is the usual choice"
    tokens = foretell(search.config_for(found.start, found.steps)).tokens
    if tokens < budget.run_tokens:
        words += (
            f". In the same {search.config.steps} steps the run sees {tokens / budget.run_tokens:.0%} of the tokens"
        )
    return words


def _command(recipe: str, config: RunConfig, found: Found) -> str:
    """What trains the whole run: the recipe, what was changed in it, and the warm-up."""
    words = ["trimtab", "train", recipe]
    chosen = {"schedule.seqlen.start", "schedule.seqlen.steps"}
    for name, _, value in differences(RECIPES[recipe](), config) if recipe in RECIPES else []:
        if name not in chosen:
            parsed = json.loads(value)
            words += [f"--{name.replace('_', '-')}", *map(str, parsed if isinstance(parsed, list) else [parsed])]
    return shlex.join(
        [*words, "--schedule.seqlen.start", str(found.start), "--schedule.seqlen.steps", str(found.steps)]
    )
