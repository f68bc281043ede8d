"""The pages in docs/results are those of the answers beside them, and the answers are to today's questions."""

from pathlib import Path

import pytest

from trimtab.analysis.answers import read_answers
from trimtab.lab.questions import OUT_OF_REACH, QUESTIONS
from trimtab.lab.reproduce import is_current
from trimtab.report.results import summarize, write_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
ANSWERS = read_answers(RESULTS / "answers")


def test_the_pages_are_those_of_the_answers(tmp_path):
    asked = [(one.paper, one.name, one.text) for one in QUESTIONS.values()]
    written = write_results(ANSWERS, tmp_path, out_of_reach=OUT_OF_REACH, asked=asked)
    outdated = [p.name for p in written if p.read_text() != (RESULTS / p.relative_to(tmp_path)).read_text()]
    assert outdated == [], "write them again: trimtab reproduce --pages"
    figures = {path.name for path in written if path.suffix == ".svg"}
    assert {path.name for path in (RESULTS / "figures").iterdir()} == figures


def test_the_readme_has_the_table_of_the_papers():
    assert "\n".join(summarize(ANSWERS)) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_an_answer_is_to_the_question_as_it_is_asked_today(answer):
    question = QUESTIONS[answer.name]
    assert (answer.question, answer.about) == (question.text, question.about), "trimtab reproduce --pages"
    assert is_current(answer, question), f"trimtab reproduce {answer.name}"
