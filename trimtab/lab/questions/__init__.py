"""Questions of the papers: one file each, with a study that can answer it and the rules that decide its claims.

    trimtab lab --study qk-norm                QUESTIONS["qk-norm"].study(), then .answer(findings)

A new question is a new file with a QUESTION, and its name in the list below.
"""

from trimtab.analysis.answers import Check, OutOfReach
from trimtab.hints import did_you_mean
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
from trimtab.lab.questions.question import Measurement, Question
from trimtab.train.config import ConfigError

_PROXIES = (
    qk_norm,
    z_loss,
    warmup,
    decay,
    width_depth,
    mup,
    steps,
    qk_norm_kind,
    batch,
    attention,
    prediction,
    kappa,
    eps,
)
_OTHERS = (eight_bits, switchback, beta2, seqlen_warmup)
QUESTIONS: dict[str, Question | Measurement] = {
    module.QUESTION.name: module.QUESTION for module in (*_PROXIES, *_OTHERS)
}

# Claims that need scale, data or hardware that a laptop does not have.
OUT_OF_REACH = (
    OutOfReach(
        "P1",
        "int8 training saves 13 to 25 % of the time on A100 GPUs",
        "no GPU",
        "`python -m bench.gpu` on one",
    ),
)


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
