"""Reproduce the papers: the study of every question, one after the other, and its answer in one small file.

    question --sweep--> runs/reproduce/NAME --check--> docs/results/answers/NAME.json --report--> docs/results/*.md

The same call continues: complete runs are not run again, and a question that has its answer is not asked again.
"""

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from trimtab.analysis.answers import Answer, read_answer, to_row
from trimtab.analysis.findings import read
from trimtab.lab.executors import Executor, make_executor
from trimtab.lab.questions import QUESTIONS, Question, find_question
from trimtab.lab.sweep import sweep
from trimtab.runs import End
from trimtab.screen import open_console

Make = Callable[[], Executor]


def reproduce(
    names: Sequence[str],
    out: Path,
    answers: Path,
    *,
    again: bool = False,
    make: Make | None = None,
    console: Console | None = None,
) -> End | None:
    """Answer these questions, or all. Returns why it was stopped, if it was.

    Args:
        out: the folder of the studies
        answers: the folder of the answers
        again: also questions that have an answer
    """
    console = console or open_console()
    chosen = [find_question(name) for name in names] or list(QUESTIONS.values())
    for place, question in enumerate(chosen, start=1):
        path = answers / f"{question.name}.json"
        if path.exists() and not again:
            _say(console, f"{question.name}: {read_answer(path).verdict}, answered before")
            continue
        study = question.study()
        _say(console, f"[{place} of {len(chosen)}] {question.name}: {question.text} About {study.minutes or 0:.0f} min")
        summary = sweep(study, out / question.name, executor=(make or _local)(), console=console)
        if summary.stopped is not None:
            return summary.stopped
        answer = answer_from(question, out / question.name)
        answer.write(answers)
        _say(console, f"{question.name}: {answer.verdict}")
        for check in answer.checks:
            mark = {True: "yes", False: "no", None: "?"}[check.passed]
            _say(console, f"  {mark:4}{check.claim}: {check.evidence}")
    return None


def answer_from(question: Question, folder: Path) -> Answer:
    """The answer that the finished runs of a folder give."""
    findings, study = read([folder]), question.study()
    runs = [result for result in findings.results if result.finished]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Answer(
        name=question.name,
        paper=question.paper,
        question=question.text,
        about=question.about,
        checks=tuple(question.answer(findings)),
        curves=tuple(to_row(curve) for curve in findings.curves),
        design={
            "sizes": [size.name for size in study.sizes],
            "lrs": list(study.lrs),
            "arms": {arm.name: list(arm.switches) for arm in study.arms},
            "seeds": len(study.seeds),
            "steps": study.base.steps,
            "runs": len(runs),
        },
        command=f"trimtab reproduce {question.name}",
        minutes=sum(result.seconds for result in runs) / 60 / cores,
        machine=describe_machine(cores),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )


def describe_machine(cores: int) -> str:
    """The processor, as the system names it."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {cores} cores"


def _local() -> Executor:
    return make_executor("local")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
