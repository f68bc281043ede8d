"""Many runs: the study, its page, what they predict, and how to tune a sequence length warmup cheaply."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimtab.cli.words import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    TERMINATED,
    find_recipe,
    free_folder,
    guarded,
    list_recipes,
    override,
    parse,
    refuse,
    take,
    verb,
)

if TYPE_CHECKING:
    from trimtab.lab.study import Study


@verb("lab", "will this recipe blow up, at which size, and what fixes it? Trains small models and writes a page")
def _lab(words: list[str]) -> int:
    def lab_(
        subject: str = "gpt-lab",
        /,
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
        list: bool = False,
    ) -> int:
        """Train a family of small models over a grid of learning rates, with and without interventions, and write one
        page about it. A study that was stopped goes on with the same command.

        Args:
            subject: a recipe, or your own model and data as module:function
            quick: a smaller study, in two minutes instead of ten
            study: one of the scientific questions that --list lists
            config: your own study, a TOML file (docs/lab.md)
            sizes: depth x width, such as 2x16 2x32 3x64, or a ladder: joint, width, depth
            lrs: learning rates
            arms: sets of switches, joined by +, such as plain qk-norm qk-norm+z-loss; plain has none
            seeds: runs per cell
            steps: of each run
            out: a folder, or an fsspec address such as s3://bucket/study
            executor: local processes, or a Ray cluster
            workers: runs at the same time; as many as there are cores if left out
            list: only list questions and switches
        """
        if list:
            return _list()
        given = [name for name, x in (("--quick", quick), ("--study", study), ("--config", config)) if x]
        if len(given) > 1:
            refuse(f"{' and '.join(given)} are different studies; give one of them")
        if workers is not None and workers < 1:
            refuse(f"--workers {workers} is too few; try --workers 1, or leave it out for one per core")
        asked = guarded(lambda: _choose(subject, quick=quick, question=study, file=config))
        asked = guarded(lambda: _change(asked, sizes=sizes, lrs=lrs, arms=arms, seeds=seeds, steps=steps))
        where = out or str(Path("runs") / _folder_name(asked))
        command = shlex.join(["trimtab", "lab", *words])
        return int(guarded(lambda: _run(asked, where, executor, workers, command)))

    return parse(lab_, words, "lab")


def _choose(subject: str, *, quick: bool, question: str | None, file: Path | None) -> "Study":
    from trimtab.lab.questions import find_question
    from trimtab.lab.study import default_study, quick_study
    from trimtab.lab.study_file import read_study

    if (question or file) and subject != "gpt-lab":
        refuse(f"a study of its own has its own subject; leave {subject} out, or leave --study and --config out")
    if question is not None:
        found: Study = find_question(question).study()
        return found
    if file is not None:
        return read_study(file)
    return quick_study(subject) if quick else default_study(subject)


def _change(study: "Study", **given: Any) -> "Study":
    """The study with the axes that were given on the command line."""
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
        changes["seeds"] = tuple(range(given["seeds"]))
    if given["steps"] is not None:
        if given["steps"] < 1:
            refuse(f"--steps {given['steps']} is too few; try --steps 500")
        changes["base"] = with_steps(study.base, given["steps"])
    return replace(study, **changes)


def _folder_name(study: "Study") -> str:
    """The same study has the same folder, so that the same command goes on with it."""
    from trimtab.lab.study import slug

    names = [study.name] * (study.name != "default") + [study.subject] * (study.subject != "gpt-lab")
    return "-".join(["lab", *map(slug, names)])


def _run(study: "Study", out: str, executor: str, workers: int | None, command: str) -> int:
    """Sweep, read, write the page, say the verdict."""
    from trimtab.lab.executors import make_executor
    from trimtab.lab.sweep import sweep
    from trimtab.report.page import load_drawing

    load_drawing()
    cells = study.cells()
    minutes = f", about {study.minutes:.0f} min on two cores" if study.minutes and study.minutes >= 1 else ""
    print(f"{study.question}\n{len(cells)} {'run' if len(cells) == 1 else 'runs'}{minutes}, into {out}\n")
    summary = sweep(study, out, executor=make_executor(executor, workers))
    if summary.stopped:
        print(f"go on with: {command}")
        return {"interrupted": INTERRUPTED, "terminated": TERMINATED}[summary.stopped]
    _write_page([out], None, [command], study.name)
    return FAILED if summary.failed else 0


def _write_page(folders: list[str], page: Path | None, commands: list[str], question: str | None = None) -> None:
    """The page, its verdict on the terminal, and the answer to a question of ours."""
    from trimtab.analysis.findings import read
    from trimtab.lab.questions import QUESTIONS
    from trimtab.lab.store import fetch, publish
    from trimtab.report import notes_words, verdict_words, write_report

    places = [fetch(folder) for folder in folders]
    findings = read(places)
    written = write_report(findings, page or places[0] / "report.html", commands=commands)
    if page is None:
        publish(folders[0], *(path.name for path in places[0].iterdir() if path.suffix in (".html", ".csv", ".json")))
    print("\n" + "\n".join([*verdict_words(findings), *(f"note: {note}" for note in notes_words(findings))]))
    if question in QUESTIONS:
        marks = {True: "yes", False: "NO", None: "unknown"}
        checks = QUESTIONS[question].answer(findings)
        print("\n" + "\n".join(f"{marks[check.passed]:8}{check.claim}: {check.evidence}" for check in checks))
    print(f"\nthe page: {written}" + (f", copied to {folders[0]}" if page is None and "://" in folders[0] else ""))


def _list() -> int:
    from trimtab.lab.interventions import list_switches
    from trimtab.lab.questions import list_questions

    print("questions (--study NAME)")
    print("\n".join(f"  {name:16} {asks} ({minutes:.0f} min)" for name, asks, minutes in list_questions()))
    print("\nswitches (--arms plain NAME NAME=VALUE+NAME ...)")
    print("\n".join(f"  {name:16} {what}" for name, what in list_switches()))
    print("\nsubjects: module:function, or a recipe\n" + list_recipes())
    return 0


@verb("report", "the page about runs that are there: trimtab report runs/lab")
def _report(words: list[str]) -> int:
    def report_(folders: tuple[str, ...], /, out: Path | None = None) -> int:
        """Write one page about studies, folders of runs or single runs, from their files alone.

        Args:
            folders: one or more; fsspec addresses are fetched
            out: the page; report.html in the first folder if left out
        """
        if not folders:
            refuse("trimtab report needs a folder: a study, a run, or a folder of runs")
        guarded(lambda: _write_page([*folders], out, [shlex.join(["trimtab", "report", *words])]))
        return 0

    return parse(report_, words, "report")


@verb("predict", "the verdict for one size: trimtab predict runs/lab --params 1e9 --lr 0.01")
def _predict(words: list[str]) -> int:
    def predict_(
        folder: str, /, params: float, lr: float | None = None, arm: str | None = None, json: bool = False
    ) -> int:
        """Say whether a recipe will fail at a size that was not trained, from the runs of a study.

        Args:
            folder: of the study
            params: how many parameters, without embedding and head
            lr: one learning rate; all of the study if left out
            arm: one set of interventions; the first of the study if left out
            json: print everything as JSON instead of words
        """
        return int(guarded(lambda: _say_prediction(folder, params, lr, arm, as_json=json)))

    return parse(predict_, words, "predict")


def _say_prediction(folder: str, params: float, lr: float | None, arm: str | None, *, as_json: bool) -> int:
    from trimtab.analysis.findings import read
    from trimtab.analysis.predict import predict_size
    from trimtab.lab.store import fetch
    from trimtab.report import prediction_json, prediction_words

    prediction = predict_size(read([fetch(folder)]), params, lr, arm)
    print(json.dumps(prediction_json(prediction), indent=1) if as_json else "\n".join(prediction_words(prediction)))
    return 0


TUNE_HELP = """usage: trimtab tune-seqlen RECIPE [--out DIR] [--limit 1.3] [--multiples K] [--FIELD VALUE ...]

Trains only the first K times the learning-rate warm-up, with several first lengths and durations. Wanted are the
smallest first length and the longest warm-up whose validation perplexity never exceeds --limit times its best so far.
A search that was stopped goes on with the same --out.
"""


@verb("tune-seqlen", "find a sequence length warmup for a recipe, for a small share of one run")
def _tune_seqlen(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(f"{TUNE_HELP}\n{list_recipes()}")
        return 0 if words else BAD_INPUT
    config, rest = find_recipe(words[0]), words[1:]
    out, rest = take(rest, "--out")
    limit, rest = take(rest, "--limit")
    multiples, rest = take(rest, "--multiples")
    config = override(config, rest, f"trimtab tune-seqlen {words[0]}")
    folder = Path(out) if out is not None else free_folder(Path("runs"), f"tune-{words[0]}")
    given = {"limit": _number(limit, "--limit"), "multiples": _number(multiples, "--multiples", whole=True)}
    guarded(lambda: _tune(config, folder, words[0], {key: x for key, x in given.items() if x is not None}))
    return 0


def _tune(config: Any, folder: Path, recipe: str, options: dict[str, Any]) -> None:
    from trimtab.lab.tune_seqlen import tune_seqlen

    print(tune_seqlen(config, folder, recipe=recipe, **options).words)


def _number(text: str | None, option: str, *, whole: bool = False) -> float | int | None:
    if text is None:
        return None
    try:
        return int(text) if whole else float(text)
    except ValueError:
        refuse(f"{option} needs a {'whole ' if whole else ''}number, got {text!r}")
