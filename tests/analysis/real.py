"""Results of real studies, cut down to the numbers that a verdict needs.

tests/fixtures/default.json     `trimtab lab --seeds 2 --steps 400`: three sizes, seven learning rates, two arms
docs/results/forecasts.json     `bench.forecasts`: each recipe at three sizes, then at 786k and 3M parameters

    python -m tests.analysis.real FOLDER        cut the runs of a study into tests/fixtures/default.json
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from bench.forecasts_report import RESULTS, from_row, load_results, to_row
from trimtab.analysis.findings import Findings, Result, Source, measure

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "tests" / "fixtures" / "default.json"


def load(name: str, **only: Any) -> Findings:
    """The findings of "default" or of a recipe; `only` are limits: most_lr, least_lr, sizes, arms, most_params."""
    rows = [from_row(row) for row in json.loads(DEFAULT.read_text())] if name == "default" else None
    results = rows if rows is not None else load_results(ROOT / RESULTS)[name]
    known = [result for result in results if _wanted(result, **only)]
    return measure(known, [Source(name="forecasts", folder=Path("forecasts"))])


def _wanted(
    result: Result,
    *,
    most_lr: float = math.inf,
    least_lr: float = 0.0,
    most_params: float = math.inf,
    sizes: tuple[str, ...] = (),
    arms: tuple[str, ...] = (),
) -> bool:
    inside = least_lr <= result.lr <= most_lr and (result.params or 0) <= most_params
    return inside and (not sizes or result.size in sizes) and (not arms or result.arm in arms)


def main(folder: str) -> None:
    from trimtab.analysis.folders import read_folders

    rows = [to_row(result) for result in read_folders([Path(folder)])[1] if result.finished]
    DEFAULT.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
