"""Questions of the papers: one file each, with a study that can answer it and the rules that decide its claims.

    trimtab lab --study qk-norm                QUESTIONS["qk-norm"].study(), then .answer(findings)

A folder has the questions of one paper, and the claims that runs of this size cannot show. A new question is a new file
with a QUESTION, and its name in the `__init__` of the folder.
"""

from trimtab.analysis.answers import Check
from trimtab.hints import did_you_mean
from trimtab.lab.questions import all_parts, lengths, low_precision, optimizers, proxies
from trimtab.lab.questions.question import Measurement, Question
from trimtab.train.config import ConfigError

PAPERS = (proxies, optimizers, low_precision, lengths)
QUESTIONS: dict[str, Question | Measurement] = {
    asked.name: asked for paper in (*PAPERS, all_parts) for asked in paper.QUESTIONS
}
OUT_OF_REACH = tuple(claim for paper in PAPERS for claim in paper.OUT_OF_REACH)


def find_question(name: str) -> Question | Measurement:
    found = QUESTIONS.get(name.replace("_", "-"))
    if found is None:
        hint = did_you_mean(name, QUESTIONS)
        raise ConfigError(f"there is no question {name!r}.{hint} The questions are {', '.join(QUESTIONS)}")
    return found


def list_questions() -> list[tuple[str, str, float]]:
    """Rows of (name, question, minutes on two cores)."""
    return [(name, one.text, round(one.minutes, 1)) for name, one in QUESTIONS.items()]


__all__ = ["OUT_OF_REACH", "QUESTIONS", "Check", "Measurement", "Question", "find_question", "list_questions"]
