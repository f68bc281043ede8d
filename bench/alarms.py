"""How often the alarms on losses and attention logits are right, in the runs of a study and in pure noise.

    python -m bench.alarms runs/lab           a study that this version has trained, and 100,000 steps of noise

A run fails by the definition of the lab (trimtab/analysis/measure.py). Its alarms are those that it wrote while it was
trained. Noise has a constant mean, so every alarm on it is false.
"""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tyro
from rich.table import Table

from bench.measure import console
from trimtab.analysis.findings import Result, read
from trimtab.analysis.measure import run_fails
from trimtab.runs import EventKind, read_run
from trimtab.watch import Rules
from trimtab.watch.events import Detector

KINDS = ("loss spike", "explosion", "attention logits", "non-finite")
STEPS, MEAN, SPREAD = 100_000, 2.0, 0.05
NOISES: dict[str, Callable[[np.random.Generator], float]] = {
    "normal": lambda draw: float(draw.normal()),
    "Laplace": lambda draw: float(draw.laplace()) / math.sqrt(2),
    "Gumbel": lambda draw: float(draw.gumbel()) * math.sqrt(6) / math.pi,
}


def main(folder: Path, /) -> None:
    """Count the alarms.

    Args:
        folder: of a study
    """
    findings = read([folder])
    curves = {curve.key: curve for curve in findings.curves}
    runs = [run for run in findings.results if run.finished and run.key in curves]
    table = Table("runs", "number", "with an alarm", *KINDS, box=None, pad_edge=False)
    for name, fails in (("failed", True), ("did not fail", False)):
        those = [alarms_of(run) for run in runs if run_fails(run, curves[run.key]) == fails]
        kinds = [str(sum(kind in alarms for alarms in those)) for kind in KINDS]
        table.add_row(name, str(len(those)), str(sum(bool(alarms) for alarms in those)), *kinds)
    console.print(table)
    table = Table(f"noise, {STEPS:,} steps", "one loss", "the paper's rule", box=None, pad_edge=False)
    for name, draw in NOISES.items():
        table.add_row(name, *(str(count_false(draw, rules)) for rules in (Rules(deviations=1e9), Rules(outlier=1e9))))
    console.print(table)


def alarms_of(run: Result) -> Counter[str]:
    """The kinds of alarms in the events of a run."""
    events = read_run(run.folder).of_kind(EventKind.ALARM)
    return Counter(event.alarm.kind for event in events if event.alarm.kind in KINDS)


def count_false(noise: Callable[[np.random.Generator], float], rules: Rules) -> int:
    """Alarms with one of the two rules on a loss that only varies at random."""
    draw, detector = np.random.default_rng(0), Detector(rules)
    return sum(len(detector.check_loss(step, MEAN + SPREAD * noise(draw))) for step in range(1, STEPS + 1))


if __name__ == "__main__":
    tyro.cli(main)
