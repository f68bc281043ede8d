"""The smallest setting of the studies: every arm, size and learning rate, one seed, a few steps of tiny models.

All sizes keep their names and have width 16 and different depths, so the rules and figures find the runs they look for.
"""

from dataclasses import replace

import pytest

from trimtab.analysis.answers import thin
from trimtab.analysis.findings import read
from trimtab.lab.questions import QUESTIONS, Question
from trimtab.lab.study import Study
from trimtab.lab.subjects import study_base
from trimtab.report.svg import draw
from trimtab.runs import replace_json
from trimtab.train import train

STEPS = 6
PROXIES = [
    name
    for name, asked in QUESTIONS.items()
    if isinstance(asked, Question) and asked.paper == "P3" and asked.subject == "gpt-lab"
]


def smallest(question: Question) -> Study:
    study = question.study()
    base = replace(study_base("gpt-lab", STEPS), batch=16, eval_batches=1, eval_every=STEPS, checkpoint_every=STEPS)
    small = replace(base, model=replace(base.model, context=16))
    sizes = [replace(s, depth=min(i, s.depth), width=16, heads=1) for i, s in enumerate(study.sizes, start=1)]
    arms = [replace(arm, switches=tuple(map(_shorter, arm.switches))) for arm in study.arms]
    return replace(study, base=small, sizes=tuple(sizes), arms=tuple(arms), seeds=(0,))


def _shorter(switch: str) -> str:
    """`steps` with its value divided by 100."""
    name, _, value = switch.partition("=")
    return f"steps={int(value) // 100}" if name == "steps" else switch


# Those with the most figures always run; the others take a minute together.
ALWAYS = ("qk-norm", "prediction", "kappa")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in ALWAYS else pytest.mark.slow) for x in PROXIES])
def test_the_smallest_setting_of_a_study_is_judged_and_drawn(name, tmp_path):
    question = replace(QUESTIONS[name], seeds=1)
    study = smallest(question)
    replace_json(tmp_path / "study.json", study.to_json())
    for cell in study.cells():
        train(cell.config, tmp_path / cell.folder)
    findings = read([tmp_path])
    checks = question.answer(findings)
    assert checks
    assert all(check.evidence for check in checks)
    assert any(check.passed is not None for check in checks)
    for figure in question.figures(question.evidence(findings)) if question.figures else ():
        assert draw(thin(figure)).startswith("<svg")
