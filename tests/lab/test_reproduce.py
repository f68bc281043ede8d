"""`trimtab reproduce`: a study, its answer, its page; continued after a stop; nothing is asked twice."""

import json

import pytest

from tests.train.runs import quiet
from trimtab.analysis.answers import Answer, Check, judge_all, read_answer, read_answers
from trimtab.lab import reproduce as module
from trimtab.lab.questions.question import Question, judge
from trimtab.lab.reproduce import answer_from, reproduce
from trimtab.report.results import write_results
from trimtab.runs import RunError


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
    assert answer.design["runs"] == 2
    assert len(answer.curves[0]["loss"]) == 2
    again = answer_from(TINY, tmp_path / "out" / "tiny")
    assert (again.checks, again.design["runs"]) == (answer.checks, 2)
    # What has an answer is not asked again, unless it is wanted; then complete runs are not run again.
    monkeypatch.setattr(module, "sweep", lambda *_, **__: pytest.fail("run again"))
    reproduce(["tiny"], tmp_path / "out", answers, console=quiet())
    monkeypatch.undo()
    overview, *pages = write_results(read_answers(answers), tmp_path / "results")
    text = overview.read_text()
    assert "| P4 | [Does it learn?](p4.md#tiny) | partly | 1 of 2 |" in text
    page, figure = pages
    assert "| it learns everything | no |" in page.read_text()
    assert page.read_text().count("figures/tiny.svg") == 1
    assert figure.read_text().startswith("<svg")


def test_a_damaged_answer_is_refused_with_the_remedy(tmp_path):
    Answer(name="x", paper="P1", question="?", about="", checks=(Check("c", True, "e"),)).write(tmp_path)
    data = json.loads((tmp_path / "x.json").read_text())
    del data["checks"]
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(RunError, match="checksum"):
        read_answer(tmp_path / "x.json")
