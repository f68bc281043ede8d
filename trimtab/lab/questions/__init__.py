"""Questions: one file each, with a study that can answer it and the rule by which the answer passes.

    trimtab lab --study qk-norm                QUESTIONS["qk-norm"].study(), then .answer(findings)

A new question is a new file and a name in the list below.
"""

from types import ModuleType

from trimtab.lab.questions import (
    attention,
    batch,
    beta2,
    decay,
    eight_bits,
    eps,
    kappa,
    mup,
    prediction,
    qk_norm,
    qk_norm_kind,
    seqlen_warmup,
    steps,
    switchback,
    warmup,
    width_depth,
    z_loss,
)
from trimtab.lab.questions.asking import Check
from trimtab.lab.subjects import did_you_mean
from trimtab.train.config import ConfigError

_ALL: tuple[ModuleType, ...] = (qk_norm, z_loss, warmup, decay, width_depth, mup, steps, qk_norm_kind, batch)
_ALL += (attention, prediction, kappa, eps, eight_bits, switchback, beta2, seqlen_warmup)
QUESTIONS: dict[str, ModuleType] = {question.NAME: question for question in _ALL}


def find_question(name: str) -> ModuleType:
    known = name.replace("_", "-")
    if known not in QUESTIONS:
        raise ConfigError(
            f"there is no question {name!r}{did_you_mean(known, QUESTIONS)} There are {', '.join(QUESTIONS)}"
        )
    return QUESTIONS[known]


def list_questions() -> list[tuple[str, str, float]]:
    """Rows of (name, what it asks, minutes on two cores)."""
    studies = [question.study() for question in _ALL]
    return [(study.name, study.question, round(study.minutes or 0, 1)) for study in studies]


__all__ = ["QUESTIONS", "Check", "find_question", "list_questions"]
