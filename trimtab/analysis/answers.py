"""The answer to a question of the papers: its claims with their numbers, and the curves, in one small file.

    reproduced   every claim holds
    partly       the first claim holds, or at least half of them
    not          otherwise
    no answer    for at least one claim the runs do not suffice

The rules of the claims are in lab/questions; an answer has their results. It is what the pages of docs/results are made
from, so they can be made again without the runs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimtab.analysis.findings import Curve
from trimtab.runs import RunError, replace_json, require_json

Paper = Literal["P1", "P2", "P3", "P4"]
Verdict = Literal["reproduced", "partly", "not", "no answer"]


@dataclass(frozen=True)
class Check:
    claim: str
    passed: bool | None  # None: the runs do not suffice
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    name: str
    paper: Paper
    question: str
    about: str  # what the paper found, and how this study differs
    checks: tuple[Check, ...]
    curves: tuple[Mapping[str, Any], ...] = ()  # arm, size, lrs, loss, low, high, sensitivity
    design: Mapping[str, Any] = field(default_factory=dict)  # sizes, learning rates, arms, seeds, steps, runs
    command: str = ""
    minutes: float = 0.0  # of training, on the cores that were there
    machine: str = ""
    date: str = ""

    @property
    def verdict(self) -> Verdict:
        return judge_all(self.checks)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        replace_json(path, clean(asdict(self)))
        return path


def judge_all(checks: Sequence[Check]) -> Verdict:
    if not checks or any(check.passed is None for check in checks):
        return "no answer"
    held = sum(bool(check.passed) for check in checks)
    if held == len(checks):
        return "reproduced"
    return "partly" if checks[0].passed or 2 * held >= len(checks) else "not"


def read_answers(folder: Path) -> list[Answer]:
    """All answers of a folder, by paper and name."""
    found = [read_answer(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda answer: (answer.paper, answer.name))


def read_answer(path: Path) -> Answer:
    data = require_json(path)
    try:
        checks = tuple(Check(**check) for check in data["checks"])
        return Answer(**{**data, "checks": checks, "curves": tuple(data["curves"])})
    except (KeyError, TypeError) as error:
        raise RunError(f"{path} is no answer: {error}; remove it, and answer the question again") from None


def to_row(curve: Curve) -> dict[str, Any]:
    """What a figure needs of a curve."""
    return {
        "arm": curve.arm,
        "size": curve.size,
        "lrs": list(curve.lrs),
        "loss": list(curve.loss),
        "low": list(curve.low),
        "high": list(curve.high),
        "sensitivity": curve.sensitivity,
    }


def clean(x: Any) -> Any:
    """For JSON: numbers with six digits, those that are not finite as null."""
    if isinstance(x, Mapping):
        return {key: clean(value) for key, value in x.items()}
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    if isinstance(x, str) or not isinstance(x, Iterable):
        return x
    return [clean(value) for value in x]
