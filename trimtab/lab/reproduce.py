"""Reproduce the papers: the runs of every question, one after the other, and its answer in one small file.

    question --sweep, measure--> runs/reproduce/NAME --check--> docs/results/answers/NAME.json --report--> *.md

The same call continues: complete runs are not run again, and a question with all its runs and an answer to its present
claims is not asked again. Answers of other machines, such as those in the repository, are replaced.
"""

import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from trimtab.analysis.answers import Answer, clean, curves_figure, curves_table, read_answer, read_answers
from trimtab.analysis.findings import Findings, read
from trimtab.analysis.forecasts import critical_of
from trimtab.lab.executors import Executor, make_executor
from trimtab.lab.questions import QUESTIONS, Measurement, Question, find_question
from trimtab.lab.study import Study
from trimtab.lab.sweep import sweep
from trimtab.report.numbers import duration
from trimtab.runs import End, RunError, RunFolder, replace_json, require_json
from trimtab.screen import open_console

Make = Callable[[], Executor]
NUMBERS = "numbers.json"  # of a measurement, in its folder


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
        out: the folder of the runs
        answers: the folder of the answers
        again: also questions that have their runs and their answer
    """
    console = console or open_console()
    chosen = [find_question(name) for name in names] or list(QUESTIONS.values())
    known = {question.name: _known(question, answers) for question in chosen}
    minutes = {one.name: max(one.minutes if (had := known[one.name]) is None else had.minutes, 1) for one in chosen}
    if len(chosen) > 1:
        _say(console, f"{len(chosen)} questions, about {duration(60 * sum(minutes.values()))} on two cores in all")
    for place, question in enumerate(chosen, start=1):
        had = known[question.name]
        if had is not None and not again and _has_run(question, out / question.name):
            _report(console, had)
            continue
        about = f"About {minutes[question.name]:.0f} min"
        _say(console, f"[{place} of {len(chosen)}] {question.name}: {question.text} {about}")
        stopped = _run(question, out / question.name, make or _local, console)
        if stopped is not None:
            return stopped
        answer = answer_from(question, out / question.name)
        answer.write(answers)
        _report(console, answer)
    return None


def _known(question: Question | Measurement, answers: Path) -> Answer | None:
    """The answer to the question as it is today."""
    path = answers / f"{question.name}.json"
    answer = read_answer(path) if path.exists() else None
    return answer if answer is not None and is_current(answer, question) else None


def _has_run(question: Question | Measurement, folder: Path) -> bool:
    """Whether this folder has all runs. An answer that came with the repository is no reason not to run."""
    if isinstance(question, Measurement):
        return (folder / NUMBERS).exists()
    return all(RunFolder(folder / cell.folder).intact for cell in question.study().cells())


def is_current(answer: Answer, question: Question | Measurement) -> bool:
    """Whether an answer has the design of a question as it is today, and its claims."""
    if isinstance(question, Measurement):
        return answer.design == question.design
    runs = answer.design.split(" ", 1)[0]
    nothing = Findings(studies=(), results=(), critical=critical_of([], []))
    claims = [check.claim for check in question.answer(nothing)]
    return answer.design == describe(question.study(), runs) and [check.claim for check in answer.checks] == claims


def reword(answers: Path) -> list[Answer]:
    """All answers, with the texts of today's questions where nothing but these has changed."""
    found = []
    for answer in read_answers(answers):
        question = QUESTIONS.get(answer.name)
        if question is not None and is_current(answer, question):
            texts = replace(answer, question=question.text, about=question.about, second=question.second)
            if texts != answer:
                texts.write(answers)
            answer = texts
        found.append(answer)
    return found


def _run(question: Question | Measurement, folder: Path, make: Make, console: Console) -> End | None:
    if isinstance(question, Question):
        summary = sweep(question.study(), folder, executor=make(), console=console)
        if summary.failed and summary.stopped is None:
            names = ", ".join(name for name, _ in summary.failed)
            raise RunError(f"{question.name}: {names} failed, so there is no answer; the same command tries them again")
        return summary.stopped
    begun = time.monotonic()
    try:
        numbers = question.measure(folder)
    except KeyboardInterrupt:
        return End.INTERRUPTED
    folder.mkdir(parents=True, exist_ok=True)
    replace_json(folder / NUMBERS, {"numbers": clean(numbers), "seconds": time.monotonic() - begun})
    return None


def answer_from(question: Question | Measurement, folder: Path) -> Answer:
    """The answer that the finished runs, or the numbers, of a folder give."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = _from_runs(question, folder, cores) if isinstance(question, Question) else _from_numbers(question, folder)
    return Answer(
        name=question.name,
        paper=question.paper,
        question=question.text,
        about=question.about,
        second=question.second,
        command=f"trimtab reproduce {question.name}",
        machine=describe_machine(cores),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        **found,
    )


def _from_runs(question: Question, folder: Path, cores: int) -> dict[str, Any]:
    findings, study = read([folder]), question.study()
    evidence = question.evidence(findings)
    runs = [result for result in findings.results if result.finished]
    curves = findings.curves
    return {
        "checks": tuple(question.check(evidence)),
        "figures": (
            *((curves_figure(curves),) if question.curves else ()),
            *(question.figures(evidence) if question.figures else ()),
        ),
        "tables": (
            *((curves_table(curves),) if question.curves else ()),
            *(question.tables(evidence) if question.tables else ()),
        ),
        "design": describe(study, len(runs)),
        "minutes": sum(result.seconds for result in runs) / 60 / cores,
    }


def _from_numbers(question: Measurement, folder: Path) -> dict[str, Any]:
    saved = require_json(folder / NUMBERS)
    numbers = saved["numbers"]
    return {
        "checks": tuple(question.check(numbers)),
        "figures": tuple(question.figures(numbers) if question.figures else ()),
        "tables": tuple(question.tables(numbers) if question.tables else ()),
        "design": question.design,
        "minutes": saved["seconds"] / 60,
    }


def describe(study: Study, runs: int | str) -> str:
    """What was run, in a sentence."""
    arms = "; ".join(f"{arm.name}: {', '.join(arm.switches) or 'as it is'}" for arm in study.arms)
    sizes, lrs = ", ".join(size.name for size in study.sizes), ", ".join(f"{lr:g}" for lr in study.lrs)
    plural = "seed" if len(study.seeds) == 1 else "seeds"
    return (
        f"{runs} runs of {study.subject}, {study.base.steps} steps, sizes {sizes}, {len(study.seeds)} {plural}, "
        f"learning rates {lrs}. Arms: {arms}."
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


def _report(console: Console, answer: Answer) -> None:
    """The verdict and every claim."""
    _say(console, f"{answer.name}: {answer.verdict}")
    for check in answer.checks:
        mark = {True: "yes", False: "no", None: "?"}[check.passed]
        _say(console, f"  {mark:4}{check.claim}: {check.evidence}")


def _local() -> Executor:
    return make_executor("local")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
