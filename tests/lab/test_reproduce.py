"""`trimtab reproduce`: a study, its answer, its page; continued after a stop; nothing is asked twice."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from tests.train.runs import quiet
from trimtab.analysis.answers import (
    MOST_POINTS,
    Answer,
    Check,
    Figure,
    Line,
    OutOfReach,
    Panel,
    Table,
    judge_all,
    read_answer,
    read_answers,
    thin,
)
from trimtab.lab import reproduce as module
from trimtab.lab.executors.worker import run_cell
from trimtab.lab.questions import QUESTIONS
from trimtab.lab.questions.all_parts import together_memory
from trimtab.lab.questions.question import Measurement, Question, judge
from trimtab.lab.reproduce import answer_from, reproduce
from trimtab.report.results import write_results
from trimtab.report.svg import draw
from trimtab.runs import RunError, replace_json


def check(found):
    yield judge("it learns", found.best("plain", size="2x16"), lambda x: x < 6)
    yield judge("it learns everything", found.best("plain", size="2x16"), lambda x: x < 0.1)


TINY = Question(
    "tiny",
    "Does it learn? A paper says so.",
    {"plain": ()},
    check,
    sizes=("2x16",),
    lrs=(0.01, 0.1),
    seeds=1,
    steps=20,
    paper="P4",
)


@pytest.mark.parametrize(
    ("passed", "verdict"),
    [
        ((True, True), "reproduced"),
        ((True, False, False), "partly"),
        ((False, True), "partly"),
        ((False, True, False), "not"),
        ((True, None), "no answer"),
        ((), "no answer"),
    ],
)
def test_the_verdict_follows_from_the_claims(passed, verdict):
    assert judge_all([Check("c", x, "e") for x in passed]) == verdict


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(module, "QUESTIONS", {"tiny": TINY})
    monkeypatch.setattr(module, "find_question", lambda name: {"tiny": TINY}[name])


@pytest.mark.usefixtures("tiny")
def test_a_question_is_run_answered_and_shown(tmp_path, monkeypatch):
    answers = tmp_path / "results" / "answers"
    assert reproduce([], tmp_path / "out", answers, console=quiet()) is None
    (answer,) = read_answers(answers)
    assert answer.verdict == "partly"
    assert (answer.question, answer.about) == ("Does it learn?", "A paper says so.")
    assert answer.design.startswith("2 runs of gpt-lab, 20 steps, sizes 2x16, 1 seed, learning rates 0.01, 0.1.")
    (curves,) = answer.figures
    assert len(curves.panels[0].lines[0].y) == 2
    again = answer_from(TINY, tmp_path / "out" / "tiny")
    assert (again.checks, again.design) == (answer.checks, answer.design)
    # What has an answer is not asked again, unless it is wanted; then complete runs are not run again.
    monkeypatch.setattr(module, "sweep", lambda *_, **__: pytest.fail("run again"))
    said = Console(file=io.StringIO(), width=200)
    reproduce(["tiny"], tmp_path / "out", answers, console=said)
    assert "yes it learns: plain: " in said.file.getvalue()
    # An answer without its runs, as those of the repository, is no reason not to run.
    with pytest.raises(pytest.fail.Exception, match="run again"):
        reproduce(["tiny"], tmp_path / "elsewhere", answers, console=quiet())
    monkeypatch.undo()
    overview, *pages = write_results(read_answers(answers), tmp_path / "results")
    text = overview.read_text()
    assert "| P4 | [Does it learn?](p4.md#tiny) | partly | yes | 1 of 2 |" in text
    page, figure = pages
    assert "| it learns everything | no |" in page.read_text()
    assert "| 2x16 | plain | " in page.read_text()
    assert page.read_text().count("figures/tiny-curves.svg") == 1
    assert figure.read_text().startswith("<svg")


def weigh(numbers):
    yield judge("it is heavy", {"kg": numbers["kg"]}, lambda x: x > 1)


def scale(numbers):
    yield Figure(
        name="scale", title="Weights", x="day", y="kg", panels=[Panel("all", [Line("a", [1, 2], [2.5, None])])]
    )


@pytest.fixture
def heavy(monkeypatch):
    made = Measurement(
        *("heavy", "Is it heavy?", lambda folder: {"kg": 2.5}, weigh, 1.0, "P1", "A scale."),
        figures=scale,
        tables=lambda numbers: [Table("Scales", ("weight", "counted"), [(2048.5, 2048)])],
    )
    monkeypatch.setattr(module, "find_question", lambda name: made)
    return made


@pytest.mark.usefixtures("heavy")
def test_what_is_measured_without_a_study_is_answered_too(tmp_path):
    answers = tmp_path / "results" / "answers"
    assert reproduce(["heavy"], tmp_path / "out", answers, console=quiet()) is None
    (answer,) = read_answers(answers)
    assert (answer.verdict, answer.design, answer.checks[0].evidence) == ("reproduced", "A scale.", "kg: 2.5")
    reach = [OutOfReach("P1", "it floats", "no water", "a lake")]
    asked = [("P1", "heavy", "Is it heavy?"), ("P2", "light", "Is it light?")]
    overview, page, figure = write_results([answer], tmp_path / "results", out_of_reach=reach, asked=asked)
    assert "Of 2 questions: 1 reproduced; 1 not run yet." in overview.read_text()
    assert "| P2 | Is it light? | not run yet: `trimtab reproduce light` |" in overview.read_text()
    assert "| P1 | it floats | no water | a lake |" in overview.read_text()
    assert figure.name == "heavy-scale.svg"
    assert "| 2,050 | 2,048 |" in page.read_text()  # a count keeps all its digits
    assert figure.read_text().count("<circle") == 1


@pytest.mark.parametrize(
    ("value", "text"), [(0.012345, "0.01235"), (12345.6, "12,346"), (1e9, "1e+09"), (math.inf, "inf")]
)
def test_numbers_of_a_claim_have_four_digits_and_large_ones_all(value, text):
    assert judge("it is heavy", {"kg": value}, lambda x: x > 1).evidence == f"kg: {text}"


def test_a_figure_has_few_points_and_draws_what_its_axes_can_show():
    line = Line("a", list(range(1, 1001)), [float(x - 1) for x in range(1, 1001)], [], [])
    figure = Figure(name="f", title="<t>", x="x", y="y", panels=[Panel("p", [line])], log_y=True)
    thinned = thin(figure).panels[0].lines[0]
    assert len(thinned.x) <= MOST_POINTS
    assert thinned.x[-1] == 1000
    text = draw(figure)
    assert "&lt;t&gt;" in text
    assert len(text.split('points="')[1].split('"')[0].split()) == 999  # a logarithm of 0 is not drawn
    nothing = Figure(name="f", title="t", x="x", y="y", panels=[Panel("p", [Line("a", [1], [None])])])
    assert "no finished runs" in draw(nothing)


def test_a_damaged_answer_is_refused_with_the_remedy(tmp_path):
    Answer(name="x", paper="P1", question="?", about="", checks=(Check("c", True, "e"),)).write(tmp_path)
    data = json.loads((tmp_path / "x.json").read_text())
    del data["checks"]
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(RunError, match="checksum"):
        read_answer(tmp_path / "x.json")


STUDIES = ["dilemma", "length", "seqlen-warmup", "pacing", "headline", "together", "together-edge", "together-pairs"]
# What makes a measurement small: arguments of its function.
MEASURED = {
    "resume": {"steps": 40, "warmup": 40},
    "tune-seqlen": {"steps": 40, "durations": (20,), "seeds": (0,)},
    "together-memory": {"size": "1x64", "settings": ("plain", "all")},
}


ALWAYS = ("dilemma", "headline", "together-edge", "resume")


def _some_slow(names):
    return [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _some_slow(STUDIES))
def test_the_smallest_setting_of_every_study_gives_an_answer(name, tmp_path):
    """Few steps and rows of a narrow model, one seed: every check has an outcome, and figures and tables are drawn."""
    asked = QUESTIONS[name]
    small = {"batch": 16, "eval_batches": 1} if "batch" in asked.fields else {"eval_batches": 1}
    steps = 100 if name == "pacing" else 20  # its two stages change at step 75
    # The headline needs learning rates below and above the best one, also of a run of a few steps.
    lrs = (1e-5, 0.01, 3.0) if name == "headline" else asked.lrs
    asked = replace(asked, steps=steps, seeds=1, lrs=lrs, fields=asked.fields | small)
    study = asked.study()
    narrow = replace(study, sizes=tuple(replace(size, depth=1, width=32, heads=2) for size in study.sizes))
    for cell in narrow.cells():
        run_cell(tmp_path / cell.folder, cell.config)
    replace_json(tmp_path / "study.json", narrow.to_json())
    answer = answer_from(asked, tmp_path)
    assert [check for check in answer.checks if check.passed is None] == []
    assert all(draw(figure).startswith("<svg") for figure in answer.figures)
    assert all(table.rows for table in answer.tables)


@pytest.mark.parametrize("name", _some_slow(MEASURED))
def test_the_smallest_setting_of_every_measurement_gives_an_answer(name, tmp_path):
    asked = QUESTIONS[name]
    numbers = json.loads(json.dumps(asked.measure(tmp_path, **MEASURED[name])))
    assert asked.answer(numbers)[0].passed is not None
    assert all(table.rows for table in asked.tables(numbers))


def test_the_memory_of_a_child_is_not_that_of_its_parent():
    ballast = np.ones(2**27)  # 1 GiB, resident
    assert together_memory.peak_memory(together_memory.base("1x32")) < ballast.nbytes
