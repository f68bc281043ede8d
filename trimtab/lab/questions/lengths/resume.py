"""Does a run that stops within the sequence length warmup continue exactly? Li et al. 2022 and DeepSpeed: the length is
a function of the step, so that a resume needs only the counters, and the rounding errors of a restart are the usual.

Here a run continues from its checkpoints at 25 % and 90 % of the warmup, in copies of its folder whose later steps are
removed; every later record is compared with that of the uninterrupted run: length, tokens, learning rate and loss.
"""

import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab.analysis.answers import Table
from trimtab.lab.questions.lengths.runs import train_all
from trimtab.lab.questions.lengths.unstable import FIELDS
from trimtab.lab.questions.question import Checks, Measurement, Numbers, judge
from trimtab.lab.sizes import parse_size, scaled
from trimtab.lab.subjects import study_base
from trimtab.runs import RunFolder, read_lines
from trimtab.train import RunConfig, resume
from trimtab.train.config import with_values

SIZE, STEPS, WARMUP = "2x32", 200, 80
STOPS = (0.25, 0.9)  # of the warmup
EXACT = {"length": "length", "tokens": "number of tokens", "lr": "learning rate"}
LOSS = 1e-6  # of the difference, relative: the sums are in the same order


def base(steps: int, warmup: int) -> RunConfig:
    every = math.gcd(*(round(stop * warmup) for stop in STOPS))
    own = {"optim.lr": 0.03, "checkpoint_every": every, "keep": steps, "watch.every": 0, "schedule.lr.warmup": 10}
    lengths = {"schedule.seqlen.start": 8, "schedule.seqlen.steps": warmup, "schedule.lr.decay_unit": "tokens"}
    return scaled(with_values(study_base("gpt-lab", steps), FIELDS | own | lengths), parse_size(SIZE))


def measure(folder: Path, *, steps: int = STEPS, warmup: int = WARMUP) -> dict[str, Any]:
    whole = train_all({"whole": base(steps, warmup)}, folder)["whole"]
    rows = []
    for stop in STOPS:
        at = round(stop * warmup)
        copy = folder / f"from-{at}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        resume(copy, step=at, console=Console(quiet=True))
        rows.append({"step": at} | _compare(whole, copy, at))
    return {"rows": rows}


def _compare(whole: Path, copy: Path, at: int) -> dict[str, Any]:
    """The records after a step: how many there are and how many differ, and the largest difference of the loss."""
    first, second = ([x for x in read_lines(RunFolder(path).log) if x["step"] > at] for path in (whole, copy))
    pairs = list(zip(first, second, strict=False))
    found: dict[str, Any] = {"records": len(first), "missing": abs(len(first) - len(second))}
    found |= {name: sum(a[name] != b[name] for a, b in pairs) for name in EXACT}
    found["loss"] = max((abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs), default=math.nan)
    return found


def check(numbers: Numbers) -> Checks:
    rows = numbers["rows"]
    for name, words in EXACT.items():
        wrong = {f"from step {row['step']}": float(row[name] + row["missing"]) for row in rows}
        claim = f"after a resume, every record has the same {words}"
        yield judge(claim, wrong, lambda *counts: not any(counts), note="records that differ")
    worst = {f"from step {row['step']}": row["loss"] for row in rows}
    yield judge(f"after a resume, the losses differ by at most {LOSS:g}, relative", worst, lambda *x: max(x) <= LOSS)


def tables(numbers: Numbers) -> Iterable[Table]:
    columns = ("step", "records", "missing", *EXACT, "loss")
    rows = [tuple(row[column] for column in columns) for row in numbers["rows"]]
    yield Table("Records after the resume, those that differ, and the largest difference of the loss", columns, rows)


QUESTION = Measurement(
    "resume",
    __doc__,
    measure,
    check,
    minutes=0.5,
    paper="P4",
    design=f"{SIZE}, {STEPS} steps, {WARMUP} of warmup; continued from {STOPS[0]:.0%} and {STOPS[1]:.0%} of it.",
    tables=tables,
)
