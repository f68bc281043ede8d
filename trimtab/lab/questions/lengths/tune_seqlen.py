"""Does the cheap search find a sequence length warmup as good as a grid does? Li et al. 2022, section 4: trials of the
first steps only, stopped by the fluctuation of the validation perplexity, at a fraction of the cost of one run.

Here 4x32, 128 rows of 128 tokens (large.py) at twice the best learning rate of full length, 2 million tokens: the
tuner's start and duration against a grid of two starts and four durations, the means of three seeds. This is the
second design: in the first, 64 rows of 64 tokens at a learning rate at which lengths made no difference (docs/log.md),
the tuner's choice was 6 % worse than the best of the grid, and no warmup was better than both.

After a first run the longest duration that the tuner may take, 240 steps, was added to the grid, which did not have its
choice. No trial fluctuated, so the tuner took the longest warmup, and here longer is better: it has more steps for the
same tokens.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from trimtab.analysis.answers import Table
from trimtab.analysis.findings import Result
from trimtab.analysis.results import read_result
from trimtab.lab.questions.lengths.large import FIELDS, SIZE, STEPS
from trimtab.lab.questions.lengths.runs import train_all
from trimtab.lab.questions.question import Checks, Measurement, Numbers, at_most, falls, judge
from trimtab.lab.sizes import parse_size, scaled
from trimtab.lab.subjects import study_base
from trimtab.lab.tune_seqlen import Tuning, tune_seqlen
from trimtab.train.config import RunConfig, with_values

LR, WARMUP, LONGER = 0.03, 6, 2  # at most LONGER times the steps at full length
STARTS, DURATIONS = (8, 32), (24, 72, 144, LONGER * STEPS)
SEEDS = (0, 1, 2)
SHARE, WORSE = 0.25, 1.01  # largest cost of the search in tokens of one run; loss over the grid's best


def base(steps: int = STEPS) -> RunConfig:
    """Full length, ended by its tokens: a warmup has more steps."""
    own = {"optim.lr": LR, "schedule.lr.warmup": WARMUP, "watch.every": 0, "schedule.lr.decay_unit": "tokens"}
    config = scaled(with_values(study_base("gpt-lab", steps), FIELDS | own), parse_size(SIZE))
    return replace(config, tokens=steps * config.batch * config.model.context, steps=LONGER * steps)


def measure(
    folder: Path,
    *,
    steps: int = STEPS,
    durations: Sequence[int] = DURATIONS,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, Any]:
    config = base(steps)
    tuning = tune_seqlen(config, folder / "tuning", recipe="gpt-lab")
    pairs = {f"grid {start}, {duration}": (start, duration) for start in STARTS for duration in durations}
    if tuning.start is not None and tuning.steps is not None:
        pairs["tuner"] = (tuning.start, tuning.steps)
    warmups = {name: _with_warmup(config, *pair) for name, pair in {"none": (None, 1), **pairs}.items()}
    runs = {
        f"{name.replace(', ', '-').replace(' ', '-')}-seed-{seed}": replace(warm, seed=seed)
        for name, warm in warmups.items()
        for seed in seeds
    }
    results = [_read(path) for path in train_all(runs, folder / "runs").values()]
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(warmups):
        mine = results[i * len(seeds) : (i + 1) * len(seeds)]
        start, duration = pairs.get(name, (None, None))
        rows.append({"name": name, "start": start, "steps": duration, "loss": fmean(run.score for run in mine)})
    return {"rows": rows, "search": _search(tuning)}


def _with_warmup(config: RunConfig, start: int | None, steps: int) -> RunConfig:
    seqlen = replace(config.schedule.seqlen, start=start, steps=steps)
    return replace(config, schedule=replace(config.schedule, seqlen=seqlen))


def _read(folder: Path) -> Result:
    return read_result(Result(folder=folder, name=folder.name, study="", arm=""))


def _search(tuning: Tuning) -> dict[str, Any]:
    budget = tuning.budget
    fluctuated = sum(trial.fluctuates_at is not None for trial in tuning.trials)
    return {
        "fluctuated": fluctuated,
        "trials": budget.trials,
        "share": budget.share,
        "seconds": budget.seconds,
        "start": tuning.start,
    }


def check(numbers: Numbers) -> Checks:
    found: Mapping[str, float] = {row["name"]: row["loss"] for row in numbers["rows"]}
    best = min((loss for name, loss in found.items() if name.startswith("grid")), default=None)
    claim = "the loss with the tuner's choice is at most 1% above the best of the grid"
    tuned = found.get("tuner", math.inf)  # infinite: it found none
    yield judge(claim, {"best of the grid": best, "tuner": tuned}, at_most(WORSE))
    claim = "the loss with the tuner's choice is below that without a warmup"
    yield judge(claim, {"none": found.get("none"), "tuner": tuned}, falls)
    fluctuated = {"trials": float(numbers["search"]["trials"]), "fluctuated": float(numbers["search"]["fluctuated"])}
    claim = "the search had something to find: at least one trial fluctuated, and not all"
    yield judge(claim, fluctuated, lambda trials, x: 0 < x < trials)
    yield judge(
        f"the search costs less than {SHARE:.0%} of the tokens of one run", _share(numbers), lambda x: x < SHARE
    )


def _share(numbers: Numbers) -> dict[str, float | None]:
    return {"share": numbers["search"]["share"]}


def tables(numbers: Numbers) -> Iterable[Table]:
    rows = [(row["name"], row["start"], row["steps"], row["loss"]) for row in numbers["rows"]]
    yield Table("Start and duration of the warmup", ("", "start", "steps", "validation loss"), rows)


QUESTION = Measurement(
    "tune-seqlen",
    __doc__,
    measure,
    check,
    minutes=6.0,
    paper="P4",
    design=f"{SIZE} at learning rate {LR:g}; trials of {3 * WARMUP} steps, then {len(SEEDS)} seeds of each warmup.",
    tables=tables,
    second=True,
)
