"""Commands for studies of many runs."""

import math
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimtab.cli.options import FAILED, configure, exit_code, list_recipes, local, refuse

if TYPE_CHECKING:
    from trimtab.analysis.findings import Findings
    from trimtab.lab.study import Study
    from trimtab.lab.sweep import Summary


def lab(
    subject: str = "gpt-lab",
    /,
    *,
    quick: bool = False,
    study: str | None = None,
    config: Path | None = None,
    sizes: tuple[str, ...] = (),
    lrs: tuple[float, ...] = (),
    arms: tuple[str, ...] = (),
    seeds: int | None = None,
    steps: int | None = None,
    out: str | None = None,
    executor: Literal["local", "ray"] = "local",
    workers: int | None = None,
    minutes: float | None = None,
    extend: bool = False,
    trust: str | None = None,
    list: bool = False,
    command: str = "",
) -> int:
    """Will this recipe diverge, at which size, and what prevents it? Trains small models and writes a page.

    Trains a family of small models over a grid of learning rates, with and without interventions. The same command
    continues a study that was stopped.

    Args:
        subject: a recipe, or your own model and data as package.file:function
        quick: a smaller study, two minutes instead of ten
        study: one of the scientific questions that --list lists
        config: your own study, a TOML file (docs/lab.md)
        sizes: depth x width, such as 2x16 2x32 3x64, or a ladder: joint, width, depth
        lrs: learning rates
        arms: sets of switches, joined by +, such as plain qk-norm qk-norm+z-loss; plain has none
        seeds: runs per cell
        steps: of each run
        out: a folder, or an fsspec address such as s3://bucket/study
        executor: processes of this machine, or a Ray cluster
        workers: runs at the same time; default: one per core
        minutes: longest time on two cores, 90 by default; a recipe that takes longer is scaled down, or refused
        extend: add learning rates below or above the grid while the best one is at its edge, at most three per side
        trust: the subject package.file:function of --config, whose code is run
        list: only list questions and switches
    """
    if list:
        return _list()
    given = [name for name, x in (("--quick", quick), ("--study", study), ("--config", config)) if x]
    if len(given) > 1:
        refuse(f"{' and '.join(given)} are different studies; give one of them")
    if minutes is not None and not 0 < minutes < math.inf:
        refuse(f"--minutes {minutes:g} is not a time; try --minutes 60")
    if workers is not None and workers < 1:
        refuse(f"--workers {workers} is too few; try --workers 1, or leave it out for one per core")
    from trimtab.lab.budget import MINUTES, fit
    from trimtab.lab.executors.local import count_cores
    from trimtab.lab.study import slug

    chosen = _choose(subject, quick=quick, question=study, file=config, trust=trust)
    chosen = _change(chosen, sizes=sizes, lrs=lrs, arms=arms, seeds=seeds, steps=steps)
    if minutes is not None and chosen.minutes is None:
        refuse(f"--minutes is for recipes: how long {chosen.subject} takes is not known before it runs; leave it out")
    slots = (workers or count_cores()) if executor == "local" else 1  # that share the memory of this machine
    chosen = fit(chosen, minutes or MINUTES, slots=slots, scale=not (study or config))
    # The same study has the same folder, so that the same command continues it.
    names = [chosen.name] * (chosen.name != "default") + [chosen.subject] * (chosen.subject != "gpt-lab")
    folder = Path("runs") / "-".join(["lab", *map(slug, names)])
    return _run(chosen, out or str(folder), executor, workers, command, extend=extend)


def _choose(subject: str, *, quick: bool, question: str | None, file: Path | None, trust: str | None) -> "Study":
    from trimtab.lab.questions import Measurement, find_question
    from trimtab.lab.study import default_study, quick_study
    from trimtab.lab.study_file import read_study

    if (question or file) and subject != "gpt-lab":
        refuse(f"--study and --config have their own subject; leave {subject} out, or leave the option out")
    if question is not None:
        asked = find_question(question)
        if isinstance(asked, Measurement):
            refuse(f"{asked.name} is measured, without a grid of runs; try trimtab reproduce {asked.name}")
        return asked.study()
    if file is not None:
        return read_study(file, trust=trust)
    return quick_study(subject) if quick else default_study(subject)


def _change(study: "Study", **given: Any) -> "Study":
    """The study with the axes that the command line gives."""
    from trimtab.lab.sizes import parse_sizes
    from trimtab.lab.study import Arm
    from trimtab.lab.subjects import with_steps

    changes: dict[str, Any] = {}
    if given["sizes"]:
        changes["sizes"] = tuple(size for text in given["sizes"] for size in parse_sizes(text))
    if given["lrs"]:
        changes["lrs"] = given["lrs"]
    if given["arms"]:
        plain = ("plain", "as it is")
        changes["arms"] = tuple(Arm(text, () if text in plain else tuple(text.split("+"))) for text in given["arms"])
    if given["seeds"] is not None:
        changes |= {"seeds": tuple(range(given["seeds"])), "refined": False}
    if given["steps"] is not None:
        if given["steps"] < 1:
            refuse(f"--steps {given['steps']} is too few; try --steps 500")
        changes["base"] = with_steps(study.base, given["steps"])
    return replace(study, **changes)


def _run(study: "Study", out: str, executor: str, workers: int | None, command: str, *, extend: bool) -> int:
    """Run the sweep, write the page, print the verdict."""
    from trimtab.lab.extend import find_edges
    from trimtab.lab.store import open_store
    from trimtab.report import check_page, load_drawing

    load_drawing()  # a missing package is reported before the sweep, not after it, as is a page that is not ours
    check_page(open_store(out).local / "report.html")
    count = len(study.cells())
    minutes = f", about {study.minutes:.0f} min on two cores" if study.minutes and study.minutes >= 1 else ""
    print(f"{study.question}\n{count} {'run' if count == 1 else 'runs'}{minutes}, into {out}\n")
    if executor == "local":
        _prepare_data(study)
    summary = _sweep(study, out, executor, workers, extend=extend)
    if summary.stopped:
        print(f"continue with: {command}")
        return exit_code(summary.stopped)
    findings = _write_page([out], None, command, study.name)
    if edges := find_edges(findings.curves, summary.study.lrs):
        more = "the limit of --extend is reached" if extend else f"to extend it: {command} --extend"
        print(f"the best learning rate is at the edge of the grid: {', '.join(map(str, edges))}; {more}")
    return FAILED if summary.failed else 0


def _prepare_data(study: "Study") -> None:
    """Open the data of a recipe once, here: if it is missing or does not fit, no cell can be run."""
    from trimtab.train.build import build_task
    from trimtab.train.config import ModuleRun
    from trimtab.train.processes import Processes

    if not isinstance(study.base, ModuleRun):
        build_task(study.cells()[0].config, Processes())


def _sweep(study: "Study", out: str, executor: str, workers: int | None, *, extend: bool) -> "Summary":
    """Run the grid; then a longer one while a best learning rate is at its edge, if it may be extended; then what the
    refinement adds around the edge of stability."""
    from trimtab.lab.executors import make_executor
    from trimtab.lab.refine import ROUNDS
    from trimtab.lab.sweep import sweep

    longer: Study | None = study
    refined = 0
    while longer is not None:
        summary = sweep(longer, out, executor=make_executor(executor, workers))
        longer = _extend(study, summary.study, out) if extend and not summary.stopped else None
        if longer is None and study.refined and refined < ROUNDS and not summary.stopped:
            longer, refined = _refine(summary.study, out), refined + 1
    return summary


def _extend(given: "Study", study: "Study", out: str) -> "Study | None":
    from trimtab.analysis.findings import read
    from trimtab.lab.extend import extend, find_edges
    from trimtab.lab.store import fetch

    edges = find_edges(read([fetch(out)]).curves, study.lrs)
    lrs = extend(given.lrs, study.lrs, edges)
    if lrs is None:
        return None
    added = ", ".join(f"{lr:g}" for lr in lrs if lr not in study.lrs)
    print(f"at the edge of the grid: {', '.join(map(str, edges))}; the next learning rate: {added}")
    return replace(study, lrs=lrs)


def _refine(study: "Study", out: str) -> "Study | None":
    from trimtab.analysis.findings import read
    from trimtab.lab.refine import refine
    from trimtab.lab.store import fetch

    more = refine(study, read([fetch(out)]).curves)
    if more is study:
        return None
    print(f"around the edge of stability: {len(more.extra) - len(study.extra)} more runs")
    return more


def _write_page(folders: list[str], page: Path | None, command: str, question: str | None = None) -> "Findings":
    """Write the page; print its verdict and, if the study is one of the questions, the answer."""
    from trimtab.analysis.findings import read
    from trimtab.lab.questions import QUESTIONS, Question
    from trimtab.lab.store import fetch, publish
    from trimtab.report import check_page, notes_words, verdict_words, write_report

    places = [fetch(folder) for folder in folders]
    target = check_page(page or places[0] / "report.html")
    findings = read(places)
    written = write_report(findings, target, commands=[command])
    if page is None:
        publish(folders[0], *(path.name for path in places[0].iterdir() if path.suffix in (".html", ".csv", ".json")))
    print("\n" + "\n".join([*verdict_words(findings), *(f"note: {note}" for note in notes_words(findings))]))
    asked = QUESTIONS.get(question or "")
    if isinstance(asked, Question):
        marks = {True: "yes", False: "NO", None: "unknown"}
        checks = asked.answer(findings)
        print("\n" + "\n".join(f"{marks[check.passed]:8}{check.claim}: {check.evidence}" for check in checks))
    print(f"\nthe page: {written}" + (f", copied to {folders[0]}" if page is None and "://" in folders[0] else ""))
    return findings


def _list() -> int:
    from trimtab.lab.interventions import list_switches
    from trimtab.lab.questions import list_questions

    print("questions (trimtab reproduce NAME; those with runs also --study NAME)")
    print("\n".join(f"  {name:22} {question} ({minutes:.0f} min)" for name, question, minutes in list_questions()))
    print("\nswitches (--arms plain NAME NAME=VALUE+NAME ...)")
    print("\n".join(f"  {name:22} {text}" for name, text in list_switches()))
    print("\nsubjects: package.file:function, or a recipe\n" + list_recipes())
    return 0


def report(folders: tuple[str, ...], /, *, out: Path | None = None, command: str = "") -> int:
    """Write the page about finished runs, from their files: trimtab report runs/lab

    Args:
        folders: studies, folders of runs or single runs; fsspec addresses are fetched
        out: the page; default: report.html in the first folder
    """
    if not folders:
        refuse("trimtab report needs a folder: a study, a run, or a folder of runs")
    _write_page([*folders], out, command)
    return 0


def reproduce(
    questions: tuple[str, ...] = (),
    /,
    *,
    out: Path = Path("runs/reproduce"),
    results: Path = Path("docs/results"),
    again: bool = False,
    pages: bool = False,
    command: str = "",
) -> int:
    """Reproduce the papers: run the study of every question and write the pages with the answers.

    The same command continues where it was stopped: trimtab reproduce, or trimtab reproduce qk-norm z-loss

    Args:
        questions: names (`trimtab lab --list`); default: all
        out: folder of the studies
        results: folder of the pages; the answers are in its folder answers
        again: also questions whose runs are in `out` and have been answered
        pages: only write the pages again, from the answers
    """
    from trimtab.lab.questions import OUT_OF_REACH, QUESTIONS, find_question
    from trimtab.lab.reproduce import reproduce, reword
    from trimtab.report.results import write_results

    for name in questions:
        find_question(name)
    answers = local(results) / "answers"
    stopped = None if pages else reproduce(questions, local(out), answers, again=again)
    found = reword(answers)
    if found:
        asked = [(one.paper, one.name, one.text) for one in QUESTIONS.values()]
        overview, *_ = write_results(found, local(results), out_of_reach=OUT_OF_REACH, asked=asked)
        print(f"the pages: {overview}")
    if stopped is not None:
        print(f"continue with: {command}")
        return exit_code(stopped)
    return 0


def predict(
    folder: str, /, *, params: float, lr: float | None = None, arm: str | None = None, json: bool = False
) -> int:
    """Forecast for a size that was not trained: trimtab predict runs/lab --params 1e6 --lr 0.01

    Args:
        folder: of the study
        params: number of parameters, without embedding and head
        lr: one learning rate; default: all of the study
        arm: one set of interventions; default: the first of the study
        json: print everything as JSON
    """
    from trimtab.analysis.findings import read
    from trimtab.analysis.predict import predict_size
    from trimtab.lab.store import fetch
    from trimtab.report import notes_words, prediction_json, prediction_words

    findings = read([fetch(folder)])
    prediction, notes = predict_size(findings, params, lr, arm), notes_words(findings)
    if json:
        print(dumps(prediction_json(prediction, findings.held_out) | {"notes": notes}, indent=1))
    else:
        words = prediction_words(prediction, findings.held_out)
        print("\n".join([*words, *(f"note: {note}" for note in notes)]))
    return 0


def tune_seqlen(
    recipe: str, /, *, out: Path | None = None, limit: float = 1.3, multiples: int = 3, fields: tuple[str, ...] = ()
) -> int:
    """Find a sequence length warmup for a recipe, at a small share of the cost of one run.

    Each trial trains only the beginning of the run, with one start length and one duration. The result is the smallest
    start length and the longest duration whose validation perplexity never exceeds a multiple of its best so far. The
    same --out continues a search that was stopped.

    Args:
        out: folder of the trials; default: a new one in runs/
        limit: largest perplexity relative to its best so far
        multiples: length of a trial, in multiples of the learning-rate warmup
    """
    config = configure(recipe, fields, "tune-seqlen")
    from trimtab.lab.tune_seqlen import tune_seqlen

    folder = local(out) if out else Path("runs") / f"tune-{recipe}"
    print(tune_seqlen(config, folder, recipe=recipe, limit=limit, multiples=multiples, numbered=out is None).words)
    return 0
